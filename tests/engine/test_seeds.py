"""All seeds side by side: the numbers of a seed do not depend on the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from oracles import assert_same_model
from support.method_checks import in_double

SIZES = (12, 20, 7, 9)
SEEDS = (3, 0, 11)
TRAINING = TrainingSettings(batch_size=8, lr=0.01)
EXACT = {"rtol": 0.0, "atol": 0.0}
TOLERANCE: dict[str, dict[str, float]] = {"looped": EXACT, "stacked": {"rtol": 1e-5, "atol": 1e-9}}
executors = pytest.mark.parametrize("executor", ["looped", "stacked"])


def run(
    method: Method, model: Model, federation: Federation, seeds: tuple[int, ...], rounds: int = 2, **settings: Any
) -> tuple[dict[int, Outcome], dict[int, list[Round]]]:
    """Outcomes and reports, by seed."""
    reports: dict[int, list[Round]] = {seed: [] for seed in seeds}
    how = EngineSettings(rounds=rounds, **vars(TRAINING), **settings)
    outcomes = simulate(method, model, federation, how, seeds, on_round=lambda one: reports[one.seed].append(one))
    assert tuple(outcomes) == seeds
    return outcomes, reports


def assert_each_as_alone(
    method: Method,
    model: Model,
    federation: Federation,
    tolerance: dict[str, float],
    seeds: tuple[int, ...] = SEEDS,
    **settings: Any,
) -> dict[int, list[Round]]:
    """Returns the reports of the runs side by side; the first and the last seed are run alone as well."""
    outcomes, reports = run(method, model, federation, seeds, **settings)
    for seed in (seeds[0], seeds[-1]):
        alone, alone_reports = run(method, model, federation, (seed,), **settings)
        assert_same_model(outcomes[seed].trained, alone[seed].trained, **tolerance)
        assert_same_model(outcomes[seed].received, alone[seed].received, **tolerance)
        assert outcomes[seed].last is reports[seed][-1]
        for one, two in zip(reports[seed], alone_reports[seed], strict=True):
            assert (one.seed, one.round) == (seed, two.round)
            assert (one.participants, one.refused) == (two.participants, two.refused)
            for point, metrics in two.metrics.items():
                for a, b in zip(one.metrics[point], metrics, strict=True):
                    assert a == (b if tolerance == EXACT else pytest.approx(b, rel=1e-4))
            for kind, values in two.influence.items():
                np.testing.assert_allclose(one.influence[kind], values, rtol=100 * tolerance["rtol"], atol=1e-6)
    return reports


@pytest.fixture
def normed(make_model: Callable[..., Model]) -> Model:
    return in_double(make_model(layer_norm=True))


@executors
@pytest.mark.parametrize(
    ("name", "participation"),
    [
        ("fedavg", "100%"),
        ("fedc2i", "50%"),
        ("fedrep", "50%"),
        *(
            pytest.param(name, share, marks=pytest.mark.slow)
            for name in ("fedala", "fedpac")
            for share in ("100%", "50%")
        ),
    ],
)
def test_every_seed_as_alone(
    name: str, participation: str, executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, method = make_federation(sizes=SIZES, validation=2), Method.registry[name]()
    settings = {"executor": executor, "clients_per_round": participation, "evaluate_every": 2}
    reports = assert_each_as_alone(method, normed, federation, TOLERANCE[executor], **settings)
    if participation == "50%":  # seeds choose for themselves
        assert len({tuple(one.participants for one in own) for own in reports.values()}) == len(SEEDS)


@executors
@pytest.mark.parametrize("order", [(0, 11)], ids=str)
def test_the_order_of_seeds_does_not_matter(
    order: tuple[int, ...], executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=SIZES)
    straight, reports = run(FedC2I(), normed, federation, SEEDS, executor=executor)
    other, other_reports = run(FedC2I(), normed, federation, order, executor=executor)
    for seed in order:
        assert_same_model(other[seed].trained, straight[seed].trained, **TOLERANCE[executor])
        assert_same_model(other[seed].received, straight[seed].received, **TOLERANCE[executor])
        want = [one.mean("trained") for one in reports[seed]]
        assert [one.mean("trained") for one in other_reports[seed]] == pytest.approx(want)


@executors
def test_seeds_differ(executor: str, normed: Model, federation: Federation) -> None:
    outcomes, _ = run(FedAvg(), normed, federation, SEEDS, rounds=1, executor=executor)
    heads = [outcomes[seed].trained["head.weight"] for seed in SEEDS]
    assert not torch.allclose(heads[0], heads[1])
    assert not torch.allclose(heads[1], heads[2])


@executors
def test_reports_come_round_by_round(executor: str, normed: Model, federation: Federation) -> None:
    seen: list[tuple[int, int]] = []
    settings = EngineSettings(rounds=2, executor=executor, **vars(TRAINING))  # type: ignore[arg-type]
    simulate(FedAvg(), normed, federation, settings, SEEDS, on_round=lambda one: seen.append((one.round, one.seed)))
    assert seen == [(number, seed) for number in (1, 2) for seed in SEEDS]


# Seeds that go different ways.


@dataclass(frozen=True)
class Marked(FedAvg):
    """Gives every model a mark of its seed that stays: the sign of one of its first weights."""

    def setup(self, params: Params, model: Model) -> Params:
        return {**params, "mark": params["head.weight"][0, 0].sign()}

    def untrained(self, model: Model) -> frozenset[str]:
        return frozenset({"mark"})


def marks(model: Model, seeds: tuple[int, ...]) -> dict[int, int]:
    return {seed: int(model.init(seed, "init")["head.weight"][0, 0].sign()) for seed in seeds}


@dataclass(frozen=True)
class Stopping(Marked):
    """Validation labels are all 0: seeds of mark 1 are better in round 2 once more, the others never."""

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        right = (params["mark"] > 0) & torch.tensor(site.round >= 2)
        return torch.where(right, torch.tensor([1.0, 0, 0, 0]), torch.tensor([0.0, 0, 0, 1])).expand(len(x), 4)


@pytest.mark.parametrize(("executor", "participation"), [("looped", "100%"), ("stacked", "50%")])
def test_seeds_that_stop_at_different_rounds(
    participation: str, executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, seeds = make_federation(sizes=SIZES, validation=1), (0, 1, 2)
    kinds = marks(normed, seeds)
    assert set(kinds.values()) == {-1, 1}
    settings = {"executor": executor, "patience": 2, "rounds": 6, "clients_per_round": participation}
    reports = assert_each_as_alone(Stopping(), normed, federation, TOLERANCE[executor], seeds, **settings)
    assert {seed: len(own) for seed, own in reports.items()} == {s: 4 if kinds[s] > 0 else 3 for s in seeds}


@dataclass(frozen=True)
class Broken(Marked):
    """All uploads of seeds of mark 1 are nan, from the second round on if ``late``."""

    late: bool = False

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        hit = (params["mark"] > 0) & torch.tensor(site.round >= (2 if self.late else 1))
        factor = torch.where(hit, torch.nan, 1.0)
        return {name: tensor * factor for name, tensor in super().upload(params, data, site).items()}


@executors
@pytest.mark.parametrize("late", [False, True], ids=["at-once", "later"])
def test_a_seed_whose_clients_are_all_refused_beside_sound_ones(
    late: bool, executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    """In round 2 some seeds have received something and others have not: they cannot be stacked together."""
    federation, seeds = make_federation(sizes=SIZES), (0, 1, 2)
    kinds = marks(normed, seeds)
    assert set(kinds.values()) == {-1, 1}
    settings = {"executor": executor, "rounds": 3}
    reports = assert_each_as_alone(Broken(late=late), normed, federation, TOLERANCE[executor], seeds, **settings)
    for seed, own in reports.items():
        refused = [bool(kinds[seed] > 0 and (number > 1 or not late)) for number in (1, 2, 3)]
        assert [one.refused for one in own] == [federation.names if hit else () for hit in refused]


# Random numbers in training.


@pytest.mark.parametrize(("executor", "participation"), [("looped", "100%"), ("stacked", "50%")])
def test_a_seed_s_dropout_does_not_depend_on_the_other_seeds(
    participation: str, executor: str, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    federation, model = make_federation(sizes=SIZES), in_double(make_model(dropout=0.5))
    settings = {"executor": executor, "clients_per_round": participation}
    assert_each_as_alone(FedAvg(), model, federation, EXACT, **settings)
    dropped, _ = run(FedAvg(), model, federation, (0,), **settings)
    plain, _ = run(FedAvg(), in_double(make_model()), federation, (0,), **settings)
    assert not torch.allclose(dropped[0].trained["head.weight"], plain[0].trained["head.weight"])


@pytest.mark.parametrize(("executor", "at_once"), [("looped", 0), ("stacked", 0), ("stacked", 1)])
def test_dropout_differs_between_clients(
    executor: Any, at_once: int, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    """Clients with the same data, from the same start, in one batch: they end apart only because of their masks."""
    (one,) = make_federation(sizes=(12,)).clients
    both = tuple(replace(one, name=name) for name in "ab")
    training = TrainingSettings(epochs=1, batch_size=12, optimizer="sgd", lr=0.1)
    settings = EngineSettings(rounds=1, executor=executor, clients_at_once=at_once, **vars(training))
    for dropout, same in ((0.0, True), (0.5, False)):
        model = in_double(make_model(dropout=dropout))
        outcome = simulate(FedAvg(), model, Federation("twins", both, tuple("wxyz")), settings, [0])[0]
        first, second = outcome.trained["hidden.weight"]
        assert torch.allclose(first, second, rtol=1e-9) == same
