"""Clients one after the other, in this process: the plain way, which the others must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedc2i.core.params import Params, row, stack
from fedc2i.engine.client import ClientData, LocalClient
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.records import Metrics


class LoopedExecutor:
    """`Executor` that computes for one client after the other."""

    def __init__(self, data: Sequence[ClientData], on_client: Callable[[int, int], None] | None = None) -> None:
        self._data = data
        self._on_client = on_client

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        results = []
        done, of = 0, sum(len(batch.clients) for batch in batches)
        for batch in batches:
            models: list[Params] = []
            uploads: list[Params] = []
            metrics: Metrics = []
            for client, start, received, position in self._each(batch):
                models.append(client.train(start, received, position, batch.round))
                uploads.append(client.upload(models[-1], start, received, position, batch.round))
                if evaluate:
                    metrics.append(client.evaluate(models[-1], received, position, batch.round))
                done += 1
                if self._on_client is not None:
                    self._on_client(done, of)
            results.append(Trained(stack(models), stack(uploads), metrics))
        return results

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """See `Executor.personalise`."""
        results = []
        for batch in batches:
            starts: list[Params] = []
            diagnostics: list[Params] = []
            metrics: Metrics = []
            for client, own, received, position in self._each(batch):
                start, measured = client.personalise(own, received, position, batch.round)
                starts.append(start)
                diagnostics.append(dict(measured))
                if evaluate:
                    metrics.append(client.evaluate(start, received, position, batch.round))
            results.append(Personalised(stack(starts), stack(diagnostics), metrics))
        return results

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[Metrics]:
        """See `Executor.evaluate`."""
        return [
            [
                client.evaluate(own, received, position, batch.round)
                for client, own, received, position in self._each(batch)
            ]
            for batch in batches
        ]

    def close(self) -> None:
        """There is nothing to release."""

    def _each(self, batch: ClientBatch) -> Iterator[tuple[LocalClient, Params, Params, int]]:
        """Every client with its model, what it received, and the position of its own upload in that."""
        download = batch.download
        for k, m in enumerate(batch.clients):
            yield LocalClient(batch.context, self._data[m]), row(batch.params, k), download.to(m), download.position(m)
