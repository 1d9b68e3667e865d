"""In this process at first, over worker processes as soon as that pays: a short run should not wait for workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedc2i.engine.executors.base import ClientBatch, Executor, Received, Trained
from fedc2i.engine.executors.workers import pool
from fedc2i.engine.records import Metrics

_WORTH = 4.0  # seconds of work left, for which it is worth to start workers


class Adaptive:
    """`Executor` that may change places between two rounds; numbers are the same in both."""

    def __init__(self, here: Executor, move: Callable[[pool.Pool], Executor], workers: int, rounds: int) -> None:
        """Begins ``here``; ``move`` makes the executor over a pool of so many ``workers``."""
        self._now, self._move, self._workers = here, move, workers
        self._rounds, self._begun, self._began = rounds, 0, time.perf_counter()
        self._settled = False

    def train(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local runs, uploads, and scores of the trained models if asked for."""
        if not self._settled:
            self._consider()
        self._begun += 1
        return self._now.train(turns, evaluate)

    def _consider(self) -> None:
        """Moves if the workers are there and idle; has them started if enough is left to do."""
        there = pool.running(self._workers)
        try:
            if there is None:
                so_far = (time.perf_counter() - self._began) / max(self._begun, 1)
                if self._begun and so_far * (self._rounds - self._begun) > _WORTH:
                    pool.start(self._workers)
            elif there.take():
                if there.is_ready():
                    self._settled = True
                    self._now = self._move(there)
                else:
                    there.give_back()
        except Exception:  # no process to be had, or a model or method that cannot be sent to one: it stays here
            self._settled = True
            if there is not None:
                there.discard()

    def personalise(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Received]:
        """Starts of the next round, diagnostics, and scores of the starts if asked for."""
        return self._now.personalise(turns, evaluate)

    def evaluate(self, turns: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of every client on its own data."""
        return self._now.evaluate(turns)

    def close(self) -> None:
        """The run is over."""
        self._now.close()
