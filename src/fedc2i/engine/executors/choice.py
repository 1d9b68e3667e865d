"""Which executor a run gets: the one asked for, or with ``auto`` the one that is fastest here.

Executors are imported when a run needs them.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

from fedc2i.core.settings import EngineSettings, cores
from fedc2i.data.federation import InputSpec
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch, Executor, LoopedExecutor, OnClient, Personalised, Trained
from fedc2i.engine.records import Scored

if TYPE_CHECKING:
    from fedc2i.engine.executors.workers.pool import Pool

_LARGE = 2**27  # bytes of a step's activations: up to this, stacked clients are faster than one after the other
_WORTH = 4.0  # seconds of remaining work that make it worthwhile to start workers


def new_executor(
    contexts: Sequence[RunContext],
    data: Sequence[ClientData],
    settings: EngineSettings,
    device: torch.device,
    on_client: OnClient | None,
) -> Executor:
    """The executor of a run whose seeds have these contexts."""
    on_gpu = device.type == "cuda"
    if settings.executor == "stacked" or (settings.executor == "auto" and on_gpu and _should_stack(contexts[0], data)):
        from fedc2i.engine.executors.stacked.executor import StackedExecutor

        return StackedExecutor(data, settings.clients_at_once, contexts)
    if on_gpu and settings.executor in ("auto", "looped"):
        from fedc2i.engine.executors.captured import CapturedExecutor

        return CapturedExecutor(data, on_client)

    def over(pool: Pool) -> Executor:
        from fedc2i.engine.executors.workers.executor import WorkersExecutor

        return WorkersExecutor(pool, contexts, data, settings.threads, on_client)

    looped = LoopedExecutor(data, on_client)
    jobs = settings.participants(len(data)) * len(contexts)
    workers = min(settings.workers or max(1, cores() // settings.threads), jobs)
    if settings.executor == "workers":
        from fedc2i.engine.executors.workers.pool import lease

        return over(lease(workers))
    if settings.executor == "looped" or workers == 1 or os.name != "posix":
        return looped
    return AdaptiveExecutor(looped, over, workers, settings.rounds)


def _should_stack(context: RunContext, data: Sequence[ClientData]) -> bool:
    """Whether ``auto`` stacks clients on a GPU: unless one client keeps it busy, or the model prevents it.

    A warning explains the latter.
    """
    from fedc2i.engine.executors.stacked import chunks, compatibility

    sample, most = InputSpec.of(data[0].train.x), max(own.samples for own in data)
    with suppress(Exception):  # a module that cannot run so: `obstacle` says why
        if chunks.bytes_kept(context.model, sample, min(context.training.batch_size, most)) > _LARGE:
            return False
    reason = compatibility.obstacle(context.model, sample)
    if reason is not None:
        warnings.warn(f"executor=auto: looped, because model '{context.model.name}' {reason}", stacklevel=2)
    return reason is None


class AdaptiveExecutor:
    """`Executor` in this process at first, over worker processes as soon as that pays; the numbers are the same.

    A short run does not wait for workers.
    """

    def __init__(self, here: Executor, move: Callable[[Pool], Executor], workers: int, rounds: int) -> None:
        """Begins ``here``; ``move`` makes the executor over a pool of that many ``workers``."""
        self._now, self._move, self._workers = here, move, workers
        self._rounds, self._rounds_begun, self._began = rounds, 0, time.perf_counter()
        self._settled = False

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        if not self._settled and (self._pays() or "fedc2i.engine.executors.workers.pool" in sys.modules):
            self._consider_moving()
        self._rounds_begun += 1
        return self._now.train(batches, evaluate)

    def _pays(self) -> bool:
        """Whether enough work remains to start workers."""
        seconds = (time.perf_counter() - self._began) / max(self._rounds_begun, 1)
        return self._rounds_begun > 0 and seconds * (self._rounds - self._rounds_begun) > _WORTH

    def _consider_moving(self) -> None:
        """Moves if workers, of this run or an earlier one, are ready and idle; starts them if that pays."""
        from fedc2i.engine.executors.workers import pool

        found = pool.running(self._workers)
        try:
            if found is None:
                if self._pays():
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

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[list[Scored]]:
        """See `Executor.evaluate`."""
        return self._now.evaluate(batches)

    def close(self) -> None:
        """See `Executor.close`."""
        self._now.close()
