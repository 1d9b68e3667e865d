"""In this process at first, over worker processes as soon as that pays: a short run should not wait for workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fedc2i.engine.executors.base import ClientBatch, Executor, Personalised, Trained
from fedc2i.engine.executors.workers import pool
from fedc2i.engine.records import Metrics

_WORTH = 4.0  # seconds of remaining work that make it worthwhile to start workers


class AdaptiveExecutor:
    """`Executor` that may move to workers between two rounds; the numbers are the same in both."""

    def __init__(self, here: Executor, move: Callable[[pool.Pool], Executor], workers: int, rounds: int) -> None:
        """Begins ``here``; ``move`` makes the executor over a pool of that many ``workers``."""
        self._now, self._move, self._workers = here, move, workers
        self._rounds, self._rounds_begun, self._began = rounds, 0, time.perf_counter()
        self._settled = False

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        if not self._settled:
            self._consider_moving()
        self._rounds_begun += 1
        return self._now.train(batches, evaluate)

    def _consider_moving(self) -> None:
        """Moves if the workers are ready and idle; starts them if enough work remains."""
        found = pool.running(self._workers)
        try:
            if found is None:
                seconds = (time.perf_counter() - self._began) / max(self._rounds_begun, 1)
                if self._rounds_begun and seconds * (self._rounds - self._rounds_begun) > _WORTH:
                    pool.start(self._workers)
            elif found.take():
                if found.is_ready():
                    self._settled = True
                    self._now = self._move(found)
                else:
                    found.give_back()
        except Exception:  # no process could start, or a model or method cannot be sent to one: stay here
            self._settled = True
            if found is not None:
                found.discard()

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """See `Executor.personalise`."""
        return self._now.personalise(batches, evaluate)

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[Metrics]:
        """See `Executor.evaluate`."""
        return self._now.evaluate(batches)

    def close(self) -> None:
        """See `Executor.close`."""
        self._now.close()
