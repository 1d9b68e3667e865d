"""The report of a round and the outcome of a run, as plain records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedc2i.core.params import Stacked

Metrics = list[dict[str, float]]  # for each client its metrics by name
Point = Literal["received", "trained"]
POINTS: tuple[Point, ...] = ("received", "trained")


@dataclass(frozen=True)
class Round:
    """What one round brought.

    Attributes:
        seed: of the run.
        round: its number, from 1.
        seconds: how long it took, evaluation included.
        participants: names of the clients that trained.
        metrics: for each point, for each client its metrics; empty in rounds that are not evaluated.
        influence: diagnostics such as ``influence_vector`` ``(M, M, ...)``: row m is what client m measured of every
            client, nan where it measured nothing. It belongs to the exchange at the end of this round.
        refused: names of clients whose upload was not finite or far too large, and was rejected.
        bytes_up: what one client sent.
        bytes_down: what one client received.
        why: by name what was wrong with a rejected upload.
    """

    seed: int
    round: int
    seconds: float
    participants: tuple[str, ...]
    metrics: Mapping[Point, Metrics]
    influence: Mapping[str, np.ndarray[Any, Any]]
    refused: tuple[str, ...]
    bytes_up: int
    bytes_down: int
    why: Mapping[str, str] = field(default_factory=dict)

    def mean(self, point: Point, metric: str = "accuracy") -> float:
        """The unweighted mean of a metric over the clients that have it."""
        values = [own[metric] for own in self.metrics[point] if metric in own]
        return float(np.mean(values))


@dataclass(frozen=True, repr=False)
class Outcome:
    """The end of a run: every client's last model at both points, stacked, and the last round's report."""

    trained: Stacked
    received: Stacked
    last: Round
