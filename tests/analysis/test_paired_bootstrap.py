"""The paired bootstrap against brute force, and the coverage of its intervals."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import numpy as np
import pytest
import torch

from fedc2i.analysis.paired_bootstrap import interval, resampled_averages, resampled_scores
from fedc2i.engine.records import Predictions
from fedc2i.training.metrics import HIGHER_IS_BETTER, class_scores

Array = np.ndarray[Any, Any]
SURE = np.log([[0.9, 0.1], [0.1, 0.9]])  # log-probabilities of a model that guesses class 0, and class 1


def guessing(labels: Array, guesses: dict[int, Array], samples: tuple[int, ...]) -> Predictions:
    return Predictions(labels, samples, {(seed, "trained"): SURE[own] for seed, own in guesses.items()})


@pytest.mark.parametrize("metric", HIGHER_IS_BETTER)
@pytest.mark.parametrize("classes", [2, 4])
def test_scores_are_those_of_the_repeated_samples(metric: str, classes: int) -> None:
    rng = np.random.default_rng(classes)
    logits = torch.from_numpy(rng.normal(size=(30, classes)))
    logits[20:] = logits[:10]  # equal scores
    labels = torch.from_numpy(rng.integers(classes, size=30))
    counts = rng.integers(0, 3, size=(20, 30))
    counts[0] = labels.numpy() == 1  # one class only
    logs = logits.log_softmax(1)
    found = resampled_scores(metric, logs.numpy(), labels.numpy(), counts)
    for row, value in zip(counts, found, strict=True):
        again = torch.from_numpy(np.repeat(np.arange(30), row))
        own = {
            "accuracy": 100 * (logits[again].argmax(1) == labels[again]).double().mean(),
            "loss": torch.nn.functional.cross_entropy(logits[again], labels[again]),
            **class_scores(logits[again], labels[again]),
        }
        assert value == pytest.approx(float(own[metric]), nan_ok=True)


def test_the_distribution_is_that_of_all_resamples() -> None:
    """Two seeds and clients of three and two samples: 4 · 27 · 4 resamples, each as likely as the others."""
    labels, samples = np.array([0, 1, 1, 0, 1]), (3, 2)
    first = guessing(labels, {0: np.array([0, 1, 1, 0, 0]), 1: np.array([0, 1, 0, 0, 1])}, samples)
    second = guessing(labels, {0: np.array([1, 1, 0, 0, 0]), 1: np.array([0, 0, 0, 1, 1])}, samples)
    every: Any = []
    for seeds in itertools.product((0, 1), repeat=2):
        for one in itertools.product(range(3), repeat=3):
            for two in itertools.product((3, 4), repeat=2):
                gaps = []
                for seed in seeds:
                    right = [own.logs[seed, "trained"].argmax(1) == labels for own in (first, second)]
                    a, b = (np.mean([own[list(one)].mean(), own[list(two)].mean()]) for own in right)
                    gaps.append(100 * (a - b))
                every.append(np.mean(gaps))
    every = np.array(every)
    drawn = resampled_averages((first, second), "trained", "accuracy", (0, 1), (0, 1))
    found = drawn[0] - drawn[1]
    assert found.mean() == pytest.approx(np.mean(every), abs=2)
    assert found.std() == pytest.approx(np.std(every), rel=0.08)
    for value in np.unique(np.round(every, 3)) + 0.01:
        assert np.mean(found <= value) == pytest.approx(np.mean(every <= value), abs=0.04)


def test_equal_methods_differ_by_nothing() -> None:
    own = guessing(np.array([0, 1, 1]), {0: np.array([0, 1, 0])}, (3,))
    same = guessing(np.array([0, 1, 1]), {0: np.array([0, 1, 0])}, (3,))
    drawn = resampled_averages((own, same), "trained", "accuracy", (0,), (0,))
    assert interval(drawn[0] - drawn[1]) == (0.0, 0.0)


@pytest.mark.parametrize(("wrong", "is_above"), [(30, True), (11, False)])
def test_one_seed_already_says_something(wrong: int, is_above: bool) -> None:
    labels = np.tile([0, 1], 50)
    better, worse = labels.copy(), labels.copy()
    better[:10], worse[-wrong:] = 1 - better[:10], 1 - worse[-wrong:]
    own = guessing(labels, {7: better}, (100,)), guessing(labels, {7: worse}, (100,))
    drawn = resampled_averages(own, "trained", "accuracy", (7,), (0,))
    ends = interval(drawn[0] - drawn[1])
    assert ends is not None
    assert ends[0] < wrong - 10 < ends[1]
    assert (ends[0] > 0) == is_above


def test_a_client_without_a_score_is_ignored_and_without_any_there_is_no_interval() -> None:
    labels = np.array([0, 1, 0, 1, 0, 1, 1, 1])
    own = guessing(labels, {0: labels}, (6, 2))  # the second client has one class
    both = resampled_averages((own,), "trained", "balanced_accuracy", (0,), (0, 1))[0]
    alone = resampled_averages((own,), "trained", "balanced_accuracy", (0,), (0,))[0]
    assert np.array_equal(both, alone, equal_nan=True)
    assert np.nanmin(both) == 100
    nobody = resampled_averages((own,), "trained", "balanced_accuracy", (0,), (1,))[0]
    assert interval(nobody - nobody) is None


@pytest.mark.parametrize("metric", ["auroc", "balanced_accuracy", "f1"])
def test_a_rare_class_stays_in_every_resample(metric: str) -> None:
    """One sample of class 0 in 16, as at a hospital of the heart data: in every third resample it would be absent."""
    rng = np.random.default_rng(3)
    labels = np.concatenate([np.tile([0, 1], 20), [0], np.ones(15, int)])
    logs = torch.from_numpy(rng.normal(size=(56, 2)) + np.eye(2)[labels]).log_softmax(1).numpy()
    own = Predictions(labels, (40, 16), {(0, "trained"): logs})
    drawn = resampled_averages((own,), "trained", metric, (0,), (0, 1))[0]
    once = [
        resampled_scores(metric, logs[own.rows(k)], labels[own.rows(k)], np.ones((1, own.samples[k]))) for k in (0, 1)
    ]
    assert np.isfinite(drawn).all()
    assert drawn.mean() == pytest.approx(np.mean(once), abs=2)


def test_samples_without_a_prediction_score_as_in_the_run() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(30, 3)))
    logits[4:7] = torch.nan
    logits[8:10, 1] = -torch.inf
    labels = torch.from_numpy(rng.integers(3, size=30))
    wanted = class_scores(logits, labels)
    for metric in ("auroc", "balanced_accuracy", "f1", "calibration_error"):
        (found,) = resampled_scores(metric, logits.log_softmax(1).numpy(), labels.numpy(), np.ones((1, 30)))
        assert found == pytest.approx(float(wanted[metric]), nan_ok=True), metric
    (loss,) = resampled_scores("loss", logits.log_softmax(1).numpy(), labels.numpy(), np.ones((1, 30)))
    assert np.isnan(loss)


@pytest.mark.slow
def test_intervals_of_auroc_cover_the_truth_with_a_rare_class() -> None:
    """200 test sets of clients with 30 and 5 samples of class 0 of 60: normal scores, true AUROC Φ(d/√2)."""
    rng, covered, tries = np.random.default_rng(0), 0, 200
    labels = np.concatenate([np.repeat([0, 1], [30, 30]), np.repeat([0, 1], [5, 55])])
    truth = 100 * (statistics.NormalDist().cdf(1.5 / 2**0.5) - statistics.NormalDist().cdf(0.5 / 2**0.5))
    for _ in range(tries):
        own = []
        for distance in (1.5, 0.5):
            logits = rng.normal(size=120) + distance * labels
            both = torch.from_numpy(np.stack([np.zeros(120), logits], 1)).log_softmax(1).numpy()
            own.append(Predictions(labels, (60, 60), {(0, "trained"): both}))
        drawn = resampled_averages(tuple(own), "trained", "auroc", (0,), (0, 1))
        ends = interval(drawn[0] - drawn[1])
        assert ends is not None
        covered += ends[0] <= truth <= ends[1]
    assert 0.88 <= covered / tries <= 0.99


@pytest.mark.slow
def test_intervals_cover_the_truth_nineteen_times_in_twenty() -> None:
    """200 test sets of two clients, of which one method gets 80 % right and the other 70 %."""
    rng, covered, tries = np.random.default_rng(0), 0, 200
    for _ in range(tries):
        labels = rng.integers(2, size=200)
        right = [rng.random(200) < share for share in (0.8, 0.7)]
        own = tuple(guessing(labels, {0: np.where(good, labels, 1 - labels)}, (100, 100)) for good in right)
        drawn = resampled_averages(own, "trained", "accuracy", (0,), (0, 1))
        ends = interval(drawn[0] - drawn[1])
        assert ends is not None
        covered += ends[0] <= 10 <= ends[1]
    assert 0.90 <= covered / tries <= 0.99
