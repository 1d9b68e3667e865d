"""Clients one after the other, in this process: the plain way, which the others must agree with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fedc2i.core.params import Params, row, stack
from fedc2i.engine.client import ClientData, LocalClient
from fedc2i.engine.executors.base import ClientBatch, Received, Trained
from fedc2i.engine.records import Metrics


class Looped:
    """`Executor` that serves one client after the other."""

    def __init__(self, data: Sequence[ClientData], on_client: Callable[[int, int], None] | None = None) -> None:
        self._data = data
        self._on_client = on_client

    def train(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local runs, uploads, and scores of the trained models if asked for."""
        results = []
        done, of = 0, sum(len(turn.clients) for turn in turns)
        for turn in turns:
            models: list[Params] = []
            uploads: list[Params] = []
            metrics: Metrics = []
            for client, start, received, position in self._each(turn):
                models.append(client.train(start, received, position, turn.round))
                uploads.append(client.upload(models[-1], start, received, position, turn.round))
                if evaluate:
                    metrics.append(client.evaluate(models[-1], received, position, turn.round))
                done += 1
                if self._on_client is not None:
                    self._on_client(done, of)
            results.append(Trained(stack(models), stack(uploads), metrics))
        return results

    def personalise(self, turns: Sequence[ClientBatch], evaluate: bool) -> list[Received]:
        """Starts of the next round, diagnostics, and scores of the starts if asked for."""
        results = []
        for turn in turns:
            starts: list[Params] = []
            reports: list[Params] = []
            metrics: Metrics = []
            for client, own, received, position in self._each(turn):
                start, report = client.personalise(own, received, position, turn.round)
                starts.append(start)
                reports.append(dict(report))
                if evaluate:
                    metrics.append(client.evaluate(start, received, position, turn.round))
            results.append(Received(stack(starts), stack(reports), metrics))
        return results

    def evaluate(self, turns: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of every client on its own data."""
        return [[one.evaluate(own, sent, at, turn.round) for one, own, sent, at in self._each(turn)] for turn in turns]

    def close(self) -> None:
        """Nothing is held for this run alone."""

    def _each(self, turn: ClientBatch) -> Iterator[tuple[LocalClient, Params, Params, int]]:
        """Every client with its model, what it received and where its own upload stands in that."""
        sent = turn.download
        for k, m in enumerate(turn.clients):
            yield LocalClient(turn.recipe, self._data[m]), row(turn.params, k), sent.to(m), sent.position(m)
