"""Layers of large models by our own kernels against torch's; without a GPU in Triton's interpreter, if it is on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.seeding import repeatable
from fedc2i.core.settings import EngineSettings
from fedc2i.engine import executors
from fedc2i.engine.executors.own_layers import OwnLayers
from fedc2i.engine.executors.stacked import kernel_support
from fedc2i.engine.executors.stacked.vmap_rules import pair

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_kernels = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device, or TRITON_INTERPRET=1"
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def leaves_of(count: int, channels: int, height: int, width: int) -> list[Tensor]:
    x = (3 + noise(count, channels, height, width)).contiguous(memory_format=torch.channels_last)
    return [own.requires_grad_() for own in (x, noise(channels, seed=1), noise(channels, seed=2))]


def distance(got: Tensor, want: Tensor) -> float:
    return float(torch.dist(got.double(), want.double()).detach() / want.double().norm().detach())


@needs_kernels
@pytest.mark.parametrize("tile", [16384, 64], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("shape", "groups"),
    [
        ((3, 64, 8, 8), 4),
        ((2, 64, 5, 3), 2),  # groups larger than what a program reads at least
        ((2, 24, 4, 5), 8),  # groups of 3: five of them in a program, then three
        ((2, 6, 4, 4), 1),
        ((2, 8, 3, 3), 8),  # one channel each
        ((1, 512, 1, 1), 32),
    ],
    ids=str,
)
def test_group_norm_is_torch_s(
    shape: tuple[int, int, int, int], groups: int, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_norms

    monkeypatch.setattr(gpu_norms, "TILE", tile)
    leaves = leaves_of(*shape)
    exact = [own.detach().double().requires_grad_() for own in leaves]
    got = gpu_norms.group_norm(leaves[0], groups, *leaves[1:], 1e-5)
    want = F.group_norm(exact[0], groups, *exact[1:], 1e-5)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert distance(got, want) < 1e-5
    slope = noise(*shape, seed=3)  # with the channels first
    mine = torch.autograd.grad((got * slope).sum(), leaves, create_graph=False)
    for own, torch_s in zip(mine, torch.autograd.grad((want * slope).sum(), exact), strict=True):
        assert torch.allclose(own.double(), torch_s, rtol=1e-4, atol=1e-4)


@needs_kernels
def test_bf16_stays_bf16() -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_norms

    x, weight, bias = leaves_of(2, 32, 6, 6)
    rough = x.detach().to(torch.bfloat16).requires_grad_()
    got = gpu_norms.group_norm(rough, 2, weight, bias, 1e-5)
    want = F.group_norm(rough.float(), 2, weight, bias, 1e-5)
    assert got.dtype == torch.bfloat16
    assert distance(got, want) < 5e-3
    slope = noise(*want.shape, seed=3)
    mine = torch.autograd.grad((got * slope).sum(), [rough, weight, bias])
    for own, torch_s in zip(mine, torch.autograd.grad((want * slope).sum(), [rough, weight, bias]), strict=True):
        assert own.dtype == torch_s.dtype
        assert distance(own, torch_s) < 2e-2


@needs_kernels
@pytest.mark.parametrize("first", [0, 1], ids=["images", "weights alone"])
def test_a_gradient_of_a_gradient(first: int) -> None:
    """For a loss that holds one, such as a penalty; images that a model is given have none, weights are used twice."""
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_norms

    found = []
    for norm in (gpu_norms.group_norm, F.group_norm):
        leaves = leaves_of(2, 8, 3, 3)
        leaves[0].requires_grad_(first == 0)
        out: Tensor = norm(norm(leaves[0], 2, *leaves[1:], 1e-5), 4, *leaves[1:], 1e-5)
        (slope,) = torch.autograd.grad(out.square().sum(), leaves[first : first + 1], create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), leaves[first:]))
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want, rtol=1e-3, atol=1e-3)


@needs_kernels
@pytest.mark.parametrize(
    ("channels", "outputs", "kernel", "geometry"),
    [
        (3, 6, (3, 3), {"padding": 1}),
        (64, 16, (3, 3), {"padding": 1}),
        (64, 8, (3, 3), {"stride": 2, "padding": 1}),
        (16, 24, (1, 1), {}),  # patches are pixels
        (16, 24, (1, 1), {"stride": 2}),
        (8, 12, (3, 2), {"stride": (1, 2), "padding": (2, 1), "dilation": (2, 1)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("long", [32768, 32], ids=["one sum", "in parts"])
def test_convolutions_are_torch_s(
    channels: int,
    outputs: int,
    kernel: tuple[int, int],
    geometry: dict[str, Any],
    long: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_products

    monkeypatch.setattr(gpu_products, "_LONG", long)
    monkeypatch.setattr(gpu_products, "_PART_ROWS", 16)
    x = noise(2, channels, 8, 8).contiguous(memory_format=torch.channels_last)
    weight = noise(outputs, channels, *kernel, seed=1).contiguous(memory_format=torch.channels_last)
    leaves = [own.requires_grad_() for own in (x, weight, noise(outputs, seed=2))]
    exact = [own.detach().double().requires_grad_() for own in leaves]
    shape = [pair(geometry.get(name, default)) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))]
    got, want = gpu_products.convolution(*leaves, *shape), torch.conv2d(*exact, **geometry)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert distance(got, want) < 1e-5
    slope = noise(*want.shape, seed=3)
    for mine, torch_s in zip(
        torch.autograd.grad((got * slope).sum(), leaves),
        torch.autograd.grad((want * slope).sum(), exact),
        strict=True,
    ):
        assert distance(mine, torch_s) < 1e-5
    without = gpu_products.convolution(x, weight, None, *shape)
    assert distance(without, torch.conv2d(exact[0], exact[1], **geometry)) < 1e-5


@needs_kernels
def test_a_gradient_of_a_convolution_s_gradient() -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_products

    found = []
    for convolve in (gpu_products.convolution, torch.conv2d):
        x = noise(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
        weight = noise(4, 4, 3, 3, seed=1).requires_grad_()
        out = convolve(convolve(x, weight, None, *[(1, 1)] * 3), weight, None, *[(1, 1)] * 3)  # one weight for both
        (slope,) = torch.autograd.grad(out.square().sum(), [weight], create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), [weight])[0])
    assert distance(*found) < 1e-4


class Again(torch.autograd.Function):
    """An operation of torch with gradients as our kernels have them, where they have gradients themselves."""

    @staticmethod
    def forward(ctx: Any, operation: Any, *inputs: Tensor | None) -> Tensor:
        ctx.operation = operation
        ctx.save_for_backward(*inputs)
        return operation(*inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        with torch.enable_grad():
            return None, *kernel_support.second_order(ctx.operation, ctx.saved_tensors, grad_output)


@pytest.mark.parametrize("needs_grad", [True, False], ids=["images", "weights alone"])
@pytest.mark.parametrize("layer", ["norm", "convolution", "without bias"])
def test_a_gradient_of_a_gradient_of_a_weight_used_twice(layer: str, needs_grad: bool) -> None:
    """The first layer's share comes from the first layer, not also from the second."""

    def operation(*inputs: Any) -> Tensor:
        return F.group_norm(inputs[0], 2, *inputs[1:]) if layer == "norm" else torch.conv2d(*inputs, padding=1)

    shape = (4,) if layer == "norm" else (4, 4, 3, 3)
    x, weight, bias = (noise(*own, seed=k).double() for k, own in enumerate(((2, 4, 5, 5), shape, (4,))))
    rest = (weight, None if layer == "without bias" else bias)
    wanted = [own.requires_grad_() for own in (*[x] * needs_grad, *rest) if own is not None]
    found = []
    for own in (lambda *inputs: Again.apply(operation, *inputs), operation):
        out = own(own(x, *rest).square(), *rest)
        slopes = torch.autograd.grad(out.square().mean(), wanted, create_graph=True)
        found.append([*slopes, *torch.autograd.grad(sum(slope.square().sum() for slope in slopes), wanted)])
    for got, want in zip(*found, strict=True):
        assert torch.allclose(got, want)


def test_large_patches_are_left_to_torch() -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_products

    weight, once = torch.empty(64, 64, 3, 3, device="meta"), (1, 1)
    assert gpu_products.fits(torch.empty(64, 64, 32, 32, device="meta"), weight, once, once, once)
    assert not gpu_products.fits(torch.empty(64, 64, 56, 56, device="meta"), weight, once, once, once)
    assert not gpu_products.fits(torch.empty(1, 64, 1, 1, device="meta"), weight, once, (0, 0), once)


# 3x3 convolutions by Winograd's products: 1e-5 of the norm bounds the error of single precision, 1e-6 was seen.


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
def test_winograd_convolutions_are_torch_s(
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
def test_winograd_convolutions_of_any_size(size: tuple[int, int], padding: tuple[int, int], count: int) -> None:
    """Whole numbers have no rounding errors, so a wrong edge cannot hide."""
    pytest.importorskip("triton")
    assume(all(size[a] + 2 * padding[a] >= 3 for a in (0, 1)))
    x, weight, bias = (4 * noise(*own) for own in ((count, 16, *size), (16, 16, 3, 3), (16,)))
    x = x.round().contiguous(memory_format=torch.channels_last)
    for k, (got, want) in enumerate(both_ways(x, 4 * weight.round(), bias.round(), padding)):
        assert torch.equal(got.double(), want) if k == 0 else distance(got, want) < 1e-5


@needs_kernels
@pytest.mark.parametrize("sums", [1, 64, 10**6])
def test_winograd_sums_in_parts(sums: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import winograd

    monkeypatch.setattr(winograd, "_SUMS", sums)
    tiled, slopes = noise(16, 24, 32), noise(16, 24, 40, seed=1)
    assert winograd._parts(24, 40, 32) == {1: 1, 64: 4, 10**6: 8}[sums]
    found = winograd.sum_of_products(slopes, tiled)
    assert distance(found, slopes.double().mT @ tiled.double()) < 1e-5
    assert torch.equal(found, winograd.sum_of_products(slopes, tiled))


@needs_kernels
def test_a_gradient_of_a_winograd_convolution_s_gradient() -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import winograd

    found = []
    for convolve in (lambda *own: winograd.convolution(*own, (1, 1)), lambda *own: torch.conv2d(*own, padding=1)):
        x = noise(2, 16, 5, 5).contiguous(memory_format=torch.channels_last)
        weight, bias = (own.requires_grad_() for own in (noise(16, 16, 3, 3, seed=1) / 12, noise(16, seed=2)))
        out = convolve(convolve(x, weight, bias), weight, bias)  # one weight for both
        slopes = torch.autograd.grad(out.square().sum(), [weight, bias], create_graph=True)
        found.append(torch.autograd.grad(sum(own.square().sum() for own in slopes), [weight, bias]))
    assert all(distance(*pair) < 1e-4 for pair in zip(*found, strict=True))


@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_a_captured_winograd_convolution_has_the_same_bits() -> None:
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


def test_which_convolutions_are_winograd_s() -> None:
    """The stride-1 layers of ResNet-18; not its stem, nor what has fewer channels, other kernels or many images."""
    pytest.importorskip("triton")
    from fedc2i.engine.executors import winograd

    def fits(channels: int, outputs: int, side: int, kernel: int = 3, padding: int = 1, **other: int) -> bool:
        x = torch.empty(64, channels, side, side, device="meta")
        weight = torch.empty(outputs, channels, kernel, kernel, device="meta")
        geometry = [pair(own) for own in (other.get("stride", 1), padding, other.get("dilation", 1))]
        return winograd.fits(x, weight, *geometry)

    assert all(fits(*own) for own in ((64, 64, 32), (128, 128, 16), (256, 256, 8), (512, 512, 4), (32, 64, 7)))
    assert not any(fits(*own) for own in ((3, 64, 32), (64, 16, 32), (64, 64, 32, 1, 0), (64, 64, 32, 5, 2)))
    assert not fits(64, 64, 32, stride=2)
    assert not fits(64, 64, 32, dilation=2)
    assert fits(64, 64, 4, padding=0)
    assert not fits(64, 64, 3, padding=0)  # one output: 16 products in place of 9
    assert fits(64, 64, 56)
    assert not fits(64, 64, 112)


# Which layers are ours.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the layers that were ours, with torch's operations in the place of kernels."""
    made: list[str] = []

    def note(name: str, result: Tensor) -> Tensor:
        made.append(name)
        return result

    norms = SimpleNamespace(group_norm=lambda *own: note("norm", F.group_norm(*own)))
    products = SimpleNamespace(
        convolution=lambda *own: note("convolution", torch.conv2d(*own)), fits=lambda x, *rest: x.shape[2] < 9
    )
    tiles = SimpleNamespace(
        convolution=lambda *own: note("winograd", torch.conv2d(*own[:3], 1, own[3])),
        fits=lambda x, weight, stride, *rest: len(weight) > 6 and stride == (1, 1),
    )
    for name, module in (("gpu_norms", norms), ("gpu_products", products), ("winograd", tiles)):
        monkeypatch.setitem(sys.modules, f"fedc2i.engine.executors.{name}", module)
        monkeypatch.setattr(executors, name, module, raising=False)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: None if x.dtype == torch.float64 else object())
    return made


def test_norms_of_images_with_the_channels_last(calls: list[str]) -> None:
    """In a plain forward pass; all else is left to torch."""
    norm, last = nn.GroupNorm(2, 4), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    want = norm(last)
    with OwnLayers():
        assert torch.equal(norm(last), want)
        assert calls == ["norm"]
        norm(last.contiguous())
        norm(last[:, :, 0, 0])
        nn.GroupNorm(2, 4, affine=False)(last)
        nn.GroupNorm(2, 4).double()(last.double())
        F.group_norm(last, 2, torch.ones(1).expand(4), torch.zeros(4))  # not as kernels read it
        with pytest.raises(RuntimeError, match="weight"):
            F.group_norm(last, 2, torch.ones(3), torch.zeros(3))
        torch.func.vmap(norm)(torch.randn(3, 2, 4, 3, 3))
    assert calls == ["norm"]


def test_convolutions_in_ieee_precision(calls: list[str]) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1)
    last = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    want = layer(last)
    with repeatable(EngineSettings(precision="ieee")), OwnLayers():
        assert torch.equal(layer(last), want)
        assert calls == ["convolution"]
        layer(last.contiguous())
        layer(torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last))  # does not fit
        nn.Conv2d(4, 6, 3, padding="same")(last)
        nn.Conv2d(4, 6, 3, groups=2)(last)
        with pytest.raises(RuntimeError, match="channels"):
            nn.Conv2d(3, 6, 3)(last)
        with pytest.raises(RuntimeError, match="bias"):
            torch.conv2d(last, layer.weight, torch.ones(1))
        with torch.autocast("cpu", torch.bfloat16):
            layer(last)
    with repeatable(EngineSettings(precision="tf32")), OwnLayers():
        layer(last)
    assert calls == ["convolution"]


def test_winograd_comes_before_patches(calls: list[str]) -> None:
    """With the padding that torch is given."""
    last = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    with repeatable(EngineSettings(precision="ieee")), OwnLayers():
        for layer in (nn.Conv2d(4, 8, 3, padding=(0, 2)), nn.Conv2d(4, 8, 3, stride=2), nn.Conv2d(4, 6, 3)):
            layer(last)
    assert calls == ["winograd", "convolution", "convolution"]
