"""Layers of large models by our own kernels, where torch's are slow for images with the channels last in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.engine.executors.stacked import kernel_support
from fedc2i.engine.executors.stacked.vmap_rules import pair
from fedc2i.training.local import AnyLayout, any_layout


class OwnLayers(AnyLayout):
    """Within this context a module's layers give torch's results, up to rounding."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result: Tensor | None = None  # what is unusual is left to torch
        if func is F.group_norm:
            result = _group_norm(*args, **kwargs)
        elif func is torch.conv2d:
            result = _convolve(*args, **kwargs)
        return any_layout(func, args, kwargs) if result is None else result


def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor | None:
    """``F.group_norm`` of images ``(B, C, H, W)``; with autocast it stays in bf16, as BatchNorm does."""
    if not _is_for_us(input) or weight is None or bias is None or input.shape[1] % num_groups:
        return None
    if not all(own.shape == input.shape[1:2] and own.is_contiguous() for own in (weight, bias)):
        return None
    from fedc2i.engine.executors import gpu_norms  # imports Triton

    return gpu_norms.group_norm(input, num_groups, weight, bias, eps)


def _convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:
    """``torch.conv2d`` in IEEE single precision."""
    is_exact = torch.backends.cudnn.conv.fp32_precision == "ieee"  # type: ignore[attr-defined]
    if not is_exact or groups != 1 or isinstance(padding, str) or weight.dtype != torch.float32:
        return None
    if not _is_for_us(input) or input.dtype != torch.float32 or torch.is_autocast_enabled(input.device.type):
        return None
    if input.shape[1] != weight.shape[1] or (bias is not None and bias.shape != weight.shape[:1]):
        return None  # torch says what is wrong
    from fedc2i.engine.executors import gpu_products, winograd  # import Triton

    geometry = (pair(stride), pair(padding), pair(dilation))
    if winograd.fits(input, weight, *geometry):
        return winograd.convolution(input, weight, bias, geometry[1])
    if gpu_products.fits(input, weight, *geometry):
        return gpu_products.convolution(input, weight, bias, *geometry)
    return None


def _is_for_us(x: Tensor) -> bool:
    """Images with the channels last in memory, where our kernels run."""
    if _is_transformed() or x.ndim != 4 or not x.numel() or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    return kernel_support.layers_for(x) is not None


def _is_transformed() -> bool:
    """Whether this runs within ``vmap`` or ``grad`` of ``torch.func``, which look into operations."""
    return torch._C._functorch.peek_interpreter_stack() is not None
