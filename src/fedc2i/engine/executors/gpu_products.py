"""Convolutions in IEEE single precision as products of matrices, by cuBLAS.

cuDNN's repeatable convolutions are slow in this precision: with them a step of ResNet-18 took 12 ms in place of 7.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedc2i.engine.executors.stacked import gpu_layers
from fedc2i.engine.executors.stacked.gpu_layers import Pair
from fedc2i.engine.executors.stacked.kernel_support import second_order
from fedc2i.engine.executors.stacked.kernel_uses import counted
from fedc2i.engine.executors.stacked.patches import positions

_MOST_BYTES = 2**28  # of a layer's patches, which stay until the backward pass
_LONG, _PART_ROWS = 32768, 512  # rows of a weight's gradient: a sum this long is faster in parts


def fits(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> bool:
    """Whether `convolution` needs a bearable amount of memory."""
    rows, columns = _positions(x, weight, stride, padding, dilation)
    return min(rows, columns) > 0 and 4 * len(x) * rows * columns * weight[0].numel() <= _MOST_BYTES


@counted
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair) -> Tensor:
    """``torch.conv2d`` of images ``(B, C, H, W)`` with the channels last in memory; the result is of the same kind."""
    own: Tensor = _Convolution.apply(x, weight, bias, stride, padding, dilation)  # type: ignore[no-untyped-call]
    return own


def _positions(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> Pair:
    found = (positions(x.shape[2 + a] + 2 * padding[a], weight.shape[2 + a], stride[a], dilation[a]) for a in (0, 1))
    rows, columns = found
    return rows, columns


def _matrix(weight: Tensor) -> Tensor:
    """``(O, k·k·C)``, without a copy where the channels are last in memory."""
    return weight.permute(0, 2, 3, 1).flatten(1)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: Pair, padding: Pair, dilation: Pair
    ) -> Tensor:
        images, kernel = x.permute(0, 2, 3, 1).contiguous(), (weight.shape[2], weight.shape[3])
        places = _positions(x, weight, stride, padding, dilation)
        ctx.is_plain = kernel == stride == (1, 1) and padding == (0, 0)  # a pixel is a patch
        patches = images
        if not ctx.is_plain:
            patches = gpu_layers.unfold(images, places, kernel, stride, dilation, 0, False, padding)
        patches = patches.reshape(-1, weight[0].numel())
        matrix = _matrix(weight)
        out = patches @ matrix.mT if bias is None else torch.addmm(bias, patches, matrix.mT)
        ctx.geometry, ctx.places = (stride, padding, dilation), places
        ctx.save_for_backward(x, weight, bias, patches)
        return out.reshape(len(x), *places, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, weight, bias, patches = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: torch's operations have one
            found = second_order(lambda *own: torch.conv2d(*own, *ctx.geometry), (x, weight, bias), grad_output)
            return *found, None, None, None
        slope = grad_output.permute(0, 2, 3, 1).reshape(-1, len(weight))
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _images(slope @ _matrix(weight), x, weight, ctx)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(slope, patches)
            dw = dw.reshape(len(weight), *weight.shape[2:], weight.shape[1]).permute(0, 3, 1, 2)
        if bias is not None and ctx.needs_input_grad[2]:
            db = slope.sum(0)
        return dx, dw, db, None, None, None


def _images(patches: Tensor, x: Tensor, weight: Tensor, ctx: Any) -> Tensor:
    """Gradients of patches, added up."""
    (count, channels, height, width), (stride, padding, dilation) = x.shape, ctx.geometry
    if ctx.is_plain:
        return patches.reshape(count, height, width, channels).permute(0, 3, 1, 2)
    kernel = (weight.shape[2], weight.shape[3])
    patches = patches.reshape(count, -1, patches.shape[1])
    size = (height, width, channels)
    return gpu_layers.fold(patches, size, ctx.places, kernel, stride, dilation, 0, padding).permute(0, 3, 1, 2)


def _weight_gradient(slope: Tensor, patches: Tensor) -> Tensor:
    """``slope.mT @ patches``, ``(O, k·k·C)``."""
    rows = len(patches)
    if rows < _LONG or rows % _PART_ROWS:
        return slope.mT @ patches
    parts = rows // _PART_ROWS
    return torch.bmm(slope.reshape(parts, -1, slope.shape[1]).mT, patches.reshape(parts, -1, patches.shape[1])).sum(0)
