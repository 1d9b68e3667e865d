"""Convolutions and max-pooling of stacked clients on a GPU, by our own `kernels`: patches are not stored.

Images have the channels last. An axis that ``vmap`` adds becomes more models, more images or more outputs of one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedc2i.engine.executors.stacked import kernels
from fedc2i.engine.executors.stacked.kernel_uses import counted

Pair = tuple[int, int]

# Sizes of blocks, chosen from timings of a wide LeNet's layers on an H200. They fix the order of sums, so the bits.
CONVOLVE = {"block_rows": 128, "num_warps": 4}
# With 2 warps Triton uses the older matrix instructions, which read single precision in either order.
WEIGHT_GRADIENT: dict[torch.dtype, dict[str, int]] = {
    torch.float32: {"block_taps": 64, "block_sum": 32, "num_warps": 2, "num_stages": 3},
    torch.bfloat16: {"block_taps": 128, "block_sum": 64, "num_warps": 4, "num_stages": 3},
}
_CHUNK_ROWS = 1024  # rows of a weight's gradient that a program sums, where a model has few tiles of weights
_FEW_TILES = 8
_POOL_BYTES = 4096
_UNFOLD_ROWS = 32
_FOLD_NUMBERS = 512


def is_supported(x: Tensor) -> bool:
    """Whether `convolution` computes in this tensor's precision: on tensor cores, so not in IEEE single precision."""
    return x.dtype == torch.bfloat16 or (x.dtype == torch.float32 and _precision() == "tf32")


@counted
def convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: Pair) -> Tensor:
    """Images ``(B, H, W, C)``, weights ``(O, k, k, C)`` and biases ``(O,)`` to ``(B, H', W', O)``."""
    one = (x.unsqueeze(0), weight.unsqueeze(0), bias.unsqueeze(0))
    own: Tensor = _Convolution.apply(*one, padding)  # type: ignore[no-untyped-call]
    return own.squeeze(0)  # not [0], whose gradient is copied into zeros


@counted
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
    out_height, out_width = height + 2 * padding[0] - kernel[0] + 1, width + 2 * padding[1] - kernel[1] + 1
    out = x.new_empty(models, images, out_height, out_width, outputs)
    rows, taps = images * out_height * out_width, kernel[0] * kernel[1]
    block = _power(outputs, 16, 64)
    largest = 64 if x.dtype == torch.bfloat16 else 32
    of_pixel = next((size for size in (largest, 32, 16) if channels % size == 0), 0)
    of_patch = _power(taps * channels, 16, 128) if x.dtype == torch.float32 else 16
    stages = (3 if any(padding) else 4) if of_pixel else (1 if of_patch == 128 else 3)
    kernels.convolve[_blocks(rows, CONVOLVE["block_rows"]), models, _blocks(outputs, block)](
        x, weight, bias, out, rows, outputs, height, width, out_height, out_width, channels, kernel[1], taps, *padding,
        "tf32", block_outputs=block, block_sum=of_pixel or of_patch, num_stages=stages, **CONVOLVE,
    )  # fmt: skip
    return out


def _weight_gradient(x: Tensor, grad_output: Tensor, kernel: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
    x, grad_output = x.contiguous(), grad_output.contiguous()
    (models, images, height, width, channels), (out_height, out_width, outputs) = x.shape, grad_output.shape[2:]
    rows, taps = images * out_height * out_width, kernel[0] * kernel[1]
    sizes = WEIGHT_GRADIENT[x.dtype]
    tiles, block = _blocks(taps * channels, sizes["block_taps"]), _power(outputs, 16, 64)
    # However many models there are: others do not change a model's bits.
    chunks = 1 if tiles > _FEW_TILES else _blocks(rows, _CHUNK_ROWS)
    chunk_rows = _blocks(_blocks(rows, chunks), sizes["block_sum"]) * sizes["block_sum"]
    chunks = _blocks(rows, chunk_rows)
    out = torch.empty(models, chunks, outputs, *kernel, channels, device=x.device)
    sums = torch.empty(models, chunks, outputs, device=x.device)
    kernels.weight_gradient[tiles, models, chunks * _blocks(outputs, block)](
        x, grad_output, out, sums, rows, outputs, chunk_rows, height, width, out_height, out_width,
        channels, kernel[1], taps, *padding, "tf32", block_outputs=block, **sizes,
    )  # fmt: skip
    found = (out[:, 0], sums[:, 0]) if chunks == 1 else (out.sum(1), sums.sum(1))
    return found[0].to(x.dtype), found[1].to(x.dtype)


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
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        dx = _transposed(grad_output, weight, ctx.padding) if ctx.needs_input_grad[0] else None
        kernel = (weight.shape[2], weight.shape[3])
        return dx, *_WeightGradient.apply(x, grad_output, kernel, ctx.padding), None  # type: ignore[no-untyped-call]

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


def _transposed(grad_output: Tensor, weight: Tensor, padding: Pair) -> Tensor:
    """The gradient of a convolution's images: a convolution with the turned weights."""
    turned = weight.flip(2, 3).permute(0, 4, 2, 3, 1)
    around = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    return _Convolution.apply(grad_output, turned, weight.new_zeros(turned.shape[:2]), around)  # type: ignore[no-untyped-call,no-any-return]


def _first(tensor: Tensor, at: int | None, count: int) -> Tensor:
    """With the new axis first, also where all share a tensor."""
    return tensor.expand(count, *tensor.shape) if at is None else tensor.movedim(at, 0)


class _WeightGradient(torch.autograd.Function):
    """Of images ``(G, B, H, W, C)`` and gradients ``(G, B, H', W', O)``: those of weights and biases."""

    @staticmethod
    def forward(x: Tensor, grad_output: Tensor, kernel: Pair, padding: Pair) -> tuple[Tensor, Tensor]:
        return _weight_gradient(x, grad_output, kernel, padding)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, grad_output, _, ctx.padding = inputs
        ctx.save_for_backward(x, grad_output)

    @staticmethod
    def backward(ctx: Any, weight: Tensor, bias: Tensor) -> tuple[Any, ...]:
        x, grad_output = ctx.saved_tensors
        along = _Convolution.apply(x, weight, bias, ctx.padding)  # type: ignore[no-untyped-call]
        return _transposed(grad_output, weight, ctx.padding), along, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, grad_output: Tensor, kernel: Pair, padding: Pair) -> Any:
        count, (at, other, *_) = info.batch_size, in_dims
        if at is None:
            grad_output = grad_output.movedim(other, 4).flatten(4, 5)
            found = _WeightGradient.apply(x, grad_output, kernel, padding)  # type: ignore[no-untyped-call]
            return tuple(own.unflatten(1, (count, -1)) for own in found), (1, 1)
        x, grad_output = _first(x, at, count).flatten(0, 1), _first(grad_output, other, count).flatten(0, 1)
        found = _WeightGradient.apply(x, grad_output, kernel, padding)  # type: ignore[no-untyped-call]
        return tuple(own.unflatten(0, (count, -1)) for own in found), (0, 0)


class _Pool(torch.autograd.Function):
    """The maxima of squares of ``side`` pixels, ``(N, H, W, C)`` to ``(N, H', W', C)``, and which pixel each is."""

    @staticmethod
    def forward(x: Tensor, side: int) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        count, height, width, channels = x.shape
        out = x.new_empty(count, height // side, width // side, channels)
        index = torch.empty_like(out, dtype=torch.uint8)
        block = _POOL_BYTES // x.element_size()
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
    def backward(ctx: Any, grad_output: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad_output is None:
            return None, None
        return _Unpool.apply(grad_output, ctx.saved_tensors[0], ctx.size, ctx.side), None  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, side: int) -> Any:
        found = _Pool.apply(x.movedim(in_dims[0], 0).flatten(0, 1), side)  # type: ignore[no-untyped-call]
        return tuple(own.unflatten(0, (info.batch_size, -1)) for own in found), (0, 0)


class _Unpool(torch.autograd.Function):
    """The gradient of `_Pool`."""

    @staticmethod
    def forward(grad_output: Tensor, index: Tensor, size: Pair, side: int) -> Tensor:
        grad_output, index = grad_output.contiguous(), index.contiguous()
        out = grad_output.new_empty(len(grad_output), *size, grad_output.shape[3])
        block = _POOL_BYTES // grad_output.element_size()
        kernels.unpool[(_blocks(out.numel(), block),)](
            grad_output, index, out, out.numel(), *size, *grad_output.shape[1:], side, block
        )
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, index, _, ctx.side = inputs
        ctx.save_for_backward(index)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        (index,), side = ctx.saved_tensors, ctx.side
        out_height, out_width = index.shape[1:3]
        pooled = grad_output[:, : out_height * side, : out_width * side]
        squares = pooled.reshape(len(pooled), out_height, side, out_width, side, pooled.shape[3])
        squares = squares.permute(2, 4, 0, 1, 3, 5).flatten(0, 1)  # (side², N, H', W', C)
        return squares.gather(0, index[None].to(torch.int64))[0], None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], grad_output: Tensor, index: Tensor, size: Pair, side: int) -> Any:
        pairs = zip((grad_output, index), in_dims[:2], strict=True)
        own = (_first(tensor, at, info.batch_size).flatten(0, 1) for tensor, at in pairs)
        out = _Unpool.apply(*own, size, side)  # type: ignore[no-untyped-call]
        return out.unflatten(0, (info.batch_size, -1)), 0


@counted
def unfold(
    x: Tensor,
    positions: Pair,
    kernel: Pair,
    stride: Pair,
    dilation: Pair,
    extra: int,
    one: bool,
    padding: Pair = (0, 0),
) -> Tensor:
    """Images ``(N, H, W, C)`` to patches ``(N, L, k·k·C + extra)`` at ``positions`` of the kernel.

    The first number after a patch is 1 if ``one``, else 0; the others are 0, as are pixels of the ``padding``.
    """
    count, height, width, channels = x.shape
    rows, taps = count * positions[0] * positions[1], kernel[0] * kernel[1]
    size = taps * channels + extra
    out = x.new_empty(count, positions[0] * positions[1], size)
    block = 64 if channels % 64 == 0 else _power(size, 16, 128)
    kernels.unfold[(_blocks(rows, _UNFOLD_ROWS),)](
        x, out, rows, height, width, *positions, float(one), size, channels, kernel[1], taps, *stride, *dilation,
        *padding, _UNFOLD_ROWS, block,
    )  # fmt: skip
    return out


@counted
def fold(
    patches: Tensor,
    image: tuple[int, int, int],
    positions: Pair,
    kernel: Pair,
    stride: Pair,
    dilation: Pair,
    extra: int,
    padding: Pair = (0, 0),
) -> Tensor:
    """Patches added up to images ``(N, H, W, C)``; of each the last ``extra`` numbers are ignored."""
    out, taps = patches.new_empty(len(patches), *image), kernel[0] * kernel[1]
    size = taps * image[2] + extra
    kernels.fold[(_blocks(out.numel(), _FOLD_NUMBERS),)](
        patches, out, out.numel(), *image[:2], *positions, size, image[2], kernel[1], taps, *stride, *dilation,
        *padding, _FOLD_NUMBERS,
    )  # fmt: skip
    return out
