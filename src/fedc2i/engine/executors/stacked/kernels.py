"""Triton kernels for images of many models at once, with the channels last in memory; see `gpu_layers` for their use.

Every number is summed in one fixed order: a kernel gives the same bits in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ("height", "width", "out_height", "out_width")  # not worth a compilation for each value that divides well


@triton.jit(do_not_specialize=_SIZES)
def convolve(
    x, weight, bias, out, rows, outputs, height, width, out_height, out_width,
    channels: tl.constexpr, side: tl.constexpr, taps: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    precision: tl.constexpr, block_rows: tl.constexpr, block_outputs: tl.constexpr, block_sum: tl.constexpr,
):  # fmt: skip
    """A convolution as a product over patches that are never stored; a row is a position in one of its images."""
    model = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    n = tl.program_id(2) * block_outputs + tl.arange(0, block_outputs)
    k = tl.arange(0, block_sum)
    image, position = row // (out_height * out_width), row % (out_height * out_width)
    y, z = position // out_width - top, position % out_width - left
    images = x + model * (rows // (out_height * out_width)) * height * width * channels
    start = (image * height + y) * (width * channels) + z * channels
    filters = weight + (model * outputs + n) * (taps * channels)
    row_mask, n_mask = row < rows, n < outputs
    total = tl.zeros((block_rows, block_outputs), tl.float32)
    for first in range(0, taps * channels, block_sum):
        if channels % block_sum == 0:  # a block is part of one pixel: copied 16 bytes at a time
            tap = first // channels
            i, j = tap // side, tap % side
            shift = tl.multiple_of((i * width + j) * channels + first % channels, block_sum)
            inside = row_mask
            if top + left > 0:
                inside = row_mask & (y + i >= 0) & (y + i < height) & (z + j >= 0) & (z + j < width)
            a = tl.load(images + start[:, None] + (shift + k)[None, :], mask=inside[:, None], other=0.0)
            b = tl.load(filters[None, :] + (first + k)[:, None], mask=n_mask[None, :], other=0.0)
        else:
            at = first + k
            k_mask, tap = at < taps * channels, at // channels
            i, j = tap // side, tap % side
            shifts = (i * width + j) * channels + at % channels
            within = row_mask[:, None] & k_mask[None, :]
            if top + left > 0:
                down, right = y[:, None] + i[None, :], z[:, None] + j[None, :]
                within = within & (down >= 0) & (down < height) & (right >= 0) & (right < width)
            a = tl.load(images + start[:, None] + shifts[None, :], mask=within, other=0.0)
            b = tl.load(filters[None, :] + at[:, None], mask=n_mask[None, :] & k_mask[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=precision)
    total += tl.load(bias + model * outputs + n, mask=n_mask, other=0.0).to(tl.float32)[None, :]
    stored = row_mask[:, None] & n_mask[None, :]
    tl.store(out + (model * rows + row)[:, None] * outputs + n[None, :], total, mask=stored)


@triton.jit
def weight_gradient(
    x, grad_output, out, sums, rows, outputs, chunk_rows,
    height: tl.constexpr, width: tl.constexpr, out_height: tl.constexpr, out_width: tl.constexpr,
    channels: tl.constexpr, side: tl.constexpr, taps: tl.constexpr, top: tl.constexpr, left: tl.constexpr,
    precision: tl.constexpr, block_sum: tl.constexpr, block_outputs: tl.constexpr, block_taps: tl.constexpr,
):  # fmt: skip
    """Gradients of a convolution's weights and biases, of ``chunk_rows`` in each program; the caller adds them up."""
    model = tl.program_id(1).to(tl.int64)
    tiles = tl.cdiv(outputs, block_outputs)
    chunk, tile = tl.program_id(2) // tiles, tl.program_id(2) % tiles
    n = tile * block_outputs + tl.arange(0, block_outputs)
    at = tl.program_id(0) * block_taps + tl.arange(0, block_taps)
    tap = at // channels
    i, j = tap // side - top, tap % side - left
    shifts = (i * width + j) * channels + at % channels
    images = x + model * (rows // (out_height * out_width)) * height * width * channels
    grads = grad_output + model * rows * outputs
    k_mask, n_mask = at < taps * channels, n < outputs
    total = tl.zeros((block_taps, block_outputs), tl.float32)
    added = tl.zeros((block_outputs,), tl.float32)
    for step in range(0, chunk_rows, block_sum):
        row = chunk * chunk_rows + step + tl.arange(0, block_sum)
        row_mask = row < rows
        image, position = row // (out_height * out_width), row % (out_height * out_width)
        y, z = position // out_width, position % out_width
        start = (image * height + y) * (width * channels) + z * channels
        within = row_mask[:, None] & k_mask[None, :]
        if top + left > 0:
            down, right = y[:, None] + i[None, :], z[:, None] + j[None, :]
            within = within & (down >= 0) & (down < height) & (right >= 0) & (right < width)
        a = tl.load(images + start[:, None] + shifts[None, :], mask=within, other=0.0)
        b = tl.load(grads + row[:, None] * outputs + n[None, :], mask=row_mask[:, None] & n_mask[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=precision)
        added += tl.sum(b.to(tl.float32), 0)
    where = (model * (tl.num_programs(2) // tiles) + chunk) * outputs + n
    tl.store(out + where[None, :] * (taps * channels) + at[:, None], total, mask=k_mask[:, None] & n_mask[None, :])
    if tl.program_id(0) == 0:
        tl.store(sums + where, added, mask=n_mask)


@triton.jit(do_not_specialize=_SIZES)
def pool(x, out, index, numel, height, width, out_height, out_width, channels, side: tl.constexpr, block: tl.constexpr):
    """The largest of ``side`` x ``side`` numbers, and which it is: the first of equal ones, or the last nan."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < numel
    position = at // channels
    z, y, image = position % out_width, position // out_width % out_height, position // out_width // out_height
    start = ((image * height + y * side) * width + z * side) * channels + at % channels
    best = tl.load(x + start, mask=mask).to(tl.float32)
    which = tl.zeros((block,), tl.int32)
    for n in tl.static_range(1, side * side):
        value = tl.load(x + start + (n // side * width + n % side) * channels, mask=mask).to(tl.float32)
        larger = (value > best) | (value != value)
        best, which = tl.where(larger, value, best), tl.where(larger, n, which)
    tl.store(out + at, best, mask=mask)
    tl.store(index + at, which.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def unpool(
    grad_output, index, out, numel, height, width, out_height, out_width, channels,
    side: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """The gradient of `pool`: each number goes where it came from, all else is 0."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < numel
    position = at // channels
    w, h, image = position % width, position // width % height, position // width // height
    pooled = mask & (h // side < out_height) & (w // side < out_width)
    where = ((image * out_height + h // side) * out_width + w // side) * channels + at % channels
    value = tl.load(grad_output + where, mask=pooled, other=0.0)
    which = tl.load(index + where, mask=pooled, other=0).to(tl.int32)
    tl.store(out + at, tl.where(which == h % side * side + w % side, value, 0.0), mask=mask)


@triton.jit(do_not_specialize=_SIZES)
def unfold(
    x, out, rows, height, width, out_height, out_width, one: tl.constexpr, size: tl.constexpr,
    channels: tl.constexpr, side: tl.constexpr, taps: tl.constexpr,
    down: tl.constexpr, right: tl.constexpr, far_down: tl.constexpr, far_right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, block_rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Patches: a row for each position of the kernel in each image; then up to 3 more numbers: ``one``, and 0."""
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    image, position = row // (out_height * out_width), (row % (out_height * out_width)).to(tl.int32)
    y, z = position // out_width * down - top, position % out_width * right - left
    start = image * height * width * channels + (y * width + z) * channels
    row_mask, k, numbers = (row < rows)[:, None], tl.arange(0, block), taps * channels
    patches = out + row[:, None] * size
    if channels % block == 0:  # a block is part of one pixel
        for first in range(0, numbers, block):
            tap = first // channels
            far = tap // side * far_down * width + tap % side * far_right
            shifts = tl.multiple_of(far * channels + first % channels, block) + k
            within = row_mask
            if top + left > 0:
                h, w = y + tap // side * far_down, z + tap % side * far_right
                within = row_mask & ((h >= 0) & (h < height) & (w >= 0) & (w < width))[:, None]
            value = tl.load(x + start[:, None] + shifts[None, :], mask=within, other=0.0)
            tl.store(patches + (first + k)[None, :], value, mask=row_mask)
        if size > numbers:
            at = numbers + tl.arange(0, 4)
            more = tl.where((at == numbers)[None, :] & row_mask, one, 0.0)
            tl.store(patches + at[None, :], more, mask=row_mask & (at < size)[None, :])
    else:
        for first in range(0, size, block):
            at = first + k
            tap = at // channels
            shifts = (tap // side * far_down * width + tap % side * far_right) * channels + at % channels
            within = row_mask & (at < numbers)[None, :]
            if top + left > 0:
                h, w = y[:, None] + (tap // side * far_down)[None, :], z[:, None] + (tap % side * far_right)[None, :]
                within = within & (h >= 0) & (h < height) & (w >= 0) & (w < width)
            value = tl.load(x + start[:, None] + shifts[None, :], mask=within, other=0.0)
            value = tl.where((at == numbers)[None, :], one, value)
            tl.store(patches + at[None, :], value, mask=row_mask & (at < size)[None, :])


@triton.jit(do_not_specialize=_SIZES)
def fold(
    patches, out, numel, height, width, out_height, out_width, size: tl.constexpr,
    channels: tl.constexpr, side: tl.constexpr, taps: tl.constexpr,
    down: tl.constexpr, right: tl.constexpr, far_down: tl.constexpr, far_right: tl.constexpr,
    top: tl.constexpr, left: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Adds patches up where they overlap, row by row of the kernel."""
    at = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    mask = at < numel
    c, position = (at % channels).to(tl.int32), at // channels
    w, h = (position % width).to(tl.int32), (position // width % height).to(tl.int32)
    image = position // width // height
    base = patches + image * (out_height * out_width * size)
    total = tl.zeros((block,), tl.float32)
    for tap in range(taps):
        y, z = h + top - tap // side * far_down, w + left - tap % side * far_right
        fits = mask & (y >= 0) & (z >= 0) & (y // down < out_height) & (z // right < out_width)
        if down * right > 1:
            fits = fits & (y % down == 0) & (z % right == 0)
        where = (y // down * out_width + z // right) * size + tap * channels + c
        total += tl.load(base + where, mask=fits, other=0.0).to(tl.float32)
    tl.store(out + at, total, mask=mask)
