"""What the verdicts of all studies are made of: a paired difference, and targets that were met or missed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.significance import DIGITS
from fedc2i.runs.results import Array


@dataclass(frozen=True)
class Paired:
    """FedC²I⁺ minus another method over the same seeds: mean, its standard error (none for one seed), and counts."""

    mean: float
    error: float | None
    wins: int
    losses: int
    ties: int

    @classmethod
    def of(cls, ours: Array, theirs: Array) -> Paired:
        """From one accuracy a seed of each."""
        differences = np.round(ours - theirs, DIGITS)
        count = len(differences)
        error = float(np.std(differences, ddof=1) / math.sqrt(count)) if count > 1 else None
        signs = [int((differences > 0).sum()), int((differences < 0).sum()), int((differences == 0).sum())]
        return cls(round(float(differences.mean()), DIGITS), error, *signs)

    def __str__(self) -> str:
        return f"{self.mean:+z.2f}" + ("" if self.error is None else f", s.e. {self.error:.2f}")

    def cells(self) -> list[str]:
        """Of a table: difference, standard error, wins / losses / ties."""
        error = "" if self.error is None else f"{self.error:.2f}"
        return [f"{self.mean:+z.2f}", error, f"{self.wins} / {self.losses} / {self.ties}"]


@dataclass(frozen=True)
class Verdict:
    """Whether each target was met, and sentences that say so."""

    targets: Mapping[str, bool]
    sentences: tuple[str, ...]
