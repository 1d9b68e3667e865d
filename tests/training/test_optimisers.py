"""Optimisers against torch's, number by number, over ten steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fedc2i.core.settings import TrainingSettings
from fedc2i.training.local import Optimiser

SHAPES = ((3, 4), (5,), (), (2, 1, 3))
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "adam": ({"optimizer": "adam", "lr": 0.02}, lambda p: torch.optim.Adam(p, 0.02)),
    "adam-decay": (
        {"optimizer": "adam", "lr": 0.02, "weight_decay": 0.3},
        lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.3),
    ),
    "sgd": ({"optimizer": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, 0.1)),
    "sgd-decay": (
        {"optimizer": "sgd", "lr": 0.1, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.3),
    ),
    "sgd-momentum": (
        {"optimizer": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.3},
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.3),
    ),
}
case = pytest.mark.parametrize(("options", "torch_s"), CASES.values(), ids=CASES.keys())


def drawn(seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def missing(number: int, step: int) -> bool:
    """The second tensor never gets a gradient, the last one only from the fourth step on, the first not in step 6."""
    return number == 1 or (number == 3 and step < 3) or (number == 0 and step == 5)


def by_torch(torch_s: Any, start: list[Tensor], gradients: list[list[Tensor | None]]) -> list[Tensor]:
    params = [tensor.clone().requires_grad_() for tensor in start]
    stepper = torch_s(params)
    for step in gradients:
        for param, gradient in zip(params, step, strict=True):
            param.grad = None if gradient is None else gradient.clone()
        stepper.step()
    return [param.detach() for param in params]


def ten(dtype: torch.dtype = torch.float64, some_missing: bool = False) -> list[list[Tensor | None]]:
    return [
        [None if some_missing and missing(k, step) else own for k, own in enumerate(drawn(100 + step, dtype))]
        for step in range(10)
    ]


@case
@pytest.mark.parametrize("some_missing", [False, True], ids=["all", "some-without-gradient"])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["double", "single"])
def test_ten_steps_are_torch_s(
    options: dict[str, Any], torch_s: Any, dtype: torch.dtype, rtol: float, some_missing: bool
) -> None:
    params = drawn(0, dtype)
    optimiser = Optimiser(TrainingSettings(**options), params)
    gradients = ten(dtype, some_missing)
    for step in gradients:
        optimiser.step(step)
    for got, want, start in zip(params, by_torch(torch_s, drawn(0, dtype), gradients), drawn(0, dtype), strict=True):
        assert_close(got, want, rtol=rtol, atol=rtol)
        assert torch.equal(got, start) == (some_missing and start.shape == (5,))


@case
def test_after_a_reset_it_is_as_new(options: dict[str, Any], torch_s: Any) -> None:
    params = drawn(0)
    optimiser = Optimiser(TrainingSettings(**options), params)
    for step in ten():
        optimiser.step(step)
    for param, start in zip(params, drawn(0), strict=True):
        param.copy_(start)
    optimiser.reset()
    for step in ten()[:4]:
        optimiser.step(step)
    for got, want in zip(params, by_torch(torch_s, drawn(0), ten()[:4]), strict=True):
        assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_parameters_that_ask_for_gradients_are_updated_in_place(kind: Any) -> None:
    leaf = torch.ones(3, requires_grad=True)
    Optimiser(TrainingSettings(optimizer=kind, lr=0.5), [leaf]).step([torch.ones(3)])
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert_close(leaf.detach(), torch.full((3,), 0.5))  # Adam's first step is lr, too


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_nothing_to_do(kind: Any) -> None:
    params = drawn(0)
    Optimiser(TrainingSettings(optimizer=kind, lr=0.5, weight_decay=1.0), params).step([None] * len(params))
    assert all(torch.equal(got, want) for got, want in zip(params, drawn(0), strict=True))


def test_a_gradient_is_not_changed() -> None:
    gradient = torch.ones(3)
    params = [torch.ones(3)]
    for options, _ in CASES.values():
        Optimiser(TrainingSettings(**options), params).step([gradient])
    assert gradient.tolist() == [1, 1, 1]
