"""Which executor a run gets: the one asked for, or with ``auto`` the one that is fastest here.

Executors are imported when a run needs them.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from fedc2i.core.settings import EngineSettings, cores
from fedc2i.data.federation import InputSpec
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch, Executor, LoopedExecutor, OnClient, Personalised, Trained
from fedc2i.engine.records import Metrics
from fedc2i.models.model import Model

if TYPE_CHECKING:
    from fedc2i.engine.executors.workers.pool import Pool

_WORTH = 4.0  # seconds of remaining work that make it worthwhile to start workers


def new_executor(
    contexts: Sequence[RunContext],
    data: Sequence[ClientData],
    settings: EngineSettings,
    device: torch.device,
    on_client: OnClient | None,
) -> Executor:
    """The executor of a run whose seeds have these contexts."""
    if settings.executor == "stacked" or (settings.executor == "auto" and _can_stack(contexts[0].model, data, device)):
        from fedc2i.engine.executors.stacked.executor import StackedExecutor

        return StackedExecutor(data, settings.clients_at_once, contexts)

    def over(pool: Pool) -> Executor:
        from fedc2i.engine.executors.workers.executor import WorkersExecutor

        return WorkersExecutor(pool, contexts, data, settings.threads, on_client)

    looped = LoopedExecutor(data, on_client)
    jobs = settings.participants(len(data)) * len(contexts)
    workers = min(settings.workers or max(1, cores() // settings.threads), jobs)
    if settings.executor == "workers":
        from fedc2i.engine.executors.workers.pool import lease

        return over(lease(workers))
    if settings.executor == "looped" or device.type != "cpu" or workers == 1 or os.name != "posix":
        return looped
    return AdaptiveExecutor(looped, over, workers, settings.rounds)


def _can_stack(model: Model, data: Sequence[ClientData], device: torch.device) -> bool:
    """Whether ``auto`` stacks clients: on a GPU, unless the model prevents it, which a warning explains."""
    if device.type != "cuda":
        return False
    from fedc2i.engine.executors.stacked import compatibility

    reason = compatibility.obstacle(model, InputSpec.of(data[0].train.x))
    if reason is not None:
        warnings.warn(f"executor=auto: looped, because model '{model.name}' {reason}", stacklevel=2)
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

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[Metrics]:
        """See `Executor.evaluate`."""
        return self._now.evaluate(batches)

    def close(self) -> None:
        """See `Executor.close`."""
        self._now.close()
