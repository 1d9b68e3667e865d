"""Predictions are the logits of the last evaluation, in a run that was interrupted after it as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i.data.federation import Federation
from fedc2i.engine import records
from fedc2i.engine.records import POINTS, Outcome, Point
from fedc2i.engine.seed_run import SeedRun
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.runs import driver
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.plan import Plan, prepare
from support.cut_runs import cut_off, result_files

RUNS = [  # method, executor, clients a round
    ("fedavg", "workers", 2),
    ("fedc2i", "looped", 2),
    ("fedrod", "looped", 3),
    ("ditto", "looped", 2),
    ("pooled", "looped", 3),
    *((method, "stacked", 2) for method in ("fedavg", "fedc2i", "ditto")),
    *((method, "stacked", 3) for method in ("fedrod", "pooled")),
]
STOPS: dict[str, Any] = {"rounds": 9, "patience": 1, "optimizer": "sgd", "lr": 1e-9}  # seeds end before the last round


def plan_of(federation: Federation, method: str, **settings: Any) -> Plan:
    defaults = {"rounds": 2, "seeds": (0, 1), "model": "lenet5", "device": "cpu", "executor": "looped"}
    (plan,) = prepare([method], {**defaults, **settings}, federation)
    return plan


def by_the_last_models(plan: Plan, outcome: Outcome, point: Point) -> np.ndarray[Any, Any]:
    """Log-probabilities that each client's last model gives alone."""
    found = []
    for k, client in enumerate(plan.federation.clients):
        models = outcome.trained if point == "trained" else outcome.received
        counts = client.train.y.bincount(minlength=len(plan.federation.classes))
        site = Site(plan.model, counts, torch.tensor(k), {}, rounds=plan.config.rounds)
        with torch.no_grad():
            found.append(plan.method.predict({name: rows[k] for name, rows in models.items()}, client.test.x, site))
    return torch.cat(found).double().log_softmax(1).float().numpy()


@pytest.mark.parametrize(("method", "executor", "clients"), RUNS)
def test_they_are_of_the_last_models_and_give_the_scores(
    method: str, executor: str, clients: int, make_federation: Callable[..., Federation]
) -> None:
    """To the bit, unless clients are stacked: these are computed with other operations than one alone."""
    plan = plan_of(make_federation((9, 7, 5)), method, executor=executor, clients_per_round=clients)
    result = driver.execute(plan)
    own = result.predictions
    assert own is not None
    assert list(own.logs) == [(seed, point) for seed in (0, 1) for point in POINTS]
    for (seed, point), logs in own.logs.items():
        want = by_the_last_models(plan, result.outcomes[seed], point)
        np.testing.assert_allclose(logs, want, rtol=0, atol=1e-5 if executor == "stacked" else 0)
        right = logs.argmax(1) == own.labels
        accuracy = [100 * right[own.rows(k)].mean() for k in range(len(own.samples))]
        np.testing.assert_array_equal(accuracy, result.accuracy(point)[seed])


@pytest.mark.parametrize("more", [{}, STOPS], ids=["last-round", "patience"])
@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_nobody_is_scored_after_the_last_round(
    executor: str,
    more: dict[str, Any],
    make_federation: Callable[..., Federation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, real = list[str](), FedAvg.predict
    simulate = driver.simulate

    def predict(self: FedAvg, *given: Any) -> Any:
        calls.append("predict")
        return real(self, *given)

    def simulated(*given: Any) -> Any:
        outcomes = simulate(*given)
        calls.append("end")
        return outcomes

    monkeypatch.setattr(FedAvg, "predict", predict)
    monkeypatch.setattr(driver, "simulate", simulated)
    result = driver.execute(plan_of(make_federation((9, 7, 5), validation=4), "fedavg", executor=executor, **more))
    assert result.predictions is not None
    assert "predict" in calls
    assert calls.index("end") == len(calls) - 1
    assert (max(report.round for report in result.rounds) < result.config.rounds) == bool(more)


@pytest.mark.parametrize("more", [{}, STOPS], ids=["last-round", "patience"])
@pytest.mark.parametrize("executor", ["looped", "stacked", "workers"])
def test_a_run_resumed_after_its_last_round_has_them_to_the_bit(
    executor: str,
    more: dict[str, Any],
    tmp_path: Path,
    make_federation: Callable[..., Federation],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = make_federation((9, 7, 5), validation=4)
    plan = plan_of(federation, "fedc2i", executor=executor, checkpoint_seconds=0, **more)
    driver.execute(plan, tmp_path / "whole")
    with cut_off(monkeypatch, RunFolder, "finish"):
        driver.execute(plan, tmp_path / "cut")

    def changed(*_: Any) -> Any:
        raise AssertionError("a round was computed again")

    monkeypatch.setattr("fedc2i.engine.simulator._round", changed)
    fedc2i.resume(tmp_path / "cut", federation)
    whole = result_files(tmp_path / "whole")
    assert "predictions.npz" in whole
    assert result_files(tmp_path / "cut") == whole


def test_very_many_are_not_kept(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is on all seeds together: none of them has logits if all would be too many."""
    federation = make_federation((9, 7, 5))
    plan = plan_of(federation, "fedavg", checkpoint_seconds=0)
    most = 2 * len(POINTS) * sum(len(client.test) for client in federation.clients) * len(federation.classes)
    held, keep = set[bool](), SeedRun._keep_scores

    def noting(run: SeedRun, point: Point, *rest: Any) -> None:
        keep(run, point, *rest)
        held.update(own.logits.numel() > 0 for own in run._scores[point].values())

    monkeypatch.setattr(SeedRun, "_keep_scores", noting)
    for limit, are_kept in ((most, True), (most - 1, False)):
        held.clear()
        monkeypatch.setattr(records, "MOST_PREDICTIONS", limit)
        folder = tmp_path / str(limit)
        with cut_off(monkeypatch, RunFolder, "finish"):
            driver.execute(plan, folder)
        result = fedc2i.resume(folder, federation)
        assert isinstance(result, fedc2i.Result)
        assert {bool(own.logits) for own in result.outcomes.values()} == {result.predictions is not None} == {are_kept}
        assert held == {are_kept}
