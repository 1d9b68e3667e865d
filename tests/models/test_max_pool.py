"""Max-pooling against torch's: values, gradients, odd sides, ties, lifted over clients and seeds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import grad, vmap
from torch.nn import functional as F  # noqa: N812

from fedc2i.models.networks import max_pool


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weighted(pool: object, x: Tensor, weight: Tensor) -> Tensor:
    return (pool(x) * weight).sum()  # type: ignore[operator]


def gradient_of(pool: object, x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(weighted(pool, x, weight), x)
    return gradient


def torch_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


@pytest.mark.parametrize("side", [(2, 2), (4, 6), (5, 5), (7, 4), (2, 9), (3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_and_gradients_are_torch_s(side: tuple[int, int], dtype: torch.dtype) -> None:
    x = noise(3, 2, *side).to(dtype)
    want = torch_pool(x)
    assert torch.equal(max_pool(x), want)
    weight = noise(*want.shape, seed=1).to(dtype)
    assert torch.equal(gradient_of(max_pool, x, weight), gradient_of(torch_pool, x, weight))


@pytest.mark.parametrize("layout", ["channels-last", "transposed", "every-second"])
def test_any_layout_in_memory(layout: str) -> None:
    x = {
        "channels-last": noise(2, 3, 6, 4).contiguous(memory_format=torch.channels_last),
        "transposed": noise(2, 3, 4, 6).transpose(2, 3),
        "every-second": noise(2, 3, 12, 8)[:, :, ::2, ::2],
    }[layout]
    weight = noise(2, 3, 3, 2, seed=1)
    assert torch.equal(max_pool(x), torch_pool(x))
    assert torch.equal(gradient_of(max_pool, x, weight), gradient_of(torch_pool, x, weight))


@pytest.mark.parametrize("side", [(4, 4), (5, 7)], ids=str)
def test_lifted_over_clients_and_seeds(side: tuple[int, int]) -> None:
    x = noise(2, 3, 4, 2, *side)  # (S, K, B, C, H, W)
    want = torch_pool(x.flatten(0, 2)).reshape(2, 3, 4, 2, side[0] // 2, side[1] // 2)
    assert torch.equal(vmap(vmap(max_pool))(x), want)
    assert torch.equal(vmap(vmap(max_pool, in_dims=1), in_dims=2)(x.transpose(0, 2)), want)
    weight = noise(*want.shape, seed=1)
    each = vmap(vmap(grad(lambda own, w: weighted(max_pool, own, w))))(x, weight)
    assert torch.equal(each, gradient_of(lambda own: vmap(vmap(torch_pool))(own), x, weight))


def test_gradients_lifted_with_an_input_that_all_clients_share() -> None:
    x, weight = noise(4, 2, 4, 4), noise(3, 4, 2, 2, 2, seed=1)
    got = vmap(grad(lambda own, w: weighted(max_pool, own, w)), in_dims=(None, 0))(x, weight)
    assert torch.equal(got, torch.stack([gradient_of(torch_pool, x, own) for own in weight]))


def test_gradients_by_finite_differences() -> None:
    x = torch.randperm(2 * 2 * 4 * 6, generator=torch.Generator().manual_seed(0)).reshape(2, 2, 4, 6).double()
    assert gradcheck(max_pool, (x.requires_grad_(),))


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), -float("inf")])
def test_of_equal_maxima_exactly_one_gets_the_gradient(value: float) -> None:
    x, weight = torch.full((2, 3, 4, 6), value), noise(2, 3, 2, 3)
    gradient = gradient_of(max_pool, x, weight)
    windows = gradient.reshape(2, 3, 2, 2, 3, 2).permute(0, 1, 2, 4, 3, 5).flatten(4)  # (B, C, H/2, W/2, 4)
    assert ((windows != 0).sum(-1) == 1).all()
    assert torch.equal(windows.sum(-1), weight)


@pytest.mark.parametrize("place", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_show(bad: float, place: tuple[int, int]) -> None:
    x = noise(1, 1, 4, 4)
    x[0, 0, place[0], place[1]] = bad
    assert torch.equal(max_pool(x).nan_to_num(77), torch_pool(x).nan_to_num(77))
    assert torch.isnan(max_pool(x)[0, 0, 0, 0]) == (bad != bad)


def test_a_second_derivative_is_refused_not_wrong() -> None:
    x = noise(1, 1, 4, 4).requires_grad_()
    (first,) = torch.autograd.grad(max_pool(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivatives"):
        torch.autograd.grad(first.square().sum(), x)
