"""The paper's ablation variants on a tiny case, against oracles."""

from __future__ import annotations

import pytest
import torch

from fedc2i.core.params import Params, stack
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_ablation import FedC2IClassGlobal, FedC2IClassLocal, FedC2IClient
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers
from support.method_checks import personalise

GAMMA = 3.0
VARIANTS = (FedC2IClient, FedC2IClassGlobal, FedC2IClassLocal)


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)


def mean(problem: Problem) -> Params:
    return {name: tensor.mean(0) for name, tensor in stack(problem.models).items()}


def body_of(problem: Problem, model: Params) -> Params:
    return {name: tensor for name, tensor in model.items() if name not in problem.head}


def test_only_the_vector(problem: Problem) -> None:
    start, report = personalise(problem, FedC2IClient(gamma=GAMMA))
    vector = by_powers(problem.client_losses(), GAMMA)
    head = problem.mixed_head(vector[:, None].expand(-1, 5))
    assert_same_model(start, {**problem.mixed_body(vector), **head}, rtol=1e-9)
    assert report.keys() == {"left_out", "client_losses", "influence_vector"}


@pytest.mark.parametrize("kind", [FedC2IClassLocal, FedC2IClassGlobal])
@pytest.mark.parametrize("influence", ["exact", "first-order"])  # of no account without a vector
def test_only_the_matrix(problem: Problem, kind: type[FedC2I], influence: str) -> None:
    start, report = personalise(problem, kind(gamma=GAMMA, influence=influence))  # type: ignore[arg-type]
    body = body_of(problem, problem.own if kind is FedC2IClassLocal else mean(problem))
    matrix = by_powers(problem.class_losses(), GAMMA)
    assert_same_model(start, {**body, **problem.mixed_head(matrix)}, rtol=1e-9)
    assert report.keys() == {"left_out", "class_losses", "influence_matrix"}


@pytest.mark.parametrize("kind", VARIANTS)
@pytest.mark.parametrize("why", ["unknown", "broken"])
def test_a_client_that_cannot_measure_starts_from_the_mean(problem: Problem, kind: type[FedC2I], why: str) -> None:
    own = problem.own if why == "unknown" else {name: tensor * torch.nan for name, tensor in problem.own.items()}
    start, _ = personalise(problem, kind(gamma=GAMMA), own=own, position=-1 if why == "unknown" else 2)
    assert_same_model(start, mean(problem), rtol=1e-9)


@pytest.mark.parametrize("kind", VARIANTS)
def test_with_no_valid_model_its_own_is_kept(problem: Problem, kind: type[FedC2I]) -> None:
    own = problem.own
    problem.models = [{name: tensor * torch.nan for name, tensor in model.items()} for model in problem.models]
    start, _ = personalise(problem, kind(gamma=GAMMA), own=own)
    assert_same_model(start, own, rtol=0, atol=0)
