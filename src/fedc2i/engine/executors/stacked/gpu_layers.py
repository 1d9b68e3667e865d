"""Convolutions and max-pooling of stacked clients on a GPU, by our own `kernels`: patches are not stored.

Images have the channels last. An axis that ``vmap`` adds becomes more models, more images or more outputs of one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedc2i.engine.executors.stacked import kernels

Pair = tuple[int, int]
_SHARE = 1024  # rows of a weight's gradient that a program sums, where a model has few programs
_FEW = 8


def is_supported(x: Tensor) -> bool:
    """Whether `convolution` computes in this tensor's precision: on tensor cores, so not in IEEE single precision."""
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _precision() == "tf32")


def convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
    """Images ``(B, H, W, C)``, weights ``(O, k, k, C)`` and biases ``(O,)`` to ``(B, H', W', O)``."""
    one = (x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0))
    own: Tensor = _Convolution.apply(*one, padding)  # type: ignore[no-untyped-call]
    return own.squeeze(0)  # not [0], whose gradient is copied into zeros


def max_pool(x: Tensor, side: int) -> Tensor:
    """The maxima of squares of ``side`` pixels, ``(B, H, W, C)`` to ``(B, H', W', C)``."""
    own: Tensor = _Pool.apply(x, side)[0]  # type: ignore[no-untyped-call]
    return own


def _precision() -> str:
    return str(torch.backends.cuda.matmul.fp32_precision)


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _power(count: int, least: int, most: int) -> int:
    """The power of 2 that holds ``count``, within bounds."""
    return min(max(1 << (count - 1).bit_length(), least), most)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
    x, weight, bias = x.contiguous(), weight.contiguous(), bias.contiguous()
    (models, images, height, width, channels), (_, outputs, *kernel, _) = x.shape, weight.shape
    tall, wide = height + 2 * padding[0] - kernel[0] + 1, width + 2 * padding[1] - kernel[1] + 1
    out = x.new_empty(models, images, tall, wide, outputs)
    rows, taps = images * tall * wide, kernel[0] * kernel[1]
    block = _power(outputs, 16, 64)
    wide_pixel = 64 if x.dtype == torch.bfloat16 else 32
    steps = next((size for size in (wide_pixel, 32, 16) if channels % size == 0), 0)
    few = _power(taps * channels, 16, 128) if x.dtype == torch.float32 else 16
    how = (128, block, steps or few)
    stages = (3 if any(padding) else 4) if steps else (1 if few == 128 else 3)
    kernels.convolve[_blocks(rows, how[0]), models, _blocks(outputs, block)](
        x, weight, bias, out, rows, outputs, height, width, tall, wide, channels, kernel[1], taps, *padding, "tf32",
        *how, num_warps=4, num_stages=stages,
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, slope: Tensor, kernel: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    x, slope = x.contiguous(), slope.contiguous()
    (models, images, height, width, channels), (tall, wide, outputs) = x.shape, slope.shape[2:]
    rows, taps = images * tall * wide, kernel[0] * kernel[1]
    how = TILES[x.dtype]
    tiles, block = _blocks(taps * channels, how["block_taps"]), _power(outputs, 16, 64)
    shares = 1 if tiles > _FEW else _blocks(rows, _SHARE)  # however many models: others do not change a model's bits
    part = _blocks(_blocks(rows, shares), how["block_sum"]) * how["block_sum"]
    shares = _blocks(rows, part)
    out = torch.empty(models, shares, outputs, *kernel, channels, device=x.device)
    sums = torch.empty(models, shares, outputs, device=x.device)
    kernels.weight_gradient[tiles, models, shares * _blocks(outputs, block)](
        x, slope, out, sums, rows, outputs, part, height, width, tall, wide, channels, kernel[1], taps, *padding,
        "tf32", block_outputs=block, **how,
    )  # fmt: skip
    found = (out[:, 0], sums[:, 0]) if shares == 1 else (out.sum(1), sums.sum(1))
    return found[0].to(x.dtype), found[1].to(x.dtype)


# With 2 warps Triton uses the older matrix instructions, which read single precision in either order.
TILES: dict[torch.dtype, dict[str, int]] = {
    torch.float32: {"block_taps": 64, "block_sum": 32, "num_warps": 2, "num_stages": 3},
    torch.bfloat16: {"block_taps": 128, "block_sum": 64, "num_warps": 4, "num_stages": 3},
}


class _Convolution(torch.autograd.Function):
    """Images ``(G, B, H, W, C)``, weights ``(G, O, k, k, C)`` and biases ``(G, O)`` of G models."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
        return _convolve(x, weight, bias, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.padding = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = _transposed(slope, weight, ctx.padding) if ctx.needs_input_grad[0] else None
        kernel = (weight.shape[2], weight.shape[3])
        return dx, *_WeightGradient.apply(x, slope, kernel, ctx.padding), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Any:
        count, (at, *others, _) = info.batch_size, in_dims
        if others == [None, None]:  # more images for the same models
            out = _Convolution.apply(x.movedim(at, 1).flatten(1, 2), weight, bias, padding)  # type: ignore[no-untyped-call]
            return out.unflatten(1, (count, -1)), 1
        weight, bias = _first(weight, others[0], count), _first(bias, others[1], count)
        if at is None:  # more outputs for the same images
            weight, bias = weight.movedim(0, 1).flatten(1, 2), bias.movedim(0, 1).flatten(1, 2)
            out = _Convolution.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
            return out.unflatten(4, (count, -1)), 4
        merged = (own.flatten(0, 1) for own in (_first(x, at, count), weight, bias))
        out = _Convolution.apply(*merged, padding)  # type: ignore[no-untyped-call]
        return out.unflatten(0, (count, -1)), 0


def _transposed(slope: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """The gradient of a convolution's images: a convolution with the turned weights."""
    turned = weight.flip(2, 3).permute(0, 4, 2, 3, 1)
    around = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    return _Convolution.apply(slope, turned, weight.new_zeros(turned.shape[:2]), around)  # type: ignore[no-untyped-call,no-any-return]


def _first(tensor: Tensor, at: int | None, count: int) -> Tensor:
    """With the new axis first, also where all share a tensor."""
    return tensor.expand(count, *tensor.shape) if at is None else tensor.movedim(at, 0)


class _WeightGradient(torch.autograd.Function):
    """Of images ``(G, B, H, W, C)`` and gradients ``(G, B, H', W', O)``: those of weights and biases."""

    @staticmethod
    def forward(x: Tensor, slope: Tensor, kernel: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        return _weight_gradient(x, slope, kernel, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, slope, _, ctx.padding = inputs
        ctx.save_for_backward(x, slope)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple[Any, ...]:
        x, slope = ctx.saved_tensors
        along = _Convolution.apply(x, weight, bias, ctx.padding)  # type: ignore[no-untyped-call]
        return _transposed(slope, weight, ctx.padding), along, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, slope: Tensor, kernel: Pair, padding: Pair) -> Any:
        count, (at, other, *_) = info.batch_size, in_dims
        if at is None:
            slope = slope.movedim(other, 4).flatten(4, 5)
            found = _WeightGradient.apply(x, slope, kernel, padding)  # type: ignore[no-untyped-call]
            return tuple(own.unflatten(1, (count, -1)) for own in found), (1, 1)
        x, slope = _first(x, at, count).flatten(0, 1), _first(slope, other, count).flatten(0, 1)
        found = _WeightGradient.apply(x, slope, kernel, padding)  # type: ignore[no-untyped-call]
        return tuple(own.unflatten(0, (count, -1)) for own in found), (0, 0)


class _Pool(torch.autograd.Function):
    """The maxima of squares of ``side`` pixels, ``(N, H, W, C)`` to ``(N, H', W', C)``, and which pixel each is."""

    @staticmethod
    def forward(x: Tensor, side: int) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        count, height, width, channels = x.shape
        out = x.new_empty(count, height // side, width // side, channels)
        index = torch.empty_like(out, dtype=torch.uint8)
        block = 4096 // x.element_size()
        kernels.pool[(_blocks(out.numel(), block),)](
            x, out, index, out.numel(), height, width, *out.shape[1:3], channels, side, block
        )
        return out, index

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.side = inputs
        ctx.size = tuple(x.shape[1:3])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # no zeros for the index
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, slope: Tensor | None, _: Any) -> tuple[Any, ...]:
        if slope is None:
            return None, None
        return _Unpool.apply(slope, ctx.saved_tensors[0], ctx.size, ctx.side), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, side: int) -> Any:
        found = _Pool.apply(x.movedim(in_dims[0], 0).flatten(0, 1), side)  # type: ignore[no-untyped-call]
        return tuple(own.unflatten(0, (info.batch_size, -1)) for own in found), (0, 0)


class _Unpool(torch.autograd.Function):
    """The gradient of `_Pool`."""

    @staticmethod
    def forward(slope: Tensor, index: Tensor, size: Pair, side: int) -> Tensor:
        slope, index = slope.contiguous(), index.contiguous()
        out = slope.new_empty(len(slope), *size, slope.shape[3])
        block = 4096 // slope.element_size()
        kernels.unpool[(_blocks(out.numel(), block),)](
            slope, index, out, out.numel(), *size, *slope.shape[1:], side, block
        )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, _, ctx.side = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Any, ...]:
        (index,), side = ctx.saved_tensors, ctx.side
        tall, wide = index.shape[1:3]
        squares = slope[:, : tall * side, : wide * side].reshape(len(slope), tall, side, wide, side, -1)
        squares = squares.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (side², N, H', W', C)
        return squares.gather(0, index[None].to(torch.int64))[0], None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], slope: Tensor, index: Tensor, size: Pair, side: int) -> Any:
        own = (
            _first(part, at, info.batch_size).flatten(0, 1) for part, at in ((slope, in_dims[0]), (index, in_dims[1]))
        )
        out = _Unpool.apply(*own, size, side)  # type: ignore[no-untyped-call]
        return out.unflatten(0, (info.batch_size, -1)), 0


def unfold(x: Tensor, places: Pair, kernel: Pair, stride: Pair, dilation: Pair, more: int = 0) -> Tensor:
    """Images ``(N, H, W, C)`` to patches ``(N, L, k·k·C + |more|)`` at ``places`` of the kernel.

    The first number after a patch is 1, or 0 if ``more`` is negative; the others are 0.
    """
    count, height, width, channels = x.shape
    rows, taps = count * places[0] * places[1], kernel[0] * kernel[1]
    size = taps * channels + abs(more)
    out = x.new_empty(count, places[0] * places[1], size)
    block = 64 if channels % 64 == 0 else _power(size, 16, 128)
    one = float(more > 0)
    kernels.unfold[(_blocks(rows, 32),)](
        x, out, rows, height, width, *places, one, size, channels, kernel[1], taps, *stride, *dilation, 32, block
    )
    return out


def fold(
    patches: Tensor,
    image: tuple[int, int, int],
    places: Pair,
    kernel: Pair,
    stride: Pair,
    dilation: Pair,
    more: int = 0,
) -> Tensor:
    """Patches added up to images ``(N, H, W, C)``; of each the last ``more`` numbers are ignored."""
    out, taps = patches.new_empty(len(patches), *image), kernel[0] * kernel[1]
    size = taps * image[2] + more
    kernels.fold[(_blocks(out.numel(), 512),)](
        patches, out, out.numel(), *image[:2], *places, size, image[2], kernel[1], taps, *stride, *dilation, 512
    )
    return out
