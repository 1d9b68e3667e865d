"""Processes that share a GPU: how many there are, and how each opens it.

On a CPU a run uses the worker processes of its executor instead, and runs are computed one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fedc2i.core.settings import cores
from fedc2i.runs.cuda_mps import await_service

if TYPE_CHECKING:  # torch is not imported before processes are started
    from fedc2i.runs.plan import Plan
    from fedc2i.runs.settings import RunSettings

MOST_PROCESSES = 4
CORES_EACH = 2  # a process computes with one thread and writes with another
MEMORY_SHARE = 0.8  # of the GPU's memory, for all processes
OPEN_BYTES = 2**30  # of its memory that a process takes when it has opened it, with its libraries
STEP_COPIES = 4  # of what a step is estimated to hold: Digit-5's runs took up to 6 GB, with patches, graphs, and models
_TRIES, _PAUSE = 5, 0.5  # processes that open a GPU in the same instant may find it busy


def most_processes(workers: int) -> int:
    """How many processes may share a GPU, where ``workers`` is the setting."""
    if os.name != "posix":
        return 1
    return workers or max(1, min(MOST_PROCESSES, cores() // CORES_EACH))


def processes_for(config: RunSettings, plans: Iterable[Plan] = ()) -> int:
    """How many processes compute runs side by side: one on a CPU, on a GPU as many of ``plans`` as fit into it."""
    device = config.torch_device()
    most = most_processes(config.workers) if device.type == "cuda" else 1
    if most == 1 or config.workers:
        return most
    import torch

    room = MEMORY_SHARE * torch.cuda.get_device_properties(device).total_memory  # opens nothing
    return max(1, min(most, int(room / max(map(memory_of, plans), default=OPEN_BYTES))))


def memory_of(plan: Plan) -> float:
    """About the bytes of GPU memory that a run takes with all its seeds; infinite if that cannot be estimated."""
    from fedc2i.engine.executors.stacked.chunks import bytes_of_a_step

    clients = plan.config.participants(len(plan.federation.names)) * len(plan.config.seeds)
    try:
        step = bytes_of_a_step(plan.model, plan.federation.input, plan.config.batch_size)
    except Exception:  # a module of a user that cannot run like this
        return float("inf")
    return OPEN_BYTES + STEP_COPIES * clients * step


def open_gpu() -> None:
    """Opens the GPU in this process, and loads what every run needs first, which takes seconds.

    Raises:
        RuntimeError: if it cannot be opened.
    """
    import torch

    await_service()
    for left in reversed(range(_TRIES)):
        try:
            image = torch.ones(1, 1, 8, 8, device="cuda")
            torch.conv2d(image, image).sum().item()
            torch.mm(image[0, 0], image[0, 0]).sum().item()
            break
        except RuntimeError:
            if not left or not torch.cuda.is_available():
                raise
            time.sleep(_PAUSE * (1 + os.getpid() % 8 / 8))  # not all at the same time again
    from fedc2i.engine.executors.stacked.kernel_support import layers_for
    from fedc2i.runs.fingerprint import code_digest

    layers_for(image)
    code_digest()
