"""Patches of images for a convolution as a matrix product, and their sum where they overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.engine.executors.stacked import kernel_support
from fedc2i.engine.executors.stacked.kernel_support import Pair


def patches_of(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, extra: int = 0) -> Tensor:
    """``(N, C, H, W)`` images to ``(N, L, k·k·C + extra)`` patches, one for each of L positions of the kernel.

    The first of the ``extra`` numbers is 1, the others are 0.
    """
    made: Tensor = _Patches.apply(x, kernel, stride, dilation, extra, extra > 0)  # type: ignore[no-untyped-call]
    return made


def positions(size: int, kernel: int, stride: int, dilation: int) -> int:
    """How many places a kernel has along an axis."""
    return (size - dilation * (kernel - 1) - 1) // stride + 1


class _Patches(torch.autograd.Function):
    """See `patches_of`; without ``one`` all extra numbers are 0."""

    @staticmethod
    def forward(x: Tensor, kernel: Pair, stride: Pair, dilation: Pair, extra: int, one: bool) -> Tensor:
        x = x.permute(0, 2, 3, 1).contiguous()  # channels last: a patch's row is one piece of memory
        count, height, width, channels = x.shape
        n, h, w, c = height * width * channels, width * channels, channels, 1  # x.stride() may differ for sides of 1
        rows, columns = (positions((height, width)[a], kernel[a], stride[a], dilation[a]) for a in (0, 1))
        if (layers := kernel_support.layers_for(x)) is not None:
            return layers.unfold(x, (rows, columns), kernel, stride, dilation, extra, one)
        shape, strides = (
            (count, rows, columns, *kernel, channels),
            (n, h * stride[0], w * stride[1], h * dilation[0], w * dilation[1], c),
        )
        size, many = kernel[0] * kernel[1] * channels, 16 // x.element_size()
        aligned = channels % many == 0 and x.storage_offset() % many == 0
        if x.dtype in (torch.float32, torch.bfloat16) and aligned:  # copied 16 bytes at a time: twice as fast
            words = x.view(-1).view(torch.complex128)
            windows = words.as_strided((*shape[:-1], channels // many), (*(step // many for step in strides[:-1]), 1))
            patches = windows.reshape(count, rows * columns, size // many).view(x.dtype)
        else:
            patches = x.as_strided(shape, strides).reshape(count, rows * columns, size)
        if not extra:
            return patches
        patches = F.pad(patches, (0, extra))
        patches[..., size] = float(one)
        return patches

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.geometry, _ = inputs
        ctx.size = tuple(x.shape[1:])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return _Images.apply(gradient, ctx.size, *ctx.geometry), *[None] * 5  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return _over_images(_Patches, in_dims[0], x, *rest)


class _Images(torch.autograd.Function):
    """The other way: patches are added up where they overlap; of each the last ``extra`` numbers are ignored."""

    @staticmethod
    def forward(
        patches: Tensor,
        size: tuple[int, int, int],
        kernel: Pair,
        stride: Pair,
        dilation: Pair,
        extra: int,
    ) -> Tensor:
        channels, height, width = size
        rows, columns = (positions(size[1 + a], kernel[a], stride[a], dilation[a]) for a in (0, 1))
        if (layers := kernel_support.layers_for(patches)) is not None:
            where = (height, width, channels), (rows, columns), kernel, stride, dilation, extra
            return layers.fold(patches.contiguous(), *where).permute(0, 3, 1, 2)
        patches = patches[..., : patches.shape[2] - extra]
        windows = patches.reshape(len(patches), rows, columns, *kernel, channels)
        x = patches.new_zeros(len(patches), height, width, channels)
        for i in range(kernel[0]):
            for j in range(kernel[1]):
                top, left = i * dilation[0], j * dilation[1]
                below, right = top + (rows - 1) * stride[0] + 1, left + (columns - 1) * stride[1] + 1
                x[:, top : below : stride[0], left : right : stride[1]] += windows[:, :, :, i, j]
        return x.permute(0, 3, 1, 2)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.geometry = inputs[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        found = _Patches.apply(gradient, *ctx.geometry, False)  # type: ignore[no-untyped-call]
        return found, *[None] * 5

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], patches: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return _over_images(_Images, in_dims[0], patches, *rest)


def _over_images(function: type[torch.autograd.Function], dim: int, tensor: Tensor, *rest: Any) -> tuple[Tensor, int]:
    """Many clients' images are just more images."""
    tensor = tensor.movedim(dim, 0)
    result = function.apply(tensor.flatten(0, 1), *rest)  # type: ignore[no-untyped-call]
    return result.unflatten(0, tensor.shape[:2]), 0
