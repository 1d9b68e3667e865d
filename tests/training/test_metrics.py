"""Scores against scikit-learn as a slow and obvious oracle, and cases by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, f1_score, roc_auc_score

from fedc2i.training.local import Batch
from fedc2i.training.metrics import BINS, class_scores, score


@given(st.integers(2, 5), st.integers(2, 40), st.integers(0, 10_000), st.booleans())
def test_scores_equal_scikit_learn(classes: int, samples: int, seed: int, coarse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(samples, classes, generator=generator)
    logits = logits.round() if coarse else logits  # many ties
    y = torch.randint(classes, (samples,), generator=generator)
    y[:2] = torch.tensor([0, 1])
    found = {name: float(score) for name, score in class_scores(logits, y).items()}
    truth, guess, labels = y.numpy(), logits.argmax(1).numpy(), np.unique(y)
    p = logits.double().softmax(1).numpy()
    area = np.mean([roc_auc_score(truth == c, p[:, c]) for c in labels])
    assert found["balanced_accuracy"] == pytest.approx(100 * np.mean([(guess == c)[truth == c].mean() for c in labels]))
    assert found["f1"] == pytest.approx(100 * f1_score(truth, guess, labels=labels, average="macro", zero_division=0))
    assert found["auroc"] == pytest.approx(100 * area)
    if set(guess) <= set(truth):
        assert found["balanced_accuracy"] == pytest.approx(100 * balanced_accuracy_score(truth, guess))


def test_calibration_error_by_hand() -> None:
    confidence = torch.tensor([0.9, 0.9, 0.6, 0.6], dtype=torch.float64)
    logits = torch.stack([confidence.log(), (1 - confidence).log()], 1)
    y = torch.tensor([0, 1, 0, 0])  # right, wrong, right, right: bins of 0.9 (half right) and 0.6 (all right)
    assert BINS == 15
    assert float(class_scores(logits, y)["calibration_error"]) == pytest.approx(100 * (2 * 0.4 + 2 * 0.4) / 4)


def test_one_class_has_no_auroc_balanced_accuracy_or_f1() -> None:
    found = class_scores(torch.randn(5, 3), torch.ones(5, dtype=torch.int64))
    assert all(math.isnan(found[name]) for name in ("auroc", "balanced_accuracy", "f1"))
    assert math.isfinite(found["calibration_error"])


def test_a_class_without_test_samples_is_not_averaged() -> None:
    logits = torch.tensor([[2.0, 0.0, 5.0], [0.0, 2.0, -5.0], [2.0, 0.0, -5.0]])
    found = class_scores(logits, torch.tensor([0, 1, 0]))  # first sample: predicted 2, which nobody has
    assert float(found["balanced_accuracy"]) == pytest.approx(75.0)


def test_a_model_that_diverged_is_always_wrong_and_ranks_nothing() -> None:
    y = torch.tensor([0, 1, 0, 1, 1])
    for logits in (torch.full((5, 2), torch.nan), torch.full((5, 2), torch.inf), torch.full((5, 2), -torch.inf)):
        found = {name: float(value) for name, value in class_scores(logits, y).items()}
        assert (found["auroc"], found["balanced_accuracy"], found["f1"]) == (50, 0, 0)
        assert math.isnan(found["calibration_error"])
        sums = score(lambda x, logits=logits: {"": logits}, Batch(torch.zeros(5, 1), y, torch.ones(5)))
        assert sums["accuracy"] == 0
        assert sums["loss"].isnan()


def test_a_sample_without_a_prediction_counts_as_wrong() -> None:
    logits = torch.tensor([[3.0, 0.0], [2.0, 0.0], [0.0, 2.0], [torch.nan, 0.0]])
    y = torch.tensor([0, 0, 1, 1])
    found = {name: float(value) for name, value in class_scores(logits, y).items()}
    assert found["balanced_accuracy"] == pytest.approx(75)  # class 0: 2 of 2, class 1: 1 of 2
    assert found["f1"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    # class 0: the sample without a prediction is below both of class 0; class 1: it is below them, two pairs of four
    assert found["auroc"] == pytest.approx(100 * (1 + 0.5) / 2)


def test_a_class_may_have_the_logit_minus_infinity() -> None:
    logits, y = torch.tensor([[3.0, -torch.inf], [0.0, 2.0]]), torch.tensor([0, 1])
    found = class_scores(logits, y)
    assert [float(found[name]) for name in ("balanced_accuracy", "f1", "auroc")] == [100, 100, 100]
