"""Whether our own GPU kernels run here, and the layers they make up."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor

from fedc2i.engine.executors.stacked import kernel_uses

Pair = tuple[int, int]
_OLDEST = (8, 0)  # compute capability: tensor cores for tf32 and bf16


class Layers(Protocol):
    """The layers that `gpu_layers` computes, see there."""

    def is_supported(self, x: Tensor) -> bool:
        """Whether `convolution` computes in this tensor's precision."""

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
        """Of images with the channels last, by a kernel that stores no patches."""

    def max_pool(self, x: Tensor, side: int) -> Tensor:
        """Of squares that do not overlap."""

    def unfold(
        self,
        x: Tensor,
        positions: Pair,
        kernel: Pair,
        stride: Pair,
        dilation: Pair,
        extra: int,
        one: bool,
        padding: Pair = (0, 0),
    ) -> Tensor:
        """Patches of images."""

    def fold(
        self,
        patches: Tensor,
        image: tuple[int, int, int],
        positions: Pair,
        kernel: Pair,
        stride: Pair,
        dilation: Pair,
        extra: int,
        padding: Pair = (0, 0),
    ) -> Tensor:
        """Images of patches, added up where they overlap."""


def layers_for(x: Tensor) -> Layers | None:
    """Layers by our own kernels, or None where they do not run."""
    return _layers() if x.is_cuda and x.dtype in (torch.float32, torch.bfloat16) else None


def second_order(
    operation: Callable[..., Tensor], inputs: Sequence[Tensor | None], grad_output: Tensor
) -> list[Tensor | None]:
    """The gradients of an operation of torch that have gradients themselves; None for inputs that need none.

    Aliases end the way back at the inputs: images may have been made with the very same weights.
    """
    own = [given.view_as(given) if given is not None and given.requires_grad else given for given in inputs]
    wanted = [given for given in own if given is not None and given.requires_grad]
    out = operation(*own)
    found = iter(torch.autograd.grad(out, wanted, grad_output.to(out.dtype), create_graph=True))
    return [next(found) if given is not None and given.requires_grad else None for given in own]


@cache
def _layers() -> Layers | None:
    """None without Triton, which torch's packages for CUDA on Linux bring, where it fails, or on old GPUs."""
    if torch.version.cuda is None or torch.cuda.get_device_capability() < _OLDEST or find_spec("triton") is None:
        return None
    try:
        from fedc2i.engine.executors.stacked import gpu_layers

        with kernel_uses.trial():
            gpu_layers.max_pool(torch.zeros(1, 1, 1, 1, device="cuda"), 1)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # e.g. no C compiler, or a broken installation
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        warnings.warn(f"Triton does not work here, so training runs by torch's slower kernels: {reason}", stacklevel=2)
        return None
    return gpu_layers
