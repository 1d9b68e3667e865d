"""What a run reports, as plain records: diagnostics of an exchange, a round, the outcome."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedc2i.core.params import Stacked
from fedc2i.data.federation import Federation

Metrics = list[dict[str, float]]  # for each client its metrics by name
Point = Literal["received", "trained"]
POINTS: tuple[Point, ...] = ("received", "trained")
MOST_PREDICTIONS = 2**24  # numbers that a run's predictions may have, four bytes each
LARGE = 2**24  # bytes; a larger array of diagnostics is reported for the last round only
MOST_NAMED = 8  # clients in a message


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
        """The unweighted mean of a metric over the clients that have it; nan if none has."""
        found = [own[metric] for own in self.metrics[point] if metric in own]
        return float(np.mean(found)) if found else math.nan


class Scored(dict[str, float]):
    """A client's metrics by name, and the logits ``(N, C)`` of its test samples that they were computed from."""

    def __init__(self, metrics: Mapping[str, float], logits: Tensor) -> None:
        super().__init__(metrics)
        self.logits = logits


def keeps_logits(seeds: int, federation: Federation) -> bool:
    """Whether the logits of all test samples, of all seeds and points together, are few enough for predictions."""
    samples = sum(len(client.test) for client in federation.clients)
    return seeds * len(POINTS) * samples * len(federation.classes) <= MOST_PREDICTIONS


@dataclass(frozen=True, repr=False)
class Outcome:
    """The end of a run: every client's last model at both points, stacked, and the last round's report.

    ``logits`` by point are those of the last evaluation: ``(N, C)``, all clients' test samples one client after the
    other; empty unless `keeps_logits`. Checkpoints contain them, so a run that resumes has their bits.
    """

    trained: Stacked
    received: Stacked
    last: Round
    logits: Mapping[Point, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Predictions:
    """What the last models predict for every test sample, the clients one after the other.

    Attributes:
        labels: ``(N,)`` the true classes.
        samples: how many of them each client has.
        logs: by seed and point the log-probabilities ``(N, C)``, float32; nan where a diverged model has none.
    """

    labels: np.ndarray[Any, Any]
    samples: tuple[int, ...]
    logs: Mapping[tuple[int, Point], np.ndarray[Any, Any]]

    @property
    def classes(self) -> int:
        """How many there are."""
        return int(next(iter(self.logs.values())).shape[1])

    def rows(self, client: int) -> slice:
        """Where a client's samples are."""
        start = sum(self.samples[:client])
        return slice(start, start + self.samples[client])

    def only(self, seed: int) -> Predictions:
        """The same of one seed alone."""
        return replace(self, logs={key: logs for key, logs in self.logs.items() if key[0] == seed})


class Diagnostics(NamedTuple):
    """What some clients measured, stacked by name ``(K, ...)``, and whose models they had received."""

    values: Mapping[str, Tensor]
    clients: tuple[int, ...]
    received: tuple[int, ...]


def over_all_clients(
    measured: Sequence[Diagnostics], clients: int, is_last: bool = True
) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all M clients, nan elsewhere.

    ``(M, M, ...)`` for what a client measures of each client it received, ``(M, ...)`` for what it measures of itself.
    """
    full = {}
    for name in dict.fromkeys(name for own in measured for name in own.values):
        parts = [(own.values[name], own) for own in measured if name in own.values]
        of_others = all(values.ndim > 1 and values.shape[1] == len(own.received) for values, own in parts)
        some = parts[0][0]
        shape = (clients, clients, *some.shape[2:]) if of_others else (clients, *some.shape[1:])
        if not is_last and 4 * math.prod(shape) > LARGE:  # Λ of a thousand clients is 40 MB, every round
            continue
        array = np.full(shape, np.nan, dtype=np.float32)
        for values, own in parts:
            where = np.ix_(own.clients, own.received) if of_others else list(own.clients)
            array[where] = values.to(torch.float32).cpu().numpy()
        full[name] = array
    return full
