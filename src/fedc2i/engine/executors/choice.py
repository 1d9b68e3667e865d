"""Which executor a run gets: the one asked for, or with ``auto`` the one that is fastest here."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence

import torch

from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.adaptive import AdaptiveExecutor
from fedc2i.engine.executors.base import Executor
from fedc2i.engine.executors.looped import LoopedExecutor
from fedc2i.engine.executors.stacked import compatibility
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.executors.workers.executor import WorkersExecutor
from fedc2i.engine.executors.workers.pool import Pool, cores, lease
from fedc2i.engine.settings import EngineSettings
from fedc2i.models.model import Model


def new_executor(
    contexts: Sequence[RunContext],
    data: Sequence[ClientData],
    settings: EngineSettings,
    device: torch.device,
    on_client: Callable[[int, int], None] | None,
) -> Executor:
    """The executor of a run whose seeds have these contexts."""
    if settings.executor == "stacked" or (settings.executor == "auto" and _can_stack(contexts[0].model, data, device)):
        return StackedExecutor(data, settings.clients_at_once, [context.attacks for context in contexts])

    def over(pool: Pool) -> WorkersExecutor:
        return WorkersExecutor(pool, contexts, data, settings.threads, on_client)

    looped = LoopedExecutor(data, on_client)
    jobs = settings.participants(len(data)) * len(contexts)
    workers = min(settings.workers or max(1, cores() // settings.threads), jobs)
    if settings.executor == "workers":
        return over(lease(workers))
    if settings.executor == "looped" or device.type != "cpu" or workers == 1 or os.name != "posix":
        return looped
    return AdaptiveExecutor(looped, over, workers, settings.rounds)


def _can_stack(model: Model, data: Sequence[ClientData], device: torch.device) -> bool:
    """Whether ``auto`` stacks clients: on a GPU, unless the model prevents it, which a warning explains."""
    if device.type != "cuda":
        return False
    reason = compatibility.obstacle(model, data[0].train.x.shape[1:])
    if reason is not None:
        warnings.warn(f"executor=auto: looped, because model '{model.name}' {reason}", stacklevel=2)
    return reason is None
