"""The exchange of one seed: who trains, how uploads arrive, what clients receive, when to stop.

The simulator and the Flower engine share it. They differ in how a message gets to a client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, prefixed, size_in_bytes, unprefixed
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Diagnostics, Metrics, Point, Round, over_all_clients
from fedc2i.engine.server import Mailbox, Server
from fedc2i.methods.messages import Download

Clients = tuple[int, ...]  # in table order


def choose(seed: int, settings: EngineSettings, clients: int, number: int) -> Clients:
    """Who trains in a round."""
    count = settings.participants(clients)
    if count == clients:
        return tuple(range(clients))
    draw = torch.randperm(clients, generator=seeding.generator(seed, number, "participants"))
    return tuple(sorted(draw[:count].tolist()))


def audience(seed: int, settings: EngineSettings, clients: int, number: int) -> Clients:
    """Who needs what a round's exchange brought: everyone for an evaluation, else who trains in the next round."""
    return tuple(range(clients)) if settings.is_due(number) else choose(seed, settings, clients, number + 1)


def receiver_groups(seed: int, settings: EngineSettings, names: Sequence[str]) -> list[tuple[Clients, Clients]]:
    """Clients that receive from the same clients, and those; a client always receives from itself.

    Raises:
        UserError: for a topology that does not fit the clients.
    """
    if settings.topology == "full":
        return [(tuple(range(len(names))),) * 2]
    from fedc2i.engine import topology

    members: dict[Clients, list[int]] = {}
    for client, sources in enumerate(topology.parse(settings.topology, names, seed)):
        members.setdefault(sources, []).append(client)
    return [(tuple(own), sources) for sources, own in members.items()]


def process(
    uploads: Stacked,
    starts: Stacked,
    clients: Sequence[str],
    number: int,
    context: RunContext,
    settings: EngineSettings,
    received: Callable[[int], Params] = lambda k: {},
    secret: bytes = b"",
) -> Stacked:
    """The upload pipeline: the uploads ``(K, ...)`` of ``clients`` as the server will see them, here and at a site.

    Clipping and noise, which protect an honest client, come first; then a dishonest client, which has seen the upload
    that it would send, may send something else. ``starts`` are the models their local runs started from, ``received``
    gives what the server had sent to the k-th client, ``secret`` is a site's key for noise that no one else can draw.

    Raises:
        UserError: if a real site would attack a run with noise: the attack has no noise.
    """
    if secret and any(name in context.attacks for name in clients):
        raise UserError("with noise a real site sends nothing but its upload; use either attack or noise")
    if settings.clip and uploads:
        from fedc2i.engine import clip_noise

        uploads = clip_noise.protect(uploads, clients, number, context, settings, received, secret)
    if any(name in context.attacks for name in clients) and uploads:
        from fedc2i.engine import attacks

        uploads = attacks.replace_uploads(context.attacks, uploads, starts, clients, context.seed, number)
    return uploads


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
        groups = receiver_groups(context.seed, settings, names)
        self._group = {client: g for g, (members, _) in enumerate(groups) for client in members}
        self.mailbox = Mailbox(len(names), settings.norm_bound)
        self.servers = [Server(context.method, samples, first_models, own, self.mailbox) for _, own in groups]
        self._patience = -float("inf"), 0  # the best validation accuracy, and evaluations since then

    def choose(self, number: int) -> Clients:
        """Who trains in a round."""
        return choose(self._context.seed, self._settings, len(self._names), number)

    def audience(self, number: int) -> Clients:
        """Who needs what the exchange of a round brought."""
        return audience(self._context.seed, self._settings, len(self._names), number)

    def group(self, client: int) -> int:
        """The number of the client's server."""
        return self._group[client]

    def download(self, client: int) -> Download:
        """What the client's group received last."""
        return self.servers[self._group[client]].download

    def by_group(self, clients: Sequence[int]) -> list[Clients]:
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
        """Whether mean validation accuracy, never test data, has not risen for ``patience`` evaluations.

        To be asked once for every evaluated round.
        """
        if not self._settings.patience:
            return False
        score, (best, waited) = last.mean(self._context.method.headline, "validation_accuracy"), self._patience
        self._patience = max(best, score), 0 if score > best else waited + 1
        return self._patience[1] >= self._settings.patience

    def state(self) -> tuple[Params, dict[str, Any]]:
        """All that it needs to resume after a round, as flat tensors and plain values; see `restore`."""
        tensors = prefixed("mailbox/", self.mailbox.uploads)
        for s, server in enumerate(self.servers):
            tensors |= prefixed(f"server{s}/", server.tensors())
        downloads = [server.download.clients for server in self.servers]
        return tensors, {"sent": list(self.mailbox.sent), "downloads": downloads, "patience": self._patience}

    def restore(self, tensors: Params, values: Mapping[str, Any]) -> None:
        """Takes back what `state` returned."""
        self.mailbox.uploads, self.mailbox.sent = unprefixed("mailbox/", tensors), list(values["sent"])
        for s, (server, clients) in enumerate(zip(self.servers, values["downloads"], strict=True)):
            server.restore(unprefixed(f"server{s}/", tensors), clients)
        best, waited = values["patience"]
        self._patience = best, waited
