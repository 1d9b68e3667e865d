"""Triton kernels for group normalisation of images with the channels last in memory; see `gpu_norms` for their use.

A program reads whole groups of one image. Every number is summed in one fixed order: the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _of_group(values, own, size: tl.constexpr, many: tl.constexpr):
    """For every channel the sum over its group; ``own`` are places among the ``many`` channels of a program."""
    if many == size:
        return tl.sum(values, 0) + tl.zeros_like(values)
    same = own[:, None] // size == own[None, :] // size
    return tl.sum(tl.where(same, values[None, :], 0.0), 1)


@triton.jit
def group_norm(
    x, weight, bias, out, means, scales, channels, pixels, eps,
    size: tl.constexpr, many: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """Of images ``(N, pixels, channels)``, with the mean and the scale of every channel's group ``(N, channels)``."""
    own, row = tl.arange(0, block), tl.arange(0, rows)
    c = tl.program_id(1) * many + own
    inside = (own < many) & (c < channels)
    image = tl.program_id(0).to(tl.int64) * pixels * channels
    at, count = row[:, None] * channels + c[None, :], pixels * size
    mask = (row < pixels)[:, None] & inside[None, :]
    value = tl.load(x + image + at, mask=mask, other=0.0).to(tl.float32)
    total = tl.sum(value, 0)
    if not whole:
        for first in range(rows, pixels, rows):
            more = (first + row < pixels)[:, None] & inside[None, :]
            total += tl.sum(tl.load(x + image + first * channels + at, mask=more, other=0.0).to(tl.float32), 0)
    mean = _of_group(total, own, size, many) / count
    centred = tl.where(mask, value - mean[None, :], 0.0)
    total = tl.sum(centred * centred, 0)
    if not whole:
        for first in range(rows, pixels, rows):
            more = (first + row < pixels)[:, None] & inside[None, :]
            further = tl.load(x + image + first * channels + at, mask=more, other=0.0).to(tl.float32)
            further = tl.where(more, further - mean[None, :], 0.0)
            total += tl.sum(further * further, 0)
    scale = tl.rsqrt(_of_group(total, own, size, many) / count + eps)
    tl.store(means + tl.program_id(0) * channels + c, mean, mask=inside)
    tl.store(scales + tl.program_id(0) * channels + c, scale, mask=inside)
    slope = scale * tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + image + at, centred * slope[None, :] + shift[None, :], mask=mask)
    if not whole:
        for first in range(rows, pixels, rows):
            more = (first + row < pixels)[:, None] & inside[None, :]
            further = tl.load(x + image + first * channels + at, mask=more, other=0.0).to(tl.float32)
            further = (further - mean[None, :]) * slope[None, :] + shift[None, :]
            tl.store(out + image + first * channels + at, further, mask=more)


@triton.jit
def group_norm_gradient(
    x, grad_output, weight, means, scales, out, sums, channels, pixels,
    size: tl.constexpr, many: tl.constexpr, block: tl.constexpr, rows: tl.constexpr, whole: tl.constexpr,
):  # fmt: skip
    """The gradient of `group_norm`'s images; of weights and biases the sums over one image, ``(2, N, channels)``."""
    own, row = tl.arange(0, block), tl.arange(0, rows)
    c = tl.program_id(1) * many + own
    inside = (own < many) & (c < channels)
    place = tl.program_id(0) * channels + c
    image = tl.program_id(0).to(tl.int64) * pixels * channels
    at, count = row[:, None] * channels + c[None, :], pixels * size
    mean, scale = tl.load(means + place, mask=inside, other=0.0), tl.load(scales + place, mask=inside, other=0.0)
    mask = (row < pixels)[:, None] & inside[None, :]
    value = (tl.load(x + image + at, mask=mask, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
    slope = tl.load(grad_output + image + at, mask=mask, other=0.0).to(tl.float32)
    of_weight, of_bias = tl.sum(slope * value, 0), tl.sum(slope, 0)
    if not whole:
        for first in range(rows, pixels, rows):
            here, more = image + first * channels + at, (first + row < pixels)[:, None] & inside[None, :]
            further = (tl.load(x + here, mask=more, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            along = tl.load(grad_output + here, mask=more, other=0.0).to(tl.float32)
            of_weight, of_bias = of_weight + tl.sum(along * further, 0), of_bias + tl.sum(along, 0)
    tl.store(sums + place, of_weight, mask=inside)
    tl.store(sums + tl.num_programs(0) * channels + place, of_bias, mask=inside)
    factor = tl.load(weight + c, mask=inside, other=0.0).to(tl.float32)
    common = _of_group(of_bias * factor, own, size, many) / count
    turned = _of_group(of_weight * factor, own, size, many) / count
    found = (slope * factor[None, :] - common[None, :] - value * turned[None, :]) * scale[None, :]
    tl.store(out + image + at, found, mask=mask)
    if not whole:
        for first in range(rows, pixels, rows):
            here, more = image + first * channels + at, (first + row < pixels)[:, None] & inside[None, :]
            further = (tl.load(x + here, mask=more, other=0.0).to(tl.float32) - mean[None, :]) * scale[None, :]
            along = tl.load(grad_output + here, mask=more, other=0.0).to(tl.float32)
            found = (along * factor[None, :] - common[None, :] - further * turned[None, :]) * scale[None, :]
            tl.store(out + here, found, mask=more)
