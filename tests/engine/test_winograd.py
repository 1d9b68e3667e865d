"""3x3 convolutions by Winograd's products against torch's; without a GPU in Triton's interpreter, if it is on.

1e-5 of the norm bounds the error of single precision; 1e-6 was seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedc2i.engine.executors.stacked.vmap_rules import pair
from support.kernels import CUDA, distance, needs_kernels, noise


def both_ways(
    x: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The result and all gradients by our products, and by torch in double precision."""
    from fedc2i.engine.executors import winograd

    leaves = [own if own is None else own.clone().requires_grad_() for own in (x, weight, bias)]
    exact = [own if own is None else own.double().requires_grad_() for own in (x, weight, bias)]
    got, want = winograd.convolution(*leaves, padding), torch.conv2d(*exact, 1, padding)  # type: ignore[arg-type]
    assert got.is_contiguous(memory_format=torch.channels_last)
    yield got, want
    slope = noise(*want.shape, seed=3)  # with the channels first
    ours = torch.autograd.grad(got, [own for own in leaves if own is not None], slope)
    yield from zip(ours, torch.autograd.grad(want, [own for own in exact if own is not None], slope), strict=True)


@needs_kernels
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("shape", "outputs", "padding"),
    [
        ((2, 64, 8, 8), 32, (1, 1)),
        ((3, 32, 7, 5), 48, (1, 1)),
        ((1, 33, 5, 6), 40, (0, 2)),  # copied number by number
        ((2, 32, 9, 4), 130, (2, 0)),
        ((1, 130, 4, 7), 32, (3, 1)),
    ],
    ids=str,
)
def test_convolutions_are_torch_s(
    shape: tuple[int, int, int, int], outputs: int, padding: tuple[int, int], has_bias: bool
) -> None:
    pytest.importorskip("triton")
    x = noise(*shape).contiguous(memory_format=torch.channels_last)
    weight, bias = noise(outputs, shape[1], 3, 3, seed=1), noise(outputs, seed=2)
    assert all(distance(*pair) < 1e-5 for pair in both_ways(x, weight, bias if has_bias else None, padding))


@needs_kernels
@settings(max_examples=25, deadline=None)
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    count=st.integers(1, 3),
)
def test_convolutions_of_any_size(size: tuple[int, int], padding: tuple[int, int], count: int) -> None:
    """Whole numbers have no rounding errors, so a wrong edge cannot hide."""
    pytest.importorskip("triton")
    assume(all(size[a] + 2 * padding[a] >= 3 for a in (0, 1)))
    x, weight, bias = (4 * noise(*own) for own in ((count, 16, *size), (16, 16, 3, 3), (16,)))
    x = x.round().contiguous(memory_format=torch.channels_last)
    for k, (got, want) in enumerate(both_ways(x, 4 * weight.round(), bias.round(), padding)):
        assert torch.equal(got.double(), want) if k == 0 else distance(got, want) < 1e-5


@pytest.mark.parametrize(
    ("sums", "tiles", "outputs", "channels", "parts"),
    [
        (1, 24, 40, 32, 1),
        (64, 24, 40, 32, 4),  # 16 blocks
        (10**6, 24, 40, 32, 8),  # 16 does not divide 24
        (512, 64, 64, 512, 4),  # 16 x 1 x 8 blocks
        (512, 64, 512, 65, 2),  # 16 x 8 x 2 blocks
    ],
)
def test_sums_in_parts(
    sums: int, tiles: int, outputs: int, channels: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import winograd

    monkeypatch.setattr(winograd, "_SUMS", sums)
    assert winograd._parts(tiles, outputs, channels) == parts
    tiled, grad_products = noise(16, tiles, channels), noise(16, tiles, outputs, seed=1)
    found = winograd.sum_of_products(grad_products, tiled)
    assert distance(found, grad_products.double().mT @ tiled.double()) < 1e-5
    assert torch.equal(found, winograd.sum_of_products(grad_products, tiled))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_convolution_has_the_same_bits() -> None:
    from fedc2i.engine.executors import winograd

    x = noise(8, 64, 9, 9).contiguous(memory_format=torch.channels_last).requires_grad_()
    weight, slope = noise(64, 64, 3, 3, seed=1).requires_grad_(), noise(8, 64, 9, 9, seed=2)

    def step() -> list[Tensor]:
        out = winograd.convolution(x, weight, None, (1, 1))
        return [out.detach(), *torch.autograd.grad(out, [x, weight], slope)]

    want, graph = step(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        got = step()
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(got, want, strict=True))


def fits(
    channels: int, outputs: int, side: int | tuple[int, int], kernel: int = 3, padding: int = 1, **other: int
) -> bool:
    """Whether a layer of 64 images is Winograd's."""
    pytest.importorskip("triton")
    from fedc2i.engine.executors import winograd

    x = torch.empty(64, channels, *pair(side), device="meta")
    weight = torch.empty(outputs, channels, kernel, kernel, device="meta")
    return winograd.fits(x, weight, *(pair(own) for own in (other.get("stride", 1), padding, other.get("dilation", 1))))


def test_which_convolutions_are_winograd_s() -> None:
    """The stride-1 layers of ResNet-18; not its stem, nor what has fewer channels, other kernels or one output."""
    assert all(fits(*own) for own in ((64, 64, 32), (128, 128, 16), (256, 256, 8), (512, 512, 4), (32, 64, 7)))
    assert not any(fits(*own) for own in ((3, 64, 32), (64, 16, 32), (64, 64, 32, 1, 0), (64, 64, 32, 5, 2)))
    assert not fits(64, 64, 32, stride=2)
    assert not fits(64, 64, 32, dilation=2)
    assert fits(64, 64, 4, padding=0)
    for side in (3, (3, 10), (10, 3)):  # of a tile's 2x2 outputs at most two exist
        assert not fits(64, 64, side, padding=0)


@pytest.mark.parametrize(
    ("channels", "outputs", "side", "fitting"),
    [  # 64 bytes for each channel and tile, of which 64 images have 64 times as many: at most 2**28
        (64, 64, 56, True),  # 64 · 64 · 64·28·28 bytes
        (64, 64, 112, False),
        (32, 512, (16, 32), True),  # the products: 64 · 512 · 64·8·16 = 2**28 bytes
        (32, 512, (17, 32), False),  # one more row of tiles
        (512, 32, (16, 32), True),  # V
        (512, 32, (17, 32), False),
        (2048, 2048, 4, True),  # U: 64 · 2048 · 2048 = 2**28 bytes
        (2048, 2049, 4, False),
        (2049, 2048, 4, False),
        (32, 4096, 4, True),  # U: 64 · 32 · 4096 bytes
    ],
)
def test_what_winograd_s_products_may_take(
    channels: int, outputs: int, side: int | tuple[int, int], fitting: bool
) -> None:
    assert fits(channels, outputs, side) == fitting
