"""Intervals and corrections: by hand, against scipy, and by counting how often intervals contain the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedc2i.analysis.contribution.uncertainty import Estimate, coalition_scores, combined, estimate, holm
from fedc2i.training.metrics import HIGHER_IS_BETTER

ALONE, TOGETHER = frozenset({0}), frozenset({0, 1})
DIFFERENCE = {TOGETHER: 1.0, ALONE: -1.0}


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.02, math.nan]) == [pytest.approx(0.02), pytest.approx(math.nan, nan_ok=True)]
    assert holm([]) == []


def test_interval_and_p_are_those_of_a_t_test() -> None:
    """Without any variance of samples there are only seeds."""
    differences = np.array([0.5, 1.5, 1.0])
    values = {TOGETHER: np.repeat(differences[:, None], 5, axis=1), ALONE: np.zeros((3, 5))}
    values[TOGETHER][:, 1:] = differences.mean()
    found, expected = estimate(values, DIFFERENCE), stats.ttest_1samp(differences, 0)
    assert found.value == pytest.approx(1.0)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.ends == pytest.approx(tuple(expected.confidence_interval(0.95)))


def test_variances_add_up_with_the_degrees_of_freedom_of_welch_and_satterthwaite() -> None:
    found = combined(1.0, [(0.3, 4), (0.1, 9)])
    assert found.error == pytest.approx(math.sqrt(0.4))
    assert found.freedom == pytest.approx(0.4**2 / (0.3**2 / 4 + 0.1**2 / 9))
    assert combined(1.0, [(0.3, math.inf)]).freedom == math.inf


def test_no_effect_at_all_is_not_told_from_zero() -> None:
    assert Estimate(0.0, 0.0, 3).p == 1.0
    assert Estimate(0.0, 0.0, 3).ends == (0.0, 0.0)
    assert math.isnan(Estimate(math.nan, 0.1, 3).p)


def test_scores_are_turned_so_that_higher_is_better() -> None:
    logs = np.log(np.array([[[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]]]))
    labels = np.array([0, 1, 1])
    assert coalition_scores(logs, labels, "accuracy")[0, 0] == pytest.approx(200 / 3)
    assert coalition_scores(logs, labels, "loss")[0, 0] == pytest.approx(np.log([0.9, 0.8, 0.4]).mean())
    assert all(coalition_scores(logs, labels, metric).shape[0] == 1 for metric in HIGHER_IS_BETTER)


def test_coalitions_see_the_same_resamples() -> None:
    logs = np.log(np.random.default_rng(0).dirichlet((1, 1), size=(1, 30)))
    labels = np.arange(30) % 2
    values = {TOGETHER: coalition_scores(logs, labels, "loss"), ALONE: coalition_scores(logs, labels, "loss")}
    assert estimate(values, DIFFERENCE) == Estimate(0.0, 0.0, math.inf)


def test_scores_without_predictions_have_the_spread_of_seeds_alone() -> None:
    values = {TOGETHER: np.array([[1.0], [2.0], [3.0]]), ALONE: np.zeros((3, 1))}
    found, wanted = estimate(values, DIFFERENCE), stats.ttest_1samp([1.0, 2.0, 3.0], 0.0)
    assert (found.value, found.p) == (2.0, pytest.approx(wanted.pvalue))
    assert found.ends == pytest.approx(tuple(wanted.confidence_interval()))
    one = estimate({own: scores[:1] for own, scores in values.items()}, DIFFERENCE)
    assert one.value == 1.0
    assert all(map(math.isnan, (one.p, *one.ends)))


def test_rings_widen_the_interval() -> None:
    values = {TOGETHER: np.array([[1.0, 0.9, 1.1]]), ALONE: np.array([[0.0, 0.0, 0.0]])}
    rings = [{TOGETHER: 1.5, ALONE: -1.0}, {TOGETHER: 0.5, ALONE: -1.0}]
    plain, drawn = estimate(values, DIFFERENCE), estimate(values, DIFFERENCE, rings)
    assert drawn.value == plain.value
    assert drawn.error == pytest.approx(math.sqrt(0.02 + 0.5 / 2))


def test_intervals_contain_the_truth_as_often_as_they_say() -> None:
    """Log-losses of two models, with an effect of each sample and of each seed."""
    generator, inside, cases = np.random.default_rng(0), 0, 300
    labels, truth = np.zeros(60, dtype=int), 0.1
    for _ in range(cases):
        samples = truth + 0.4 * generator.normal(size=60)
        values = {}
        for own, effect in ((ALONE, np.zeros(60)), (TOGETHER, samples)):
            seeds = 0.1 * generator.normal(size=(3, 1)) / math.sqrt(2)
            gain = -1.5 + effect + seeds  # log-probabilities of the true class
            logs = np.stack([gain, np.log1p(-np.exp(np.minimum(gain, -1e-3)))], axis=2)
            values[own] = coalition_scores(logs, labels, "loss")
        low, high = estimate(values, DIFFERENCE).ends
        inside += low <= truth <= high
    assert 0.91 <= inside / cases <= 0.99
