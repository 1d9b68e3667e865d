"""Whether two methods differ, paired over seeds: the same seed gives both the same start, batches and data."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from fedc2i.runs.results import Array

RESAMPLES = 10_000
LEVEL = 0.95
DIGITS = 6  # of an accuracy in percent; closer ones are equal


def bootstrap_interval(differences: Array) -> tuple[float, float]:
    """Both ends of the 95 % percentile interval of the mean paired difference, from ``(S,)``, one a seed.

    Up to six seeds every resample is enumerated; beyond, 10,000 are drawn with a fixed seed.
    """
    count = len(differences)
    if count <= 6:
        means = np.array(list(itertools.product(differences, repeat=count))).mean(1)
    else:
        draws = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
        means = differences[draws].mean(1)
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


def pooled_deviations(ours: float, ours_sd: float | None, theirs: float, theirs_sd: float | None) -> float | None:
    """The difference in units of the pooled standard deviation; None where there is none."""
    if ours_sd is None or theirs_sd is None or ours_sd == theirs_sd == 0:
        return None
    return float((ours - theirs) / np.sqrt((ours_sd**2 + theirs_sd**2) / 2))


@dataclass(frozen=True)
class Paired:
    """One method minus another over the same seeds: mean, its standard error (None for one seed), and counts."""

    mean: float
    error: float | None
    wins: int
    losses: int
    ties: int

    @classmethod
    def of(cls, ours: Array, theirs: Array) -> Paired:
        """From accuracies ``(S,)`` of each."""
        differences = np.round(ours - theirs, DIGITS)
        count = len(differences)
        error = float(np.std(differences, ddof=1) / math.sqrt(count)) if count > 1 else None
        signs = [int((differences > 0).sum()), int((differences < 0).sum()), int((differences == 0).sum())]
        return cls(round(float(differences.mean()), DIGITS), error, *signs)

    @property
    def count(self) -> int:
        """Of seeds."""
        return self.wins + self.losses + self.ties

    def __str__(self) -> str:
        return f"{self.mean:+z.2f}" + ("" if self.error is None else f", s.e. {self.error:.2f}")

    def cells(self, digits: int = 2) -> list[str]:
        """Of a table: difference, standard error, wins / losses / ties."""
        error = "" if self.error is None else f"{self.error:.{digits}f}"
        return [f"{self.mean:+z.{digits}f}", error, f"{self.wins} / {self.losses} / {self.ties}"]
