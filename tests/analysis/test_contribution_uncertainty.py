"""Intervals and corrections: by hand, against scipy, and by counting how often intervals contain the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from fedc2i.analysis.contribution.uncertainty import Estimate, coalition_scores, estimate, holm, step_of
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


def test_each_variance_reaches_as_far_as_its_own_degrees_of_freedom_say() -> None:
    found = Estimate(1.0, ((0.3, 4), (0.1, math.inf)))
    assert found.error == pytest.approx(math.sqrt(0.4))
    reach = math.sqrt(0.3 * stats.t.ppf(0.975, 4) ** 2 + 0.1 * stats.norm.ppf(0.975) ** 2)
    assert found.ends == pytest.approx((1 - reach, 1 + reach))
    assert Estimate(reach, found.parts).p == pytest.approx(0.05)
    assert Estimate(1e9, found.parts).p < 1e-9
    assert Estimate(0.7, ((0.2, math.inf),)).p == pytest.approx(2 * stats.norm.sf(0.7 / math.sqrt(0.2)))
    assert math.isnan(Estimate(1.0, ((math.nan, 2), (0.1, math.inf))).p)


def test_no_effect_at_all_is_not_told_from_zero() -> None:
    assert Estimate(0.0, ((0.0, 3),)).p == 1.0
    assert Estimate(0.0, ((0.0, 3),)).ends == (0.0, 0.0)
    assert math.isnan(Estimate(math.nan, ((0.1, 3),)).p)


def test_a_difference_without_any_spread_is_no_proof() -> None:
    found = estimate({TOGETHER: np.array([[53.0], [53.0]]), ALONE: np.array([[78.0], [78.0]])}, DIFFERENCE)
    assert (found.value, found.p) == (-25.0, 1.0)
    assert all(map(math.isnan, found.ends))


def test_steps_are_what_one_sample_is_worth() -> None:
    assert step_of("accuracy", 16, [1, 15]) == step_of("auroc", 16) == 6.25
    assert step_of("balanced_accuracy", 16, [5, 0, 11]) == 10.0
    assert step_of("loss", 16) == step_of("accuracy", 0) == 0.0


def test_two_seeds_that_agree_on_a_coarse_grid_prove_nothing() -> None:
    """Both lose 4 of 16 patients: the seeds' variance is 0 but for what the grid hides."""
    generator = np.random.default_rng(0)
    draws = generator.integers(16, size=(400, 16))
    lost = np.zeros(16)
    lost[:4] = -100.0
    row = np.concatenate([[lost.mean()], lost[draws].mean(1)])
    values = {TOGETHER: np.stack([row, row]), ALONE: np.zeros((2, 401))}
    found = estimate(values, DIFFERENCE, step=100 / 16)
    assert found.value == -25.0
    assert found.p > 0.05
    seeds = 2 * (100 / 16) ** 2 / 12 / 2  # of a mean of two differences of two rounded scores
    assert found.parts[1] == (pytest.approx(seeds), 1)
    assert found.ends[1] > 0
    unchanged = estimate({TOGETHER: np.zeros((2, 401)), ALONE: np.zeros((2, 401))}, DIFFERENCE, step=100 / 16)
    assert (unchanged.ends, unchanged.p) == ((0.0, 0.0), 1.0)


@pytest.mark.parametrize("seeds", [2, 3])
def test_no_effect_is_rarely_called_one_with_few_seeds_and_samples(seeds: int) -> None:
    """Accuracies of 16 samples, whose seeds often agree by chance."""
    generator, told, cases = np.random.default_rng(0), 0, 600
    for _ in range(cases):
        effect = generator.normal(scale=8.0, size=(seeds, 1))
        scores = np.round((effect + generator.normal(scale=3.0)) * 16 / 100) * 100 / 16
        resamples = scores.mean() + generator.normal(scale=3.0, size=(1, 60))
        values = {TOGETHER: np.hstack([scores, np.repeat(resamples, seeds, axis=0)]), ALONE: np.zeros((seeds, 61))}
        told += estimate(values, DIFFERENCE, step=100 / 16).p < 0.05
    assert told / cases <= 0.055


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
    assert estimate(values, DIFFERENCE) == Estimate(0.0, ((0.0, math.inf),))


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
