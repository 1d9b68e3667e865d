"""The protocol between the round loop and whatever computes for the clients, and the records that go in and out.

A round has two computations, each for the clients of all seeds at once: local training, and making a start of what the
server sent. Evaluation belongs to both, so that an executor can do it while the model is in place.
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
    """Clients of one seed that received the same download.

    Attributes:
        context: what all clients of this seed have in common.
        clients: their numbers in the federation.
        params: their models, stacked in that order.
        download: what the server sent last.
        round: from 1.
    """

    context: RunContext
    clients: tuple[int, ...]
    params: Stacked
    download: Download
    round: int


@dataclass(frozen=True)
class Trained:
    """After local training: models and uploads, stacked, and metrics if they were asked for."""

    params: Stacked
    uploads: Stacked
    metrics: Metrics


@dataclass(frozen=True)
class Personalised:
    """What clients made of a download: starts of the next round, stacked diagnostics, and metrics if asked for."""

    params: Stacked
    diagnostics: Mapping[str, Tensor]
    metrics: Metrics


class Executor(Protocol):
    """Computes for the clients of all seeds; results come in the order of ``batches``."""

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local training from ``params``, and the uploads after it."""
        ...

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """The starts of the next round, from the clients' own ``params`` and the download."""
        ...

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of every client on its own data."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...
