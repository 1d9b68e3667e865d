"""Influence against retraining: the rank correlation by hand, its p-value by counting, and real retrainings."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

import fedc2i
from fedc2i.analysis.retraining import Agreement, Check, agree, agree_overall, check
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.report.influence_report import print_check, verdict
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import prepare
from support.helpers import call, write_arrays

SETTINGS = {"rounds": 2, "epochs": 1, "device": "cpu"}


def counted(influence: list[float], effect: list[float]) -> tuple[float, float]:
    """ρ by scipy, and p by trying every order, one by one."""
    rho = stats.spearmanr(influence, effect).statistic
    all_rho = [stats.spearmanr(order, effect).statistic for order in itertools.permutations(influence)]
    return rho, sum(abs(other) >= abs(rho) - 1e-9 for other in all_rho) / len(all_rho)


def test_by_hand() -> None:
    found = agree(np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 5.0, 7.0, 9.0]))
    assert (found.rho, found.others) == (pytest.approx(1.0), 4)
    assert found.p == pytest.approx(2 / 24)  # this order and its reverse, of 24
    swapped = agree(np.array([0.1, 0.2, 0.3, 0.4]), np.array([1.0, 5.0, 9.0, 7.0]))
    assert swapped.rho == pytest.approx(1 - 6 * 2 / (4 * 15))


@pytest.mark.parametrize(
    ("influence", "effect"),
    [
        ([0.3, 0.1, 0.5, 0.05, 0.05], [2.0, 1.0, 0.5, -1.0, 0.0]),
        ([0.1, 0.2, 0.7], [3.0, 2.0, 1.0]),
        ([0.25, 0.25, 0.3, 0.2], [0.0, 0.1, 0.1, 0.4]),
    ],
    ids=["five", "reversed", "ties"],
)
def test_p_is_what_counting_all_orders_gives(influence: list[float], effect: list[float]) -> None:
    found = agree(np.array(influence), np.array(effect))
    rho, p = counted(influence, effect)
    assert found.rho == pytest.approx(rho)
    assert found.p == pytest.approx(p)


def test_many_clients_are_drawn_from_all_orders() -> None:
    generator = np.random.default_rng(0)
    first, noise = generator.normal(size=30), generator.normal(size=30)
    for second in (first + noise, noise):
        found, expected = agree(first, second), stats.spearmanr(first, second)
        assert found.rho == pytest.approx(expected.statistic)
        assert found.p == pytest.approx(expected.pvalue, abs=0.02)
    assert agree(first, first).p == pytest.approx(1 / 5041)  # never nothing: the order itself is one of those drawn


def test_what_cannot_be_ranked_is_not() -> None:
    assert math.isnan(agree(np.array([0.2, 0.2, 0.2]), np.array([1.0, 2.0, 3.0])).rho)
    assert math.isnan(agree(np.array([0.2, 0.3]), np.array([1.0, 2.0])).rho)
    found = agree(np.array([0.1, np.nan, 0.2, 0.3]), np.array([1.0, 0.0, 2.0, 3.0]))
    assert (found.rho, found.others) == (pytest.approx(1.0), 3)


def mean_rho(influence: np.ndarray, effect: np.ndarray) -> float:
    """The mean over clients of scipy's ρ of the others."""
    rows = [[k for k in range(len(influence)) if k != m] for m in range(len(influence))]
    return float(np.mean([stats.spearmanr(influence[m, k], effect[m, k]).statistic for m, k in enumerate(rows)]))


def test_overall_is_the_mean_and_its_p_that_of_exchanged_clients() -> None:
    """Every way to give the clients of one table other names, one by one."""
    generator = np.random.default_rng(4)
    influence = generator.random((4, 4))
    effect = influence + generator.normal(size=(4, 4))
    found = agree_overall(influence, effect)
    assert found.rho == pytest.approx(mean_rho(influence, effect))
    every = [list(order) for order in itertools.permutations(range(4))]
    means = [mean_rho(influence[order][:, order], effect) for order in every]
    assert found.p == np.mean([abs(mean) >= abs(found.rho) - 1e-9 for mean in means])
    assert 0 < found.p < 1
    assert found.others == 4
    assert math.isnan(agree_overall(np.ones((4, 4)), np.ones((4, 4))).rho)


def test_overall_of_many_clients_is_drawn_and_never_nothing() -> None:
    table = np.random.default_rng(0).random((9, 9))
    found = agree_overall(table, table)
    assert (found.rho, found.p) == (pytest.approx(1.0), pytest.approx(1 / 10_000))


def test_clients_that_help_everybody_are_one_witness_not_many() -> None:
    """Both tables have columns in common over all rows, and nothing with each other: p is small one time in twenty."""
    generator = np.random.default_rng(0)
    small = 0
    for _ in range(100):
        first, second = (generator.normal(size=5) + 0.1 * generator.normal(size=(5, 5)) for _ in range(2))
        small += agree_overall(first, second).p <= 0.05
    assert small <= 10  # with orders that are drawn for each row alone, some thirty


def test_overall_where_something_was_not_measured() -> None:
    influence = np.random.default_rng(1).random((6, 6))
    effect = influence.copy()
    influence[2] = np.nan
    effect[:, 4] = np.nan
    found = agree_overall(influence, effect)
    assert (found.rho, found.others) == (pytest.approx(1.0), 5)
    assert found.p < 0.05


@pytest.fixture(scope="module")
def checked(make_federation: Callable[..., Federation], make_model: Callable[..., Model]) -> tuple[Federation, Check]:
    federation = make_federation((16, 14, 12, 10), validation=6)
    (plan,) = prepare(["fedc2i"], {**SETTINGS, "rounds": 5}, federation, make_model())
    return federation, check(plan, 2, (0, 3))


def test_effects_are_differences_of_real_runs(
    checked: tuple[Federation, Check], make_model: Callable[..., Model]
) -> None:
    """Once more with the public functions: two seeds, all clients and without the third."""
    federation, found = checked
    seeds = {"seeds": (0, 3), "model": make_model(), **SETTINGS}
    whole = fedc2i.run("fedc2i", federation, **seeds)
    without = fedc2i.run("fedc2i", federation.select(["a", "b", "d"]), **seeds)
    assert (found.split, found.rounds) == ("validation", 2)
    for point in ("received", "trained"):
        rise = without.accuracy(point, "validation_loss") - whole.accuracy(point, "validation_loss")[:, [0, 1, 3]]
        np.testing.assert_allclose(found.effects[point][[0, 1, 3], 2], rise.mean(0), rtol=1e-6)
        assert np.isnan(np.diag(found.effects[point])).all()
    influence = np.mean([whole.influence(seed=seed) for seed in (0, 3)], axis=0)
    np.testing.assert_allclose(found.mean, influence.mean(0), rtol=1e-6)
    np.testing.assert_allclose(found.last, influence[-1], rtol=1e-6)


def test_a_clients_own_influence_is_not_ranked(checked: tuple[Federation, Check]) -> None:
    _, found = checked
    own = found.agreement("received")
    others = [1, 2, 3]
    rho, p = counted(found.mean[0, others].tolist(), found.effects["received"][0, others].tolist())
    assert (own[0].rho, own[0].p) == (pytest.approx(rho), pytest.approx(p))
    assert [one.others for one in own] == [3, 3, 3, 3]


def test_refusals(make_federation: Callable[..., Federation], model: Model) -> None:
    def plan(wanted: str, sizes: tuple[int, ...], **more: object) -> fedc2i.runs.plan.Plan:
        return prepare([wanted], {**SETTINGS, **more}, make_federation(sizes), model)[0]

    with pytest.raises(UserError, match="at least 4 clients"):
        check(plan("fedc2i", (8, 8, 8)), 1, (0,))
    with pytest.raises(UserError, match="without attack"):
        check(plan("fedc2i", (8, 8, 8, 8), topology="ring"), 1, (0,))
    with pytest.raises(UserError, match="no influence vector"):
        check(plan("fedavg", (8, 8, 8, 8)), 1, (0,))
    with pytest.raises(UserError, match="rounds must be at least 1"):
        check(plan("fedc2i", (8, 8, 8, 8)), 0, (0,))


def test_a_small_p_is_not_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for p, said in ((0.0001, "p < 0.001"), (0.00099, "p < 0.001"), (0.001, "p = 0.001")):
        assert all(f"({said})" in verdict(Agreement(rho, p, 5)) for rho in (0.9, -0.9))
    influence = np.random.default_rng(0).random((7, 7))
    effects = np.where(np.eye(7) > 0, np.nan, influence)
    found = Check(tuple("abcdefg"), (0,), 1, influence, influence, {"received": effects, "trained": effects}, "test")
    print_check(Console(file=sys.stdout, width=120), found, 1)
    out = capsys.readouterr().out
    assert "< 0.001" in out
    assert "0.000" not in out


def test_command(tmp_path: Path, make_federation: Callable[..., Federation]) -> None:
    data = write_arrays(tmp_path / "data", make_federation((12, 10, 8, 8)))
    plan, without = prepare(["fedc2i", "fedavg"], {**SETTINGS, "model": "lenet5"}, data)
    execute(plan, tmp_path / "run")
    execute(without, tmp_path / "fedavg")
    refused = call("influence", "check", str(tmp_path / "fedavg"))
    assert "measures no influence vector" in refused.err
    assert "training with" not in refused.err
    answer = call("influence", "check", str(tmp_path / "run"), "--rounds", "1")
    assert answer.code == 0, answer.err
    assert "training without c (3 of 4)" in answer.err
    for text in (
        "1 rounds, seed 0",
        "test data",
        "smallest possible is 0.33",
        "ρ before",
        "ρ after",
        "The run itself had 2 rounds",
    ):
        assert text in answer.out, answer.out
    written = json.loads((tmp_path / "run" / "influence-check.json").read_text(encoding="utf-8"))
    assert (written["split"], written["rounds"], written["seeds"]) == ("test", 1, [0])
    assert len(written["agreement"]) == 4  # two points, two kinds of λ
    assert written["effects"]["received"][0][0] is None
