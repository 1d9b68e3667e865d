"""How certain a weighted sum of coalitions' values is: over test samples, over seeds, and over the orders drawn.

Three independent variances add up: that of the receiver's test samples, by a bootstrap in which all coalitions and
seeds see the same resamples; that of the mean over seeds, from the spread between seeds; and, where orders of givers
were drawn, that of the mean over rings. Few seeds or rings make a variance uncertain, which Student's t allows for,
with the degrees of freedom of Welch and Satterthwaite. Many pairs are corrected for by Holm's method.

Where only scores are known and no predictions, as of real sites, there are no resamples and no variance of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedc2i.analysis.contribution.shapley import Coalition, Contrast
from fedc2i.analysis.paired_bootstrap import resampled_counts, resampled_scores
from fedc2i.training.metrics import HIGHER_IS_BETTER

Array = np.ndarray[Any, Any]
LEVEL = 0.95
MOST, FEWEST = 400, 60  # resamples
WORK = 1e6  # resampled values that are read, beyond which fewer resamples are drawn
ROUNDING = 1e-9  # of a score; a smaller effect is none


@dataclass(frozen=True)
class Estimate:
    """A value with its standard error and degrees of freedom; positive: the receiver's score is better with it."""

    value: float
    error: float
    freedom: float

    @property
    def ends(self) -> tuple[float, float]:
        """Of the 95 % interval."""
        reach = self.error * _t(self.freedom) if self.error else 0.0
        return self.value - reach, self.value + reach

    @property
    def p(self) -> float:
        """Two-sided, of the hypothesis that there is no effect; nan if the value is."""
        from scipy import stats

        if math.isnan(self.value):
            return math.nan
        if self.error <= ROUNDING:
            return 1.0 if abs(self.value) <= ROUNDING else 0.0
        return float(2 * stats.t.sf(abs(self.value) / self.error, self.freedom))


def _t(freedom: float) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + LEVEL) / 2, freedom))


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


def estimate(values: Mapping[Coalition, Array], contrast: Contrast, rings: Sequence[Contrast] = ()) -> Estimate:
    """The weighted sum of coalitions' scores, each ``(seeds, 1 + resamples)``; one seed without resamples has no error.

    Args:
        values: by coalition.
        contrast: the weights.
        rings: where orders were drawn, the weights by each ring, whose mean is the contrast.
    """
    drawn = _sum(values, contrast)
    seeds = len(drawn)
    mean = drawn.mean(0)
    value, known = float(mean[0]), mean[1:][np.isfinite(mean[1:])]
    parts = []
    if len(mean) > 1:
        parts.append((float(known.var(ddof=1)) if len(known) > 1 else math.nan, math.inf))
    if seeds > 1:
        parts.append((float(drawn[:, 0].var(ddof=1)) / seeds, seeds - 1))
    if len(rings) > 1:
        each = np.array([_sum(values, ring).mean(0)[0] for ring in rings])
        parts.append((float(each.var(ddof=1)) / len(rings), len(rings) - 1))
    return combined(value, parts) if parts else Estimate(value, math.nan, 1.0)


def combined(value: float, parts: Sequence[tuple[float, float]]) -> Estimate:
    """A value with independent variances, each with its degrees of freedom."""
    variance = sum(own for own, _ in parts)
    below = sum(own**2 / freedom for own, freedom in parts)
    freedom = variance**2 / below if below > 0 else math.inf
    return Estimate(value, math.sqrt(variance), max(1.0, freedom))


def _sum(values: Mapping[Coalition, Array], contrast: Contrast) -> Array:
    found: Array = sum(weight * values[own] for own, weight in contrast.items())  # type: ignore[assignment]
    return found
