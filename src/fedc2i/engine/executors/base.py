"""Who computes for the clients: the protocol that the round loop speaks, and the records that go in and out.

A round has two steps, each for the clients of all seeds at once: local training, and making a start of what the server
sent. Scoring belongs to both, so that an executor can do it where the model just lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedc2i.core.params import Stacked
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Metrics
from fedc2i.methods.base import Download


@dataclass(frozen=True)
class ClientBatch:
    """The clients of one seed whose turn it is.

    Attributes:
        recipe: what all clients of this seed have in common.
        clients: their numbers in the federation.
        params: their models, stacked in that order.
        download: what the server sent last.
        round: the round this belongs to, from 1.
    """

    recipe: RunContext
    clients: tuple[int, ...]
    params: Stacked
    download: Download
    round: int


@dataclass(frozen=True)
class Trained:
    """What local runs brought: models and uploads, stacked, and scores if they were asked for."""

    params: Stacked
    uploads: Stacked
    metrics: Metrics


@dataclass(frozen=True)
class Received:
    """What clients made of a download: starts of the next round, stacked diagnostics, and scores if asked for."""

    params: Stacked
    report: Mapping[str, Tensor]
    metrics: Metrics


class Executor(Protocol):
    """Computes for the clients of all seeds; results come in the order of ``turns``."""

    def train(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local runs from ``params``, and what leaves the clients after them."""
        ...

    def personalise(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Received]:
        """The starts of the next round, from the clients' own ``params`` and the download."""
        ...

    def evaluate(self, turns: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of every client on its own data."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...
