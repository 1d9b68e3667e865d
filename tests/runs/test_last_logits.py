"""Predictions come from the last evaluation where it has the bits that the last models alone would give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.runs import driver
from fedc2i.runs.plan import Plan, prepare

RUNS = [  # method, executor, clients a round
    ("fedavg", "workers", 2),
    ("fedc2i", "looped", 2),
    ("fedrod", "looped", 3),
    ("ditto", "looped", 2),
    ("pooled", "looped", 3),
]


def plan_of(federation: Federation, method: str, **settings: Any) -> Plan:
    (plan,) = prepare([method], {"rounds": 2, "seeds": (0, 1), "model": "lenet5", **settings}, federation)
    return plan


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds whose predictions are computed again."""
    seeds, real = list[int](), driver._logits

    def noted(plan: Plan, outcomes: Any) -> Any:
        seeds.extend(outcomes)
        return real(plan, outcomes)

    monkeypatch.setattr(driver, "_logits", noted)
    return seeds


@pytest.mark.parametrize(("method", "executor", "clients"), RUNS)
def test_bits_of_the_last_models(
    method: str, executor: str, clients: int, make_federation: Callable[..., Federation], asked: list[int]
) -> None:
    plan = plan_of(make_federation((9, 7, 5)), method, executor=executor, clients_per_round=clients)
    result = driver.execute(plan)
    assert asked == []
    assert result.predictions is not None
    without = {seed: replace(outcome, logits={}) for seed, outcome in result.outcomes.items()}
    again = driver.test_predictions(plan, without)
    assert asked == [0, 1]
    assert again is not None
    assert list(again.logs) == list(result.predictions.logs) == [(seed, point) for seed in (0, 1) for point in POINTS]
    for key, logs in again.logs.items():
        np.testing.assert_array_equal(result.predictions.logs[key], logs)


@pytest.mark.parametrize("how", [{"executor": "stacked"}, {"rounds": 9, "patience": 1, "optimizer": "sgd", "lr": 1e-9}])
def test_what_an_evaluation_does_not_bring_is_computed(
    how: dict[str, Any], make_federation: Callable[..., Federation], asked: list[int]
) -> None:
    """Of stacked clients, and of seeds that stopped before the last round."""
    federation = make_federation((9, 7, 5), validation=4)
    result = driver.execute(plan_of(federation, "fedavg", **{"executor": "looped", **how}))
    assert asked == [0, 1]
    assert result.predictions is not None
    assert result.predictions.logs[1, "trained"].shape == (sum(result.predictions.samples), len(federation.classes))
