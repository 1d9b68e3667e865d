"""FedC²I for many clients: models that are too old, the weight of the own model, by hand and against oracles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fedc2i.core.params import stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.methods.math.influence import Gamma
from fedc2i.methods.messages import Peers, Uploads, relay
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers, class_losses, client_losses, mixed_body, mixed_head

GAMMA = 3.0
NO_MODEL = split(nn.Sequential(nn.Linear(1, 2)), head="0")


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)


# Old models.


def uploads_of(problem: Problem, ages: list[int]) -> Uploads:
    count = len(problem.models)
    return Uploads(stack(problem.models), tuple(range(count)), torch.ones(count), torch.tensor(ages), round=9)


@pytest.mark.parametrize(
    ("max_age", "ages", "kept"),
    [
        (0, [0, 3, 0, 1], (0, 2)),
        (1, [0, 3, 0, 1], (0, 2, 3)),
        (9, [0, 3, 0, 1], (0, 1, 2, 3)),
        (0, [2, 3, 5, 2], (0, 3)),
    ],
    ids=["this round's", "up to one", "all", "the youngest if none is young enough"],
)
def test_old_models_are_not_sent(problem: Problem, max_age: int, ages: list[int], kept: tuple[int, ...]) -> None:
    download, _ = FedC2IMany(max_age=max_age).combine(uploads_of(problem, ages), {})
    assert download.clients == kept
    for name, tensor in stack([problem.models[k] for k in kept]).items():
        assert torch.equal(download.shared[name], tensor)


def test_a_client_whose_model_is_old_measures_with_the_mean() -> None:
    """As if the mean of the models it received were its own, and had not been sent."""
    everyone = Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)
    others = [everyone.models[k] for k in (0, 1, 3)]
    site = Site(split(everyone.build, head="2"), torch.ones(5), torch.tensor(-1), relay(stack(others)))
    batch = Batch(everyone.x, everyone.y, torch.ones(7).double())
    method = FedC2IMany(gamma=GAMMA, gamma_class=None, influence="exact", own_weight="measured")
    start, report = method.personalise(everyone.own, batch, site)
    mean = {name: tensor.mean(0) for name, tensor in stack(others).items()}
    vector = by_powers(client_losses(everyone.build, everyone.head, others, mean, everyone.x, everyone.y), GAMMA)
    assert_close(report["influence_vector"], vector)
    matrix = by_powers(class_losses(everyone.build, everyone.head, others, mean, everyone.x, everyone.y), GAMMA)
    body = mixed_body(others, everyone.head, vector)
    assert_same_model(start, {**body, **mixed_head(others, everyone.head, matrix)}, rtol=1e-9)


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_gamma_zero_without_old_models_is_fedavg_when_few_take_part(
    executor: Any, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=(9, 12, 7, 9, 8))
    settings = EngineSettings(rounds=4, clients_per_round=2, **vars(TrainingSettings(batch_size=5)), executor=executor)
    both = [
        simulate(method, model, federation, settings, (0,))
        for method in (FedAvg(), FedC2IMany(gamma=0, gamma_class=0, own_weight="measured"))
    ]
    for point in ("trained", "received"):
        want, got = (getattr(own[0], point) for own in both)
        for name, tensor in want.items():
            assert torch.equal(got[name], tensor), (point, name)
    kept = simulate(
        FedC2IMany(gamma=0, gamma_class=0, own_weight="measured", max_age=None), model, federation, settings, (0,)
    )
    assert not torch.equal(kept[0].received[name], both[0][0].received[name])


# The weight of the client's own model.


def weigh(losses: Tensor, gamma: float | Gamma, position: int, valid: list[bool] | None = None) -> Tensor:
    flags = torch.tensor(valid or [True] * len(losses))
    peers = Peers({}, flags, torch.tensor(position), ())
    site = Site(NO_MODEL, torch.ones(1), torch.tensor(position), {})
    return FedC2IMany().weigh(losses, gamma, peers, site).weights


@pytest.mark.parametrize("position", [2, -1], ids=["among those received", "not among them"])
def test_own_weight_equal_by_hand(position: int) -> None:
    """Of four models the own has a quarter, and the others share the rest by their influence."""
    weights = weigh(torch.tensor([1.0, 2.0, 100.0, 3.0]), 1.0, position)
    want = [0.125, 0.25, 0.25, 0.375] if position == 2 else [1 / 106, 2 / 106, 100 / 106, 3 / 106]
    assert_close(weights, torch.tensor(want))


def test_own_weight_equal_for_each_class_and_of_the_valid() -> None:
    losses = torch.tensor([[1.0, 1.0], [2.0, 3.0], [9.0, 9.0], [1.0, 9.0]])
    weights = weigh(losses, 1.0, 2, valid=[True, True, True, False])
    third, rest = 1 / 3, 2 / 3
    want = [[rest / 3, rest / 4], [rest * 2 / 3, rest * 3 / 4], [third, third], [0.0, 0.0]]
    assert_close(weights, torch.tensor(want))


def test_own_weight_equal_in_an_exchange(problem: Problem) -> None:
    site = Site(split(problem.build, head="2"), torch.ones(5), torch.tensor(2), relay(stack(problem.models)))
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    start, report = FedC2IMany(gamma=GAMMA, influence="exact").personalise(problem.own, batch, site)
    vector = report["influence_vector"]
    others = torch.tensor([k for k in range(4) if k != problem.position])
    powers = problem.client_losses()[others] ** GAMMA
    assert_close(vector[problem.position].item(), 0.25)
    assert_close(vector[others], 0.75 * powers / powers.sum())
    body = problem.mixed_body(vector)
    assert_same_model({name: start[name] for name in body}, body, rtol=1e-9)


def test_own_weight_equal_of_a_single_model() -> None:
    assert weigh(torch.ones(1), 5.0, 0).tolist() == [1.0]


@pytest.mark.parametrize("gamma", [5.0, Gamma.parse("perplexity(40%)")], ids=str)
def test_own_weight_equal_where_no_other_loss_is_finite(gamma: float | Gamma) -> None:
    """All of it is the own model's then: a share alone would shrink the model."""
    losses = torch.tensor([[torch.inf, 1.0], [torch.nan, 2.0], [9.0, 1.0], [torch.inf, torch.nan]])
    weights = weigh(losses, gamma, 2)
    assert weights[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0]
    assert_close(weights.sum(0), torch.ones(2))
    assert weights[2, 1] == 0.25
