"""Clients one after the other, each with the whole machine: the plain way, and the fastest on few CPU cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fedc2i.engine.client import ClientData, LocalClient, Recipe
from fedc2i.engine.rounds import Metrics
from fedc2i.methods.base import Download
from fedc2i.params import Params, Stacked, row, stack


class Executor(Protocol):
    """Who computes for the clients. Parameters go in and out stacked, in the order of ``clients``."""

    def train(self, clients: Sequence[int], starts: Stacked, download: Download, round: int) -> Stacked:
        """Local runs of ``round``."""
        ...

    def upload(self, clients: Sequence[int], own: Stacked, starts: Stacked, download: Download, round: int) -> Stacked:
        """What leaves the clients after their local runs from ``starts``."""
        ...

    def personalise(
        self, clients: Sequence[int], own: Stacked, download: Download, round: int
    ) -> tuple[Stacked, Mapping[str, Tensor]]:
        """The starts of the next round, and stacked diagnostics."""
        ...

    def evaluate(self, clients: Sequence[int], params: Stacked, download: Download, round: int) -> Metrics:
        """Metrics of every client on its own data."""
        ...


class Looped:
    """`Executor` that serves one client after the other."""

    def __init__(
        self, recipe: Recipe, data: Sequence[ClientData], on_client: Callable[[int, int], None] | None = None
    ) -> None:
        self._clients = [LocalClient(recipe, own) for own in data]
        self._on_client = on_client

    def train(self, clients: Sequence[int], starts: Stacked, download: Download, round: int) -> Stacked:
        """Local runs of ``round``."""
        trained = []
        for k, m in enumerate(clients):
            trained.append(self._clients[m].train(row(starts, k), download.to(m), download.position(m), round))
            if self._on_client is not None:
                self._on_client(k + 1, len(clients))
        return stack(trained)

    def upload(self, clients: Sequence[int], own: Stacked, starts: Stacked, download: Download, round: int) -> Stacked:
        """What leaves the clients after their local runs from ``starts``."""
        return stack(
            [
                self._clients[m].upload(row(own, k), row(starts, k), download.to(m), download.position(m), round)
                for k, m in enumerate(clients)
            ]
        )

    def personalise(
        self, clients: Sequence[int], own: Stacked, download: Download, round: int
    ) -> tuple[Stacked, Mapping[str, Tensor]]:
        """The starts of the next round, and stacked diagnostics."""
        starts: list[Params] = []
        reports: list[Params] = []
        for k, m in enumerate(clients):
            start, report = self._clients[m].personalise(row(own, k), download.to(m), download.position(m), round)
            starts.append(start)
            reports.append(dict(report))
        return stack(starts), stack(reports)

    def evaluate(self, clients: Sequence[int], params: Stacked, download: Download, round: int) -> Metrics:
        """Metrics of every client on its own data."""
        return [
            self._clients[m].evaluate(row(params, k), download.to(m), download.position(m), round)
            for k, m in enumerate(clients)
        ]
