"""The numbers of a table: means and sample deviations, within a seed first and then over seeds."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import metadata
from typing import Any, get_args

import numpy as np
import pytest
import torch

from fedc2i.core.errors import UserError
from fedc2i.core.options import type_hints
from fedc2i.data.federation import Federation
from fedc2i.engine.executors.stacked import kernel_uses
from fedc2i.models.model import Model
from fedc2i.runs import driver
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import Score, summary, versions
from fedc2i.runs.settings import RunSettings
from fedc2i.training.metrics import HIGHER_IS_BETTER
from support.helpers import blank_federation, made_up

AB = blank_federation(("a", "b"))


@pytest.mark.parametrize(
    ("values", "mean", "sd", "text"),
    [
        ([80.0], 80.0, None, "80.00"),
        ([80.0, 80.0], 80.0, 0.0, "80.00 ± 0.00"),
        ([79.0, 81.0], 80.0, math.sqrt(2), "80.00 ± 1.41"),  # ddof = 0 would give 1.00
        ([1.0, 2.0, 6.0], 3.0, math.sqrt(7), "3.00 ± 2.65"),
    ],
)
def test_score(values: list[float], mean: float, sd: float | None, text: str) -> None:
    score = Score.of(values)
    assert score.mean == mean
    assert score.sd == (None if sd is None else pytest.approx(sd))
    assert str(score) == text


POINT_NAMES = r"allowed are received \(before local training\), trained \(after it\)"


@pytest.mark.parametrize("ask", ["accuracy", "scores", "averages", "worst", "curve"])
def test_unknown_point_is_refused(ask: str) -> None:
    result = made_up(AB, {0: [[10, 10], [70, 50]]})
    with pytest.raises(UserError, match=f"point 'after' is unknown, {POINT_NAMES}"):
        getattr(result, ask)("after")


def test_unknown_diagnostic_is_refused() -> None:
    result = made_up(AB, {0: [[10, 10], [70, 50]]})
    with pytest.raises(UserError, match="'nope' is unknown, allowed are influence_vector, influence_matrix"):
        result.influence("nope")


def test_averages_are_taken_within_a_seed_first() -> None:
    # Clients swing by 20 points from seed to seed, in opposite directions: their average does not move at all.
    result = made_up(AB, {0: [[10, 10], [70, 50]], 1: [[0, 0], [50, 70]]})
    scores = result.scores("received")
    assert scores == {
        "a": Score(60.0, pytest.approx(200**0.5)),
        "b": Score(60.0, pytest.approx(200**0.5)),
        "Avg": Score(60.0, 0.0),
        "Worst": Score(50.0, 0.0),  # another client in each seed
    }
    assert result.scores("trained")["Avg"] == Score(61.0, 0.0)


def test_further_averages_are_over_their_own_clients() -> None:
    federation = blank_federation(("a", "b", "c"), averages={"Avg-2": ("c", "a")})
    result = made_up(federation, {0: [[90, 0, 60]], 1: [[96, 0, 58]], 2: [[93, 0, 62]]})
    scores = result.scores("received")
    assert list(scores) == ["a", "b", "c", "Avg", "Avg-2", "Worst"]
    assert scores["Avg"].mean == pytest.approx(51.0)  # (50 + 51.333 + 51.667) / 3
    assert scores["Avg-2"] == Score(pytest.approx(76.5), pytest.approx(np.std([75.0, 77.0, 77.5], ddof=1)))


def test_attackers_by_seed_and_kind() -> None:
    result = made_up(AB, {0: [[1, 2]], 3: [[3, 4]]})
    assert result.attackers == {}
    assert not {"attack", "attackers"} & {*summary(result)}
    text = "nan@b;scaled:2@a,b"
    attacked = replace(result, config=replace(result.config, attack=text))
    own = {"nan": ["b"], "scaled:2": ["a", "b"]}
    assert attacked.attackers == {0: own, 3: own}
    assert summary(attacked)["attack"] == text
    assert summary(attacked)["attackers"] == {"0": own, "3": own}


def test_seeds_without_a_usable_upload() -> None:
    def unheard(*refused: tuple[str, ...], trained: tuple[str, ...] = ("a", "b")) -> tuple[int, ...]:
        result = made_up(AB, {0: [[1, 2]] * 2, 1: [[1, 2]] * 2})
        rounds = zip(result.rounds, refused, strict=True)
        return replace(result, rounds=[replace(one, refused=own, participants=trained) for one, own in rounds]).unheard

    assert unheard((), (), (), ()) == ()
    assert unheard(("a",), ("b",), ("a", "b"), ("b",)) == ()
    assert unheard(("a", "b"), ("b",), ("a", "b"), ("a", "b")) == (1,)
    assert unheard(*[("b",)] * 4, trained=("b",)) == (0, 1)
    assert unheard(*[()] * 4, trained=()) == ()  # who took part is not known


def test_last_evaluated_round_counts() -> None:
    result = made_up(AB, {4: [[1, 2], [3, 4]]})
    assert result.last(4).round == 2
    np.testing.assert_array_equal(result.accuracy("received"), [[3, 4]])
    np.testing.assert_array_equal(result.accuracy("trained"), [[4, 5]])
    assert np.isnan(result.accuracy("trained", "f1")).all()


def test_curve_is_the_mean_over_seeds() -> None:
    rounds, values = made_up(AB, {0: [[10, 20], [30, 40]], 1: [[20, 40], [50, 80]]}).curve("received")
    assert rounds.tolist() == [1, 2]
    np.testing.assert_array_equal(values, [[15, 30], [40, 60]])


@pytest.mark.parametrize("longer_first", [True, False])
def test_seeds_that_stopped_early(longer_first: bool) -> None:
    tables = {0: [[10, 20], [30, 40], [70, 80]], 1: [[20, 40]]}
    result = made_up(AB, tables if longer_first else dict(reversed(tables.items())))
    rounds, values = result.curve("received")
    assert rounds.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(values, [[15, 30], [30, 40], [70, 80]])
    assert result.scores("received")["a"] == Score(45.0, pytest.approx(50 / 2**0.5))  # each seed's own last round
    assert summary(result)["rounds"] == 3
    assert summary(result)["seconds"] == 2.0
    assert summary(result)["seconds_per_round"] == 0.5


def test_influence_of_every_round_and_seed() -> None:
    vectors = {0: np.full((2, 2, 2), 0.5), 7: np.array([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.3, 0.7]]])}
    result = made_up(AB, {0: [[1, 2], [3, 4]], 7: [[1, 2], [3, 4]]}, influence={"influence_vector": vectors})
    np.testing.assert_array_equal(result.influence(), vectors[0])
    np.testing.assert_array_equal(result.influence(seed=7), vectors[7])
    assert result.influence("influence_matrix").size == 0


def test_influence_stays_with_its_round_when_some_measured_nothing() -> None:
    result = made_up(AB, {0: [[1, 2]] * 3}, influence={"influence_vector": {0: np.full((3, 2, 2), 0.5)}})
    result.rounds[0].influence.clear()  # type: ignore[attr-defined]  # no upload of the first round was usable
    found = result.influence()
    assert found.shape == (3, 2, 2)
    assert np.isnan(found[0]).all()
    assert (found[1:] == 0.5).all()


def test_summary_names_the_versions_that_decide_numbers() -> None:
    found = versions()
    assert next(iter(found)) == "fedc2i"
    assert {*found} - {"triton"} == {"python", "fedc2i", "torch", "numpy", "scikit-learn", "pillow", "matplotlib"}


def test_triton_is_named_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    here = dict(versions())
    real = metadata.version

    def installed(package: str) -> str:
        return "3.6.0" if package == "triton" else real(package)

    monkeypatch.setattr(metadata, "version", installed)
    assert versions.__wrapped__() == {**here, "triton": "3.6.0"}

    def missing(package: str) -> str:
        if package == "triton":
            raise metadata.PackageNotFoundError(package)
        return real(package)

    monkeypatch.setattr(metadata, "version", missing)
    assert "triton" not in versions.__wrapped__()


@pytest.mark.parametrize("in_use", [True, False])
def test_a_run_on_a_gpu_names_its_use_of_own_kernels(
    in_use: bool, federation: Federation, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that of a run before it in the same process, or of a process that is prepared for runs."""
    (plan,) = prepare(("fedavg",), {"device": "cpu"}, federation, model)
    result, layer = made_up(AB, {0: [[1, 2]]}), kernel_uses.counted(lambda: torch.ones(1))
    layer()

    def simulate(*_: Any) -> dict[int, Any]:
        if in_use:
            layer()
        return {}

    monkeypatch.setattr(driver, "simulate", simulate)
    assert driver.compute(plan).own_kernels is None
    assert "own_kernels" not in summary(result)
    monkeypatch.setattr(RunSettings, "torch_device", lambda _: torch.device("cuda"))
    own = driver.compute(plan).own_kernels
    assert own is in_use
    assert summary(replace(result, own_kernels=own))["own_kernels"] is in_use


def test_the_worst_client_is_the_highest_loss_and_ignores_who_has_no_score() -> None:
    result = made_up(AB, {0: [[70, 50]], 1: [[60, np.nan]]})
    for report in result.rounds:
        for own in report.metrics["received"]:
            own |= {"loss": own["accuracy"] / 100} if own else {}
    assert result.worst("received").tolist() == [50, 60]
    assert result.worst("received", "loss").tolist() == [0.7, 0.6]
    assert str(result.scores("received", "loss")["Worst"]) == "0.650 ± 0.071"


def test_a_score_that_nobody_has_is_a_dash() -> None:
    result = made_up(AB, {0: [[70, 50]]})
    assert {str(score) for score in result.scores("trained", "auroc").values()} == {"–"}


def test_only_known_metrics_are_shown() -> None:
    result = made_up(AB, {0: [[70, 50]]})
    assert result.showing("auroc").config.metric == "auroc"
    with pytest.raises(UserError, match=r"metric must be accuracy \| balanced_accuracy \| .*, got \'area\'$"):
        result.showing("area")


def test_metrics_of_the_setting_are_those_that_are_computed() -> None:
    assert get_args(type_hints(RunSettings)["metric"]) == tuple(HIGHER_IS_BETTER)
