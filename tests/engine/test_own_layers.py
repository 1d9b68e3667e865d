"""Layers of large models by our own kernels against torch's; without a GPU in Triton's interpreter, if it is on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.seeding import repeatable
from fedc2i.core.settings import EngineSettings
from fedc2i.engine import executors
from fedc2i.engine.executors.own_layers import OwnLayers
from fedc2i.engine.executors.stacked import kernel_support
from fedc2i.engine.executors.stacked.vmap_rules import pair
from support.kernels import distance, needs_kernels, noise


def leaves_of(count: int, channels: int, height: int, width: int) -> list[Tensor]:
    x = (3 + noise(count, channels, height, width)).contiguous(memory_format=torch.channels_last)
    return [own.requires_grad_() for own in (x, noise(channels, seed=1), noise(channels, seed=2))]


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
@pytest.mark.parametrize("name", ["gpu_products", "winograd"])
def test_a_gradient_of_a_convolution_s_gradient(name: str) -> None:
    pytest.importorskip("triton")
    from fedc2i.engine.executors import gpu_products, winograd

    one = (1, 1)
    ours = {
        "gpu_products": lambda *own: gpu_products.convolution(*own, one, one, one),
        "winograd": lambda *own: winograd.convolution(*own, one),
    }
    found = []
    for convolve in (ours[name], lambda *own: torch.conv2d(*own, padding=1)):
        x = noise(2, 16, 5, 5).contiguous(memory_format=torch.channels_last)
        weight, bias = (own.requires_grad_() for own in (noise(16, 16, 3, 3, seed=1) / 12, noise(16, seed=2)))
        out = convolve(convolve(x, weight, bias), weight, bias)  # one weight for both
        slopes = torch.autograd.grad(out.square().sum(), [weight, bias], create_graph=True)
        found.append(torch.autograd.grad(sum(own.square().sum() for own in slopes), [weight, bias]))
    assert all(distance(*pair) < 1e-4 for pair in zip(*found, strict=True))


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


# Which layers are ours.


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Names and geometries of the layers that were ours, with torch's operations in the place of kernels."""
    made: list[tuple[Any, ...]] = []

    def recorded(name: str, operation: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def compute(x: Tensor, *given: Any) -> Tensor:
            made.append((name, *[own for own in given if isinstance(own, tuple)]))
            with suppress(RuntimeError):  # kernels do not look at shapes
                return operation(x, *given)
            return x

        return compute

    norms = SimpleNamespace(group_norm=recorded("norm", F.group_norm))
    products = SimpleNamespace(convolution=recorded("patches", torch.conv2d), fits=lambda x, *rest: x.shape[2] < 9)
    tiles = SimpleNamespace(
        convolution=recorded("winograd", lambda *own: torch.conv2d(*own[:3], 1, own[3])),
        fits=lambda x, weight, stride, *rest: len(weight) > 6 and stride == (1, 1),
    )
    for name, module in (("gpu_norms", norms), ("gpu_products", products), ("winograd", tiles)):
        monkeypatch.setitem(sys.modules, f"fedc2i.engine.executors.{name}", module)
        monkeypatch.setattr(executors, name, module, raising=False)
    monkeypatch.setattr(kernel_support, "layers_for", lambda x: None if x.dtype == torch.float64 else object())
    return made


def test_norms_of_images_with_the_channels_last(calls: list[tuple[Any, ...]]) -> None:
    """In a plain forward pass; all else is left to torch."""
    norm, last = nn.GroupNorm(2, 4), torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)
    others: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (norm, last.contiguous()),
        (norm, last[:, :, 0, 0]),
        (nn.GroupNorm(2, 4, affine=False), last),
        (nn.GroupNorm(2, 4).double(), last.double()),
        (lambda x: F.group_norm(x, 2, torch.ones(1).expand(4), torch.zeros(4)), last),  # not as kernels read it
        (torch.func.vmap(norm), last[None].contiguous()),
    ]
    want, theirs = norm(last), [layer(x) for layer, x in others]
    with OwnLayers():
        assert all(torch.equal(layer(x), own) for (layer, x), own in zip(others, theirs, strict=True))
        with pytest.raises(RuntimeError, match="weight"):
            F.group_norm(last, 2, torch.ones(3), torch.zeros(3))
        assert not calls
        assert torch.equal(norm(last), want)
    assert calls == [("norm",)]


def test_convolutions_in_ieee_precision(calls: list[tuple[Any, ...]]) -> None:
    layer = nn.Conv2d(4, 6, 3, padding=1)
    last = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    others: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (layer, last.contiguous()),
        (layer, torch.randn(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)),  # does not fit
        (nn.Conv2d(4, 6, 3, padding="same"), last),
        (nn.Conv2d(4, 6, 3, groups=2), last),
        (torch.autocast("cpu", torch.bfloat16)(layer.forward), last),
    ]
    want, theirs = layer(last), [other(x) for other, x in others]
    with repeatable(EngineSettings(precision="ieee")), OwnLayers():
        assert all(torch.equal(other(x), own) for (other, x), own in zip(others, theirs, strict=True))
        with pytest.raises(RuntimeError, match="channels"):
            nn.Conv2d(3, 6, 3)(last)
        with pytest.raises(RuntimeError, match="bias"):
            torch.conv2d(last, layer.weight, torch.ones(1))
    with repeatable(EngineSettings(precision="tf32")), OwnLayers():
        assert torch.equal(layer(last), want)
    assert not calls
    with repeatable(EngineSettings(precision="ieee")), OwnLayers():
        assert torch.equal(layer(last), want)
    assert calls == [("patches", (1, 1), (1, 1), (1, 1))]


def test_winograd_comes_before_patches(calls: list[tuple[Any, ...]]) -> None:
    """With the geometry that torch is given."""
    last = torch.randn(2, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    layers = [nn.Conv2d(4, 8, 3, 1, (0, 2)), nn.Conv2d(4, 8, 3, 2, (0, 3), (1, 2)), nn.Conv2d(4, 6, 3)]
    want = [layer(last) for layer in layers]
    with repeatable(EngineSettings(precision="ieee")), OwnLayers():
        assert all(torch.equal(layer(last), own) for layer, own in zip(layers, want, strict=True))
    patches = [("patches", (2, 2), (0, 3), (1, 2)), ("patches", (1, 1), (0, 0), (1, 1))]
    assert calls == [("winograd", (0, 2)), *patches]
