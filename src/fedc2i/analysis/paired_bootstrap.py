"""The difference between two methods under resampling of seeds and of test samples.

A resample draws seeds with replacement and, within each client, test samples with replacement, and averages the score
over the clients that have one. Scores that are means over classes (AUROC, balanced accuracy, F1) are resampled within
each client and class: else a rare class would be absent from many resamples, which are then means over other clients
than the score. Every method sees the same draws, so differences are paired: one seed already says how much depends on
which samples happen to be in the test data.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from fedc2i.analysis.significance import DIGITS, LEVEL
from fedc2i.engine.records import Point, Predictions
from fedc2i.training.metrics import BINS, UNDEFINED

Array = np.ndarray[Any, Any]
MOST, FEWEST = 2000, 200  # resamples
AT_ONCE = 2**20  # samples drawn
LOWEST = -1e300  # of a log-probability
WORK = 4e7  # resampled values that are read, beyond which fewer resamples are drawn


@functools.lru_cache(maxsize=8)  # a page asks for the same ones several times
def resampled_averages(
    methods: tuple[Predictions, ...], point: Point, metric: str, seeds: tuple[int, ...], members: tuple[int, ...]
) -> Array:
    """``(methods, resamples)`` of a metric: the mean over the clients ``members``, then over seeds.

    A client whose test data does not define the score is ignored; one whose model diverged makes it nan.
    """
    first, generator = methods[0], np.random.default_rng(0)
    draws = _draws(first, len(methods) * len(seeds), metric)
    shares = _resampled(np.zeros(len(seeds)), draws, generator)
    sums, scored = np.zeros((len(methods), len(seeds), draws)), 0
    for client in members:
        rows, labels = first.rows(client), first.labels[first.rows(client)]
        if metric in UNDEFINED and len(np.unique(labels)) < 2:
            continue
        scored += 1
        counts = resampled_counts(metric, labels, draws, generator)
        for m, own in enumerate(methods):
            for s, seed in enumerate(seeds):
                sums[m, s] += resampled_scores(metric, own.logs[seed, point][rows], labels, counts)
    averages = sums / scored if scored else np.full_like(sums, np.nan)
    drawn = np.where(shares.T > 0, averages * shares.T, 0.0)  # a seed that was not drawn may be nan
    found: Array = drawn.sum(1) / len(seeds)
    return found


def resampled_counts(metric: str, labels: Array, draws: int, generator: np.random.Generator) -> Array:
    """``(draws, N)`` how often each resample of a client's test data has each sample, for `resampled_scores`.

    Samples are drawn with replacement; for a metric that is a mean over classes, within each class.
    """
    return _resampled(labels if metric in UNDEFINED else np.zeros(len(labels)), draws, generator)


def _resampled(groups: Array, draws: int, generator: np.random.Generator) -> Array:
    """``(draws, N)`` how often each of N things is drawn, where each of the ``groups`` ``(N,)`` keeps its size."""
    counts = np.zeros((draws, len(groups)), dtype=np.float32)
    for group in np.unique(groups):
        rows = np.flatnonzero(groups == group)
        size = len(rows)
        for some in np.array_split(np.arange(draws), -(-draws * size // AT_ONCE)):
            drawn = generator.integers(size, size=(len(some), size)) + size * np.arange(len(some))[:, None]
            counts[np.ix_(some, rows)] = np.bincount(drawn.ravel(), minlength=drawn.size).reshape(drawn.shape)
    return counts


def interval(differences: Array) -> tuple[float, float] | None:
    """Both ends of the 95 % percentile interval, from resampled differences; None if they are not all defined."""
    if not np.isfinite(differences).all():
        return None
    low, high = np.quantile(np.round(differences, DIGITS), [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
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
    sound = np.isfinite(logs.max(1))
    total, guess = counts.sum(1), logs.argmax(1)
    right = (guess == labels) & sound
    if metric == "accuracy":
        return np.asarray(100 * (counts @ right.astype(np.float32)) / total, dtype=np.float64)
    if metric in ("loss", "calibration_error") and not sound.all():
        return np.full(len(counts), np.nan)
    if metric == "loss":
        return np.asarray(-(counts @ logs[np.arange(len(labels)), labels]) / total)
    if metric == "calibration_error":
        confidence = np.exp(logs.max(1))
        member = np.eye(BINS)[np.minimum((confidence * BINS).astype(int), BINS - 1)]
        return np.asarray(100 * np.abs(counts @ (member * (confidence - right)[:, None])).sum(1) / total)
    truth, guesses = np.eye(logs.shape[1])[labels], np.eye(logs.shape[1])[guess] * sound[:, None]
    size = counts @ truth  # (R, C)
    present = size > 0
    if metric == "auroc":
        scores = np.where(sound[:, None], logs.clip(min=LOWEST), 2 * LOWEST)
        by_class = np.stack([_area(scores[:, c], labels == c, counts) for c in range(logs.shape[1])], axis=1)
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
