"""3x3 convolutions in IEEE single precision with 2.25 times fewer multiplications: Winograd's F(2x2, 3x3).

After Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016). A tile of 4x4 pixels ``d`` gives
2x2 outputs for weights ``g`` of 3x3; tiles step by 2, and sums over channels are taken between the maps::

    Y = Aᵀ [ Σ (G g Gᵀ) · (Bᵀ d B) ] A

         1  0 -1  0            1   0   0
    Bᵀ = 0  1  1  0       G = 1/2 1/2 1/2      Aᵀ = 1  1  1  0
         0 -1  1  0           1/2-1/2 1/2           0  1 -1 -1
         0  1  0 -1            0   0   1

So a convolution is 16 products of matrices, by cuBLAS: V ``(T, C)`` of T tiles times U ``(C, O)`` of the weights. V has
4 numbers for each of an image's, where patches have 9. The gradients are the transposed maps around the transposed
products. Results in single precision differ from exact ones by less than 1e-5 of their norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedc2i.engine.executors import winograd_kernels as kernels
from fedc2i.engine.executors.stacked.gpu_layers import Pair
from fedc2i.engine.executors.stacked.kernel_support import second_order
from fedc2i.engine.executors.stacked.kernel_uses import counted

_LEAST = 32  # channels, in and out: with 16 the maps move as many bytes as patches do
_MOST_BYTES = 2**28  # of V, which stays until the backward pass, of the products and of U
# A program of 4 warps maps 8 tiles x 64 channels: a thread copies 16 bytes of a pixel, 16 threads 256 bytes in a row.
_NUMBERS, _CHANNELS = 512, 64
_SUMS, _SIDE = 512, 64  # a weight's gradient is summed in parts until 512 blocks of 64 x 64 numbers fill the GPU


def fits(x: Tensor, weight: Tensor, stride: Pair, padding: Pair, dilation: Pair) -> bool:
    """Whether `convolution` computes this layer, with less work than patches need, in a bearable amount of memory.

    These are 3x3 kernels without strides and dilation, with at least 32 channels in and out and 2x2 outputs.
    """
    if weight.shape[2:] != (3, 3) or stride != (1, 1) or dilation != (1, 1) or min(weight.shape[:2]) < _LEAST:
        return False
    size = _output_size(x.shape, padding)
    tiles, channels = len(x) * _half(size[0]) * _half(size[1]), max(weight.shape[:2])
    return min(size) > 1 and 4 * 16 * channels * max(tiles, min(weight.shape[:2])) <= _MOST_BYTES


@counted
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
    """``torch.conv2d`` of images ``(B, C, H, W)`` with the channels last in memory; the result is of the same kind."""
    own: Tensor = _Convolution.apply(x, weight, bias, padding)  # type: ignore[no-untyped-call]
    return own


def _half(count: int) -> int:
    return -(-count // 2)


def _output_size(shape: torch.Size, padding: Pair) -> Pair:
    return shape[2] + 2 * padding[0] - 2, shape[3] + 2 * padding[1] - 2


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Pair) -> Tensor:
        size = _output_size(x.shape, padding)
        tiled = image_tiles(x.permute(0, 2, 3, 1), size, padding)
        turned = weight_tiles(weight.permute(0, 2, 3, 1).contiguous())
        out = outputs(torch.bmm(tiled, turned.mT), bias, len(x), size)
        ctx.padding = padding
        ctx.save_for_backward(x, weight, bias, tiled, turned)
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        x, weight, bias, tiled, turned = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted: torch's operations have one
            given = (x, weight, bias)
            return *second_order(lambda x, w, b: torch.conv2d(x, w, b, 1, ctx.padding), given, grad_output), None
        grad_output = grad_output.permute(0, 2, 3, 1).contiguous()
        dx = dw = db = None
        if any(ctx.needs_input_grad[:2]):
            grad_products = product_gradient(grad_output)
            if ctx.needs_input_grad[1]:
                dw = weight_gradient(sum_of_products(grad_products, tiled)).permute(0, 3, 1, 2)
            if ctx.needs_input_grad[0]:
                dx = image_gradient(torch.bmm(grad_products, turned), x.shape, ctx.padding).permute(0, 3, 1, 2)
        if bias is not None and ctx.needs_input_grad[2]:
            db = grad_output.sum((0, 1, 2))
        return dx, dw, db, None


def _programs(tiles: int, channels: int) -> tuple[Pair, Pair]:
    """The grid, and the tiles and channels of a program."""
    width = min(1 << (channels - 1).bit_length(), _CHANNELS)
    return (-(-tiles // (_NUMBERS // width)), -(-channels // width)), (_NUMBERS // width, width)


def image_tiles(images: Tensor, size: Pair, padding: Pair) -> Tensor:
    """Images ``(N, H, W, C)`` to V ``(16, T, C)``, for outputs of ``size``."""
    count, height, width, channels = images.shape
    down, across = _half(size[0]), _half(size[1])
    out = images.new_empty(16, count * down * across, channels)
    grid, block = _programs(out.shape[1], channels)
    kernels.of_images[grid](images, out, out.shape[1], down, across, height, width, *padding, channels, *block)
    return out


def weight_tiles(weight: Tensor) -> Tensor:
    """Weights ``(O, 3, 3, C)`` to U ``(16, O, C)``, transposed: the channels stay last."""
    out = weight.new_empty(16, len(weight), weight.shape[3])
    kernels.of_weights[(-(-out[0].numel() // _NUMBERS),)](weight, out, out[0].numel(), weight.shape[3], _NUMBERS)
    return out


def outputs(products: Tensor, bias: Tensor | None, count: int, size: Pair) -> Tensor:
    """Products ``(16, T, O)`` to images ``(N, H', W', O)``, plus the bias."""
    tiles, channels = products.shape[1:]
    out = products.new_empty(count, *size, channels)
    grid, block = _programs(tiles, channels)
    given = products if bias is None else bias.contiguous()
    shape = (tiles, _half(size[0]), _half(size[1]), *size, channels)
    kernels.to_outputs[grid](products, given, out, *shape, bias is not None, *block)
    return out


def product_gradient(grad_output: Tensor) -> Tensor:
    """The gradient of outputs ``(N, H', W', O)`` to that of products, ``(16, T, O)``."""
    count, height, width, channels = grad_output.shape
    down, across = _half(height), _half(width)
    out = grad_output.new_empty(16, count * down * across, channels)
    grid, block = _programs(out.shape[1], channels)
    kernels.of_outputs[grid](grad_output, out, out.shape[1], down, across, height, width, channels, *block)
    return out


def sum_of_products(grad_products: Tensor, tiled: Tensor) -> Tensor:
    """The gradient of U ``(16, O, C)``: sums over all tiles, in parts that fill the GPU, then over these."""
    (_, tiles, channels), many = tiled.shape, grad_products.shape[2]
    parts = _parts(tiles, many, channels)
    cut = [own.reshape(16 * parts, tiles // parts, -1) for own in (grad_products, tiled)]
    found = torch.bmm(cut[0].mT, cut[1])
    return found if parts == 1 else found.reshape(16, parts, many, channels).sum(1)


def _parts(tiles: int, many: int, channels: int) -> int:
    """A power of 2 that divides ``tiles``; it depends on the layer alone, so other clients do not change bits."""
    blocks = 16 * -(-many // _SIDE) * -(-channels // _SIDE)
    parts = 1
    while blocks * parts < _SUMS and tiles % (2 * parts) == 0:
        parts *= 2
    return parts


def weight_gradient(grad_u: Tensor) -> Tensor:
    """The gradient of U ``(16, O, C)`` to that of weights, ``(O, 3, 3, C)``."""
    _, many, channels = grad_u.shape
    out = grad_u.new_empty(many, 3, 3, channels)
    kernels.to_weights[(-(-many * channels // _NUMBERS),)](grad_u, out, many * channels, channels, _NUMBERS)
    return out


def image_gradient(grad_v: Tensor, shape: torch.Size, padding: Pair) -> Tensor:
    """The gradient of V ``(16, T, C)`` to that of images ``(N, H, W, C)``; ``shape`` is ``(N, C, H, W)``."""
    count, channels, height, width = shape
    down, across = (_half(own) for own in _output_size(shape, padding))
    out = grad_v.new_empty(count, height, width, channels)
    # Pixels 1 and 2 of a tile, of tiles from the one with the first pixel to that with the last.
    first = [(padding[a] - 1) // 2 for a in (0, 1)]
    pairs = [(padding[a] + shape[2 + a] - 2) // 2 - first[a] + 1 for a in (0, 1)]
    grid, block = _programs(count * pairs[0] * pairs[1], channels)
    where = (grad_v.shape[1], down, across, height, width, *padding, *pairs, *first, channels)
    kernels.to_images[grid](grad_v, out, *where, *block)
    return out
