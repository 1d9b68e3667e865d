"""The difference between two methods under resampling of seeds and of test samples.

A resample draws seeds with replacement and, within each client, test samples with replacement, and averages the score
over the clients that have one. Every method sees the same draws, so differences are paired: one seed already says how
much depends on which samples happen to be in the test data.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fedc2i.analysis.significance import DIGITS, LEVEL
from fedc2i.engine.records import Point, Predictions
from fedc2i.training.metrics import BINS

Array = np.ndarray[Any, Any]
MOST, FEWEST = 2000, 200  # resamples
WORK = 4e7  # resampled values that are read, beyond which fewer resamples are drawn


@functools.lru_cache(maxsize=8)  # a page asks for the same ones several times
def resampled_averages(
    methods: tuple[Predictions, ...], point: Point, metric: str, seeds: tuple[int, ...], members: tuple[int, ...]
) -> Array:
    """``(methods, resamples)`` of a metric: the mean over the clients ``members``, then over seeds.

    A client whose resampled test data does not define the score is ignored in that resample.
    """
    first, generator = methods[0], np.random.default_rng(0)
    draws = _draws(first, len(methods) * len(seeds), metric)
    shares = np.array([np.bincount(row, minlength=len(seeds)) for row in _drawn(generator, len(seeds), draws)])
    sums, known = np.zeros((len(methods), len(seeds), draws)), np.zeros((len(methods), len(seeds), draws))
    for client in members:
        rows, labels = first.rows(client), first.labels[first.rows(client)]
        counts = np.stack([np.bincount(row, minlength=len(labels)) for row in _drawn(generator, len(labels), draws)])
        counts = counts.astype(np.float32)
        for m, own in enumerate(methods):
            for s, seed in enumerate(seeds):
                scores = resampled_scores(metric, own.logs[seed, point][rows], labels, counts)
                sums[m, s] += np.nan_to_num(scores)
                known[m, s] += np.isfinite(scores)
    averages = np.where(known > 0, sums / np.maximum(known, 1), np.nan)
    drawn = np.where(shares.T > 0, averages * shares.T, 0.0)  # a seed that was not drawn may be nan
    found: Array = drawn.sum(1) / len(seeds)
    return found


def interval(differences: Array) -> tuple[float, float] | None:
    """Both ends of the 95 % percentile interval, from resampled differences; None if no resample defines any."""
    known = np.round(differences[np.isfinite(differences)], DIGITS)
    if not len(known):
        return None
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


def resampled_scores(metric: str, logs: Array, labels: Array, counts: Array) -> Array:
    """``(R,)`` a metric of samples that are each taken ``counts`` ``(R, N)`` times; nan where it is not defined.

    Args:
        metric: as in `fedc2i.training.metrics`, with the same definition.
        logs: log-probabilities ``(N, C)``.
        labels: ``(N,)``.
        counts: how often each resample has each sample.
    """
    logs = logs.astype(np.float64)
    total, guess = counts.sum(1), logs.argmax(1)
    right = guess == labels
    if metric == "accuracy":
        return np.asarray(100 * (counts @ right.astype(np.float32)) / total, dtype=np.float64)
    if metric == "loss":
        return np.asarray(-(counts @ logs[np.arange(len(labels)), labels]) / total)
    if metric == "calibration_error":
        confidence = np.exp(logs.max(1))
        member = np.eye(BINS)[np.minimum((confidence * BINS).astype(int), BINS - 1)]
        return np.asarray(100 * np.abs(counts @ (member * (confidence - right)[:, None])).sum(1) / total)
    truth, guesses = (np.eye(logs.shape[1])[own] for own in (labels, guess))
    size = counts @ truth  # (R, C)
    present = size > 0
    if metric == "auroc":
        by_class = np.stack([_area(logs[:, c], labels == c, counts) for c in range(logs.shape[1])], axis=1)
    else:
        hits = counts @ (truth * guesses)
        by_class = hits / np.maximum(size, 1)
        if metric == "f1":
            by_class = 2 * hits / np.maximum(size + counts @ guesses, 1)
    mean = np.where(present, by_class, 0.0).sum(1) / present.sum(1)
    return np.asarray(np.where(present.sum(1) > 1, 100 * mean, np.nan))


def _area(scores: Array, own: Array, counts: Array) -> Array:
    """``(R,)`` the area under the ROC curve of one class against the others; ties count half."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.diff(scores[order], prepend=-np.inf))  # of samples with equal scores
    weights = counts[:, order].astype(np.float64)
    positive = np.add.reduceat(weights * own[order], starts, axis=1)
    negative = np.add.reduceat(weights * ~own[order], starts, axis=1)
    below = np.cumsum(negative, axis=1) - negative
    wins = (positive * (below + negative / 2)).sum(1)
    return np.asarray(wins / np.maximum(positive.sum(1) * negative.sum(1), 1))


def _draws(predictions: Predictions, models: int, metric: str) -> int:
    """Fewer resamples of much test data: their quantiles are then narrow in any case."""
    values = len(predictions.labels) * (models * predictions.classes if metric == "auroc" else 1)
    return int(np.clip(WORK * (10 if metric == "auroc" else 1) / values, FEWEST, MOST))


def _drawn(generator: np.random.Generator, count: int, draws: int) -> list[Array]:
    return [generator.integers(count, size=count) for _ in range(draws)]
