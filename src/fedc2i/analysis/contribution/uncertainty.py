"""How certain a weighted sum of coalitions' values is: over test samples, over seeds, and over the orders drawn.

Three independent variances add up: that of the receiver's test samples, by a bootstrap in which all coalitions and
seeds see the same resamples; that of the mean over seeds, from the spread between seeds; and, where orders of givers
were drawn, that of the mean over rings. Few seeds or rings make a variance uncertain: each part reaches as far as
Student's t with its own degrees of freedom says, and squares of these add up, which covers the truth at least as often
as promised (Banerjee 1961). Seeds that agree on a coarse grid of scores have at least the variance that rounding hides.
Many pairs are corrected for by Holm's method.

Where only scores are known and no predictions, as of real sites, there are no resamples and no variance of samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedc2i.analysis.contribution.shapley import Coalition, Contrast
from fedc2i.analysis.paired_bootstrap import resampled_counts, resampled_scores
from fedc2i.training.metrics import HIGHER_IS_BETTER, UNDEFINED

Array = np.ndarray[Any, Any]
LEVEL = 0.95
MOST, FEWEST = 400, 60  # resamples
WORK = 1e6  # resampled values that are read, beyond which fewer resamples are drawn
ROUNDING = 1e-9  # of a score; a smaller effect is none
LEAST_P = 1e-100
COUNTED = ("accuracy", *UNDEFINED)  # scores that only change where a sample does
FEWEST_OF_CLASS = 5  # test samples of a class, for an interval


@dataclass(frozen=True)
class Estimate:
    """A value with independent variances and their degrees of freedom; positive: better for the receiver."""

    value: float
    parts: tuple[tuple[float, float], ...] = ()

    @property
    def error(self) -> float:
        """The standard error; nan if nothing is known of it."""
        return math.sqrt(sum(variance for variance, _ in self.parts)) if self.parts else math.nan

    @property
    def ends(self) -> tuple[float, float]:
        """Of the 95 % interval; nan if it is not known, or would be a single point beside 0."""
        if self.error <= ROUNDING:
            return (0.0, 0.0) if abs(self.value) <= ROUNDING else (math.nan, math.nan)
        reach = self._reach(1 - LEVEL) if self.parts else math.nan
        return self.value - reach, self.value + reach

    @property
    def p(self) -> float:
        """Two-sided, of the hypothesis that there is no effect; nan if it is not known."""
        if math.isnan(self.value) or math.isnan(self.error):
            return math.nan
        if self.error <= ROUNDING:
            return 1.0  # no spread at all is no proof of an effect
        from scipy.optimize import brentq

        size = abs(self.value)
        if self._reach(LEAST_P) <= size:
            return LEAST_P
        return float(math.exp(brentq(lambda log: self._reach(math.exp(log)) - size, math.log(LEAST_P), 0.0)))

    def _reach(self, p: float) -> float:
        from scipy.special import ndtri, stdtrit

        ends = (ndtri(p / 2) if math.isinf(freedom) else stdtrit(freedom, p / 2) for _, freedom in self.parts)
        return math.sqrt(sum(variance * float(end) ** 2 for (variance, _), end in zip(self.parts, ends, strict=True)))


def holm(values: Sequence[float]) -> list[float]:
    """p-values, corrected so that all of them together err in one case of twenty; nan stays nan."""
    known = sorted((p, k) for k, p in enumerate(values) if not math.isnan(p))
    found, largest = [math.nan] * len(values), 0.0
    for rank, (p, k) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        found[k] = largest
    return found


def coalition_scores(logs: Array, labels: Array, metric: str) -> Array:
    """``(seeds, 1 + resamples)`` of a metric, turned so that higher is better; the first is of the samples themselves.

    All coalitions of a receiver see the same resamples. Much data has fewer of them.

    Args:
        logs: log-probabilities ``(seeds, N, C)``.
        labels: ``(N,)``.
        metric: as in `fedc2i.training.metrics`.
    """
    values = len(labels) * (logs.shape[2] if metric == "auroc" else 1)
    draws = resampled_counts(metric, labels, int(np.clip(WORK / values, FEWEST, MOST)), np.random.default_rng(0))
    counts = np.concatenate([np.ones_like(draws[:1]), draws])
    sign = 1 if HIGHER_IS_BETTER[metric] else -1
    return sign * np.stack([resampled_scores(metric, own, labels, counts) for own in logs])


def estimate(
    values: Mapping[Coalition, Array], contrast: Contrast, rings: Sequence[Contrast] = (), step: float = 0.0
) -> Estimate:
    """The weighted sum of coalitions' scores, each ``(seeds, 1 + resamples)``; one seed without resamples has no error.

    Args:
        values: by coalition.
        contrast: the weights.
        rings: where orders were drawn, the weights by each ring, whose mean is the contrast.
        step: between two scores that a receiver can have; rounding to it hides a variance of ``step² / 12``.
    """
    drawn = _sum(values, contrast)
    seeds = len(drawn)
    mean = drawn.mean(0)
    value, known = float(mean[0]), mean[1:][np.isfinite(mean[1:])]
    parts: list[tuple[float, float]] = []
    if len(mean) > 1:
        parts.append((float(known.var(ddof=1)) if len(known) > 1 else math.nan, math.inf))
    if seeds > 1:
        hidden = step**2 / 12 * sum(weight**2 for weight in contrast.values())
        is_changed = not bool((np.abs(drawn[:, np.isfinite(mean)]) <= ROUNDING).all())
        parts.append((max(float(drawn[:, 0].var(ddof=1)), hidden * is_changed) / seeds, seeds - 1))
    if len(rings) > 1:
        each = np.array([_sum(values, ring).mean(0)[0] for ring in rings])
        parts.append((float(each.var(ddof=1)) / len(rings), len(rings) - 1))
    return Estimate(value, tuple(parts))


def step_of(metric: str, samples: int, sizes: Sequence[int] = ()) -> float:
    """What one test sample is worth in a score that counts samples; 0 for others.

    Args:
        metric: as in `fedc2i.training.metrics`.
        samples: for the test.
        sizes: of each class, if they are known; of a mean over classes, the smallest decides.
    """
    if metric not in COUNTED or not samples:
        return 0.0
    present = [size for size in sizes if size]
    return 100 / (len(present) * min(present)) if metric in UNDEFINED and present else 100 / samples


def is_scarce(metric: str, sizes: Iterable[int]) -> bool:
    """Whether a score is a mean over classes one of which has so few test samples that no interval can be told."""
    return metric in UNDEFINED and any(0 < size < FEWEST_OF_CLASS for size in sizes)


def _sum(values: Mapping[Coalition, Array], contrast: Contrast) -> Array:
    found: Array = sum(weight * values[own] for own, weight in contrast.items())  # type: ignore[assignment]
    return found
