"""The protocol between the round loop and whatever computes for the clients, and the plain way to do it.

A round has two computations, each for the clients of all seeds at once: local training, and making a start of what the
server sent. Evaluation belongs to both, so that an executor can do it while the model is in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.records import Scored
from fedc2i.methods.messages import Download

OnClient = Callable[[int, int], None]  # the number of clients that have trained in this round, and of how many


@dataclass(frozen=True)
class ClientBatch:
    """Clients of one seed that received the same download."""

    context: RunContext
    clients: tuple[int, ...]  # their numbers in the federation
    params: Stacked  # their models, in that order
    download: Download
    round: int


@dataclass(frozen=True)
class Trained:
    """After local training: models and uploads, stacked, and metrics if they were asked for."""

    params: Stacked
    uploads: Stacked
    metrics: list[Scored]


@dataclass(frozen=True)
class Personalised:
    """What clients made of a download: starts of the next round, stacked diagnostics, and metrics if asked for."""

    params: Stacked
    diagnostics: Mapping[str, Tensor]
    metrics: list[Scored]


class Executor(Protocol):
    """Computes for the clients of all seeds; results come in the order of ``batches``."""

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local training from ``params``, and the uploads after it."""
        ...

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """The starts of the next round, from the clients' own ``params`` and the download."""
        ...

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[list[Scored]]:
        """Metrics of every client on its own data."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class LoopedExecutor:
    """`Executor` for one client after the other, in this process; the others must agree with it."""

    def __init__(self, data: Sequence[ClientData], on_client: OnClient | None = None) -> None:
        self._data = data
        self._on_client = on_client

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        results = []
        done, of = 0, sum(len(batch.clients) for batch in batches)
        for batch in batches:
            models: list[Params] = []
            uploads: list[Params] = []
            metrics: list[Scored] = []
            for client, start, received, position in self._each(batch):
                models.append(client.train(start, received, position, batch.round))
                uploads.append(client.upload(models[-1], start, received, position, batch.round))
                if evaluate:
                    metrics.append(client.scored(models[-1], received, position, batch.round))
                done += 1
                if self._on_client is not None:
                    self._on_client(done, of)
            results.append(Trained(self._stacked(models), self._stacked(uploads), metrics))
        return results

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """See `Executor.personalise`."""
        results = []
        for batch in batches:
            starts: list[Params] = []
            diagnostics: list[Params] = []
            metrics: list[Scored] = []
            for client, own, received, position in self._each(batch):
                start, measured = client.personalise(own, received, position, batch.round)
                starts.append(start)
                diagnostics.append(dict(measured))
                if evaluate:
                    metrics.append(client.scored(start, received, position, batch.round))
            results.append(Personalised(stack(starts), stack(diagnostics), metrics))
        return results

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[list[Scored]]:
        """See `Executor.evaluate`."""
        return [
            [client.scored(own, mail, position, batch.round) for client, own, mail, position in self._each(batch)]
            for batch in batches
        ]

    def close(self) -> None:
        """There is nothing to release."""

    def _stacked(self, models: Sequence[Params]) -> Stacked:
        """Models of clients that have trained, stacked."""
        return stack(models)

    def _each(self, batch: ClientBatch) -> Iterator[tuple[LocalClient, Params, Params, int]]:
        """Every client with its model, what it received, and the position of its own upload in that."""
        download = batch.download
        for k, m in enumerate(batch.clients):
            yield LocalClient(batch.context, self._data[m]), row(batch.params, k), download.to(m), download.position(m)
