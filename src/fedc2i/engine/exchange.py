"""The server's side of one seed: who trains, which uploads arrive, what clients receive, when to stop.

The simulator and the Flower coordinator share it. They differ in how a message gets to a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedc2i.core.params import Params, Stacked, prefixed, size_in_bytes, unprefixed
from fedc2i.engine import topology
from fedc2i.engine.client import RunContext
from fedc2i.engine.diagnostics import Diagnostics, over_all_clients
from fedc2i.engine.participation import EarlyStopping, audience, choose
from fedc2i.engine.records import Metrics, Point, Round
from fedc2i.engine.server import Mailbox, Server
from fedc2i.engine.settings import EngineSettings
from fedc2i.methods.base import Download


class Exchange:
    """One mailbox, and a server for every group of clients that receive from the same clients."""

    def __init__(
        self,
        context: RunContext,
        settings: EngineSettings,
        names: Sequence[str],
        samples: Tensor,
        first_models: Stacked,
    ) -> None:
        """Starts before the first round; ``samples`` ``(M,)`` counts each client's training samples."""
        self._context, self._settings, self._names = context, settings, tuple(names)
        groups = topology.parse(settings.topology, names, context.seed).groups()
        self._group = {client: g for g, group in enumerate(groups) for client in group.members}
        self.mailbox = Mailbox(len(names), settings.norm_bound)
        self.servers = [Server(context.method, samples, first_models, own.sources, self.mailbox) for own in groups]
        self._stopping = EarlyStopping(settings.patience)

    def choose(self, number: int) -> tuple[int, ...]:
        """Who trains in a round, in table order."""
        return choose(self._context.seed, self._settings, len(self._names), number)

    def audience(self, number: int) -> tuple[int, ...]:
        """Who needs what the exchange of a round brought, in table order."""
        return audience(self._context.seed, self._settings, len(self._names), number)

    def group(self, client: int) -> int:
        """The number of the client's server."""
        return self._group[client]

    def download(self, client: int) -> Download:
        """What the client's group received last."""
        return self.servers[self._group[client]].download

    def by_group(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        """The clients, divided into those that receive the same download."""
        members: dict[int, list[int]] = {}
        for client in clients:
            members.setdefault(self._group[client], []).append(client)
        return [tuple(own) for own in members.values()]

    def combine(self, number: int) -> None:
        """Every server makes of its clients' latest uploads what they receive after this round."""
        for server in self.servers:
            server.combine(number)

    def take_reports(self, measured: Sequence[Diagnostics], senders: Sequence[int]) -> int:
        """Gives servers the diagnostics that the method reads, of the ``senders`` only; returns their size in bytes."""
        names, size = self._context.method.reads_reports, 0
        for own in measured if names else ():
            some = [k for k, client in enumerate(own.clients) if client in senders]
            reports = {name: own.values[name][some] for name in names if some and name in own.values}
            server = self.servers[self._group[own.clients[0]]]
            server.take_reports([own.clients[k] for k in some], own.received, reports)
            size += size_in_bytes(reports)
        return size

    def report(
        self,
        number: int,
        seconds: float,
        participants: Sequence[int],
        metrics: Mapping[Point, Metrics],
        measured: Sequence[Diagnostics],
        rejected: Mapping[int, str],
        bytes_up: int,
        bytes_down: int,
    ) -> Round:
        """The report of a round; ``rejected`` says by client what was wrong with an upload."""
        influence = over_all_clients(measured, len(self._names), number == self._settings.rounds)
        why = {self._names[m]: reason for m, reason in rejected.items()}
        trained = tuple(self._names[m] for m in participants)
        seed = self._context.seed
        return Round(seed, number, seconds, trained, metrics, influence, tuple(why), bytes_up, bytes_down, why)

    def should_stop(self, last: Round) -> bool:
        """Whether validation accuracy has not risen for long enough; to be asked once for every evaluated round."""
        return self._stopping.should_stop(last, self._context.method.headline)

    def state(self) -> tuple[Params, dict[str, Any]]:
        """All that it needs to resume after a round, as flat tensors and plain values; see `restore`."""
        tensors = prefixed("mailbox/", self.mailbox.uploads)
        for s, server in enumerate(self.servers):
            tensors |= prefixed(f"server{s}/", server.tensors())
        values = {
            "sent": self.mailbox.sent,
            "downloads": [server.download.clients for server in self.servers],
            "patience": self._stopping.state,
        }
        return tensors, values

    def restore(self, tensors: Params, values: Mapping[str, Any]) -> None:
        """Takes back what `state` returned."""
        self.mailbox.restore(unprefixed("mailbox/", tensors), values["sent"])
        for s, (server, clients) in enumerate(zip(self.servers, values["downloads"], strict=True)):
            server.restore(unprefixed(f"server{s}/", tensors), clients)
        best, waited = values["patience"]
        self._stopping.state = best, waited
