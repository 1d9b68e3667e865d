"""Whether our own GPU kernels run here."""

from __future__ import annotations

import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_OLDEST = (8, 0)  # compute capability: tensor cores for tf32 and bf16


def layers_for(x: Tensor) -> Any:
    """Layers by our own kernels, or None where they do not run."""
    return _layers() if x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) else None


@cache
def _layers() -> Any:
    """None without Triton, which torch's packages for CUDA on Linux bring, where it fails, or on old GPUs."""
    if torch.version.cuda is None or torch.cuda.get_device_capability() < _OLDEST or find_spec("triton") is None:
        return None
    try:
        from fedc2i.engine.executors.stacked import gpu_layers

        gpu_layers.max_pool(torch.zeros(1, 1, 1, 1, device="cuda"), 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # e.g. no C compiler, or a broken installation
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not work here, so training runs by torch's slower kernels: {reason}", stacklevel=2)
        return None
    return gpu_layers
