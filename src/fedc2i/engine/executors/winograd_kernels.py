"""Triton kernels for the linear maps around the products of `winograd`; see there for the matrices.

A program maps a block of tiles x a block of channels. Channels are last in memory, so neighbouring threads read
neighbouring numbers. A map is applied to the rows of a tile and then to its columns, by additions alone. Every number
is summed in one fixed order: the same bits in every run.
"""

# Triton compiles annotations, too.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

# Compiled once for all sizes; of channels the compiler learns whether 16 divide them, to copy 16 bytes at a time.
_SIZES = ("tiles", "down", "across", "height", "width", "top", "left", "pairs", "pairs_across", "first", "first_across")


@triton.jit
def _block(count, rows, columns, channels, block_tiles: tl.constexpr, block_channels: tl.constexpr):
    """A program's tiles: number, image, row, column; its channels; and which of the numbers exist."""
    tile = (tl.program_id(0) * block_tiles + tl.arange(0, block_tiles))[:, None]
    c = (tl.program_id(1) * block_channels + tl.arange(0, block_channels))[None, :]
    mask = (tile < count) & (c < channels)
    return tile, tile // (rows * columns), tile // columns % rows, tile % columns, c, mask


@triton.jit
def _store(place, step, a, b, c, d, mask):
    tl.store(place, a, mask=mask)
    tl.store(place + step, b, mask=mask)
    tl.store(place + 2 * step, c, mask=mask)
    tl.store(place + 3 * step, d, mask=mask)


@triton.jit
def _load(place, step, mask):
    a, b = tl.load(place, mask=mask, other=0.0), tl.load(place + step, mask=mask, other=0.0)
    c, d = tl.load(place + 2 * step, mask=mask, other=0.0), tl.load(place + 3 * step, mask=mask, other=0.0)
    return a, b, c, d


@triton.jit
def _by_b(a, b, c, d):
    """``Bᵀ`` times a column."""
    return a - c, b + c, c - b, b - d


@triton.jit
def _pixels(place, step, y, z, height, width, mask):
    """Four pixels of a row, 0 outside of the image, times ``B``."""
    mask = mask & (y >= 0) & (y < height)
    a = tl.load(place, mask=mask & (z >= 0) & (z < width), other=0.0)
    b = tl.load(place + step, mask=mask & (z >= -1) & (z < width - 1), other=0.0)
    c = tl.load(place + 2 * step, mask=mask & (z >= -2) & (z < width - 2), other=0.0)
    d = tl.load(place + 3 * step, mask=mask & (z >= -3) & (z < width - 3), other=0.0)
    return _by_b(a, b, c, d)


@triton.jit(do_not_specialize=_SIZES)
def of_images(
    x, out, tiles, down, across, height, width, top, left, channels,
    block_tiles: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Images ``(N, height, width, C)`` to ``V = Bᵀ d B`` of their tiles, ``(16, T, C)``; ``top`` and ``left`` pad."""
    tile, image, y, z, c, mask = _block(tiles, down, across, channels, block_tiles, block_channels)
    y, z, line = 2 * y - top, 2 * z - left, width * channels
    place = x + (image * height + y) * line + z * channels + c
    a0, a1, a2, a3 = _pixels(place, channels, y, z, height, width, mask)
    b0, b1, b2, b3 = _pixels(place + line, channels, y + 1, z, height, width, mask)
    c0, c1, c2, c3 = _pixels(place + 2 * line, channels, y + 2, z, height, width, mask)
    d0, d1, d2, d3 = _pixels(place + 3 * line, channels, y + 3, z, height, width, mask)
    a0, b0, c0, d0 = _by_b(a0, b0, c0, d0)
    a1, b1, c1, d1 = _by_b(a1, b1, c1, d1)
    a2, b2, c2, d2 = _by_b(a2, b2, c2, d2)
    a3, b3, c3, d3 = _by_b(a3, b3, c3, d3)
    step = tiles * channels
    place = out + tile * channels + c
    _store(place, step, a0, a1, a2, a3, mask)
    _store(place + 4 * step, step, b0, b1, b2, b3, mask)
    _store(place + 8 * step, step, c0, c1, c2, c3, mask)
    _store(place + 12 * step, step, d0, d1, d2, d3, mask)


@triton.jit
def _by_a(a, b, c, d):
    """``Aᵀ`` times a column."""
    return a + b + c, b - c - d


@triton.jit(do_not_specialize=_SIZES)
def to_outputs(
    products, bias, out, tiles, down, across, height, width, channels,
    has_bias: tl.constexpr, block_tiles: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """Products ``(16, T, C)`` to ``Y = Aᵀ M A``, cut to ``(N, height, width, C)``, plus a bias."""
    tile, image, y, z, c, mask = _block(tiles, down, across, channels, block_tiles, block_channels)
    place, step = products + tile * channels + c, tiles * channels
    a0, a1, a2, a3 = _load(place, step, mask)
    b0, b1, b2, b3 = _load(place + 4 * step, step, mask)
    c0, c1, c2, c3 = _load(place + 8 * step, step, mask)
    d0, d1, d2, d3 = _load(place + 12 * step, step, mask)
    a0, b0 = _by_a(a0, b0, c0, d0)
    a1, b1 = _by_a(a1, b1, c1, d1)
    a2, b2 = _by_a(a2, b2, c2, d2)
    a3, b3 = _by_a(a3, b3, c3, d3)
    a0, a1 = _by_a(a0, a1, a2, a3)
    b0, b1 = _by_a(b0, b1, b2, b3)
    if has_bias:
        more = tl.load(bias + c, mask=c < channels, other=0.0)
        a0, a1, b0, b1 = a0 + more, a1 + more, b0 + more, b1 + more
    place = out + ((image * height + 2 * y) * width + 2 * z) * channels + c
    below, right = mask & (2 * y + 1 < height), 2 * z + 1 < width
    tl.store(place, a0, mask=mask)
    tl.store(place + channels, a1, mask=mask & right)
    tl.store(place + width * channels, b0, mask=below)
    tl.store(place + (width + 1) * channels, b1, mask=below & right)


@triton.jit
def _from_a(a, b):
    """``A`` times a column."""
    return a, a + b, a - b, -b


@triton.jit(do_not_specialize=_SIZES)
def of_outputs(
    grad_output, out, tiles, down, across, height, width, channels,
    block_tiles: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """The gradient of `to_outputs`: ``(N, height, width, C)`` to ``A dY Aᵀ``, ``(16, T, C)``."""
    tile, image, y, z, c, mask = _block(tiles, down, across, channels, block_tiles, block_channels)
    place = grad_output + ((image * height + 2 * y) * width + 2 * z) * channels + c
    below, right = mask & (2 * y + 1 < height), 2 * z + 1 < width
    a0, a1, a2, a3 = _from_a(
        tl.load(place, mask=mask, other=0.0), tl.load(place + channels, mask=mask & right, other=0.0)
    )
    place += width * channels
    d0, d1, d2, d3 = _from_a(
        tl.load(place, mask=below, other=0.0), tl.load(place + channels, mask=below & right, other=0.0)
    )
    step = tiles * channels
    place = out + tile * channels + c
    _store(place, step, a0, a1, a2, a3, mask)
    _store(place + 4 * step, step, a0 + d0, a1 + d1, a2 + d2, a3 + d3, mask)
    _store(place + 8 * step, step, a0 - d0, a1 - d1, a2 - d2, a3 - d3, mask)
    _store(place + 12 * step, step, -d0, -d1, -d2, -d3, mask)


@triton.jit
def _middle(before, a, b, c, d, after):
    """Of ``B`` times a column the middle two, with what the tiles before (its last) and after (its first) add."""
    return b - c + d - before, b + c - a + after


@triton.jit
def _overlaps(place, step, channels, mask, before, here, after):
    """The middle two pixels of a tile's row, of which ``place`` is the first number."""
    a, b, c, d = _load(place, step, mask & here)
    last = tl.load(place + 3 * step - channels, mask=mask & before, other=0.0)
    first = tl.load(place + channels, mask=mask & after, other=0.0)
    return _middle(last, a, b, c, d, first)


@triton.jit(do_not_specialize=_SIZES)
def to_images(
    grad_v, out, tiles, down, across, height, width, top, left, pairs, pairs_across, first, first_across, channels,
    block_tiles: tl.constexpr, block_channels: tl.constexpr,
):  # fmt: skip
    """The gradient of `of_images`: ``B dV Bᵀ`` of ``(16, T, C)``, added up where tiles overlap.

    A program computes the middle 2x2 pixels of its tiles, which overlap with the edges of the tiles around them: it
    reads 36 numbers for 4 pixels, where the first 2x2 pixels of tiles would need 64. Tiles are counted from ``first``
    and ``first_across``: without padding the first pixels are in the middle of tiles that do not exist.
    """
    count = tiles // (down * across) * pairs * pairs_across
    _, image, y, z, c, mask = _block(count, pairs, pairs_across, channels, block_tiles, block_channels)
    y, z, step, line = y + first, z + first_across, tiles * channels, across * channels
    place = grad_v + ((image * down + y) * across + z) * channels + c
    before, here, after = (z > 0) & (z <= across), (z >= 0) & (z < across), z < across - 1
    above, middle, below = mask & (y > 0) & (y <= down), mask & (y >= 0) & (y < down), mask & (y < down - 1)
    last0, last1 = _overlaps(place + 12 * step - line, step, channels, above, before, here, after)
    a0, a1 = _overlaps(place, step, channels, middle, before, here, after)
    b0, b1 = _overlaps(place + 4 * step, step, channels, middle, before, here, after)
    c0, c1 = _overlaps(place + 8 * step, step, channels, middle, before, here, after)
    d0, d1 = _overlaps(place + 12 * step, step, channels, middle, before, here, after)
    next0, next1 = _overlaps(place + line, step, channels, below, before, here, after)
    a0, b0 = _middle(last0, a0, b0, c0, d0, next0)
    a1, b1 = _middle(last1, a1, b1, c1, d1, next1)
    y, z = 2 * y + 1 - top, 2 * z + 1 - left
    place = out + ((image * height + y) * width + z) * channels + c
    upper, lower = mask & (y >= 0) & (y < height), mask & (y >= -1) & (y < height - 1)
    left_in, right_in = (z >= 0) & (z < width), (z >= -1) & (z < width - 1)
    tl.store(place, a0, mask=upper & left_in)
    tl.store(place + channels, a1, mask=upper & right_in)
    tl.store(place + width * channels, b0, mask=lower & left_in)
    tl.store(place + (width + 1) * channels, b1, mask=lower & right_in)


@triton.jit
def _by_g(a, b, c):
    """``G`` times a column."""
    return a, 0.5 * (a + c + b), 0.5 * (a + c - b), c


@triton.jit
def _weights(place, step, mask):
    """Three weights of a row, times ``Gᵀ``."""
    a, b = tl.load(place, mask=mask, other=0.0), tl.load(place + step, mask=mask, other=0.0)
    return _by_g(a, b, tl.load(place + 2 * step, mask=mask, other=0.0))


@triton.jit
def of_weights(weight, out, numbers, channels, block: tl.constexpr):
    """Weights ``(O, 3, 3, C)`` to ``U = G g Gᵀ``, ``(16, O, C)``; ``numbers`` is O·C."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask = at < numbers
    place = weight + at // channels * (9 * channels) + at % channels
    a0, a1, a2, a3 = _weights(place, channels, mask)
    b0, b1, b2, b3 = _weights(place + 3 * channels, channels, mask)
    d0, d1, d2, d3 = _weights(place + 6 * channels, channels, mask)
    a0, b0, c0, d0 = _by_g(a0, b0, d0)
    a1, b1, c1, d1 = _by_g(a1, b1, d1)
    a2, b2, c2, d2 = _by_g(a2, b2, d2)
    a3, b3, c3, d3 = _by_g(a3, b3, d3)
    _store(out + at, numbers, a0, a1, a2, a3, mask)
    _store(out + at + 4 * numbers, numbers, b0, b1, b2, b3, mask)
    _store(out + at + 8 * numbers, numbers, c0, c1, c2, c3, mask)
    _store(out + at + 12 * numbers, numbers, d0, d1, d2, d3, mask)


@triton.jit
def _from_g(a, b, c, d):
    """``Gᵀ`` times a column."""
    return a + 0.5 * (b + c), 0.5 * (b - c), 0.5 * (b + c) + d


@triton.jit
def _to_three(place, step, mask):
    """Four numbers of a row, times ``G``."""
    a, b, c, d = _load(place, step, mask)
    return _from_g(a, b, c, d)


@triton.jit
def _store_three(place, step, a, b, c, mask):
    tl.store(place, a, mask=mask)
    tl.store(place + step, b, mask=mask)
    tl.store(place + 2 * step, c, mask=mask)


@triton.jit
def to_weights(grad_u, out, numbers, channels, block: tl.constexpr):
    """The gradient of `of_weights`: ``Gᵀ dU G`` of ``(16, O, C)``, ``(O, 3, 3, C)``."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    mask, place = at < numbers, grad_u + at
    a0, a1, a2 = _to_three(place, numbers, mask)
    b0, b1, b2 = _to_three(place + 4 * numbers, numbers, mask)
    c0, c1, c2 = _to_three(place + 8 * numbers, numbers, mask)
    d0, d1, d2 = _to_three(place + 12 * numbers, numbers, mask)
    place = out + at // channels * (9 * channels) + at % channels
    a0, b0, c0 = _from_g(a0, b0, c0, d0)
    a1, b1, c1 = _from_g(a1, b1, c1, d1)
    a2, b2, c2 = _from_g(a2, b2, c2, d2)
    _store_three(place, channels, a0, a1, a2, mask)
    _store_three(place + 3 * channels, channels, b0, b1, b2, mask)
    _store_three(place + 6 * channels, channels, c0, c1, c2, mask)
