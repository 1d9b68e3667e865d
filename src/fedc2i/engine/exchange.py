"""The exchange of one seed: who trains, which uploads are rejected, what clients receive, when to stop.

The simulator and the Flower engine share it. They differ in how a message gets to a client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.params import (
    Params,
    Stacked,
    finite,
    floating,
    mix,
    norms,
    prefixed,
    replace_rows,
    rows,
    size_in_bytes,
    uniform,
    unprefixed,
)
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Diagnostics, Metrics, Point, Round, over_all_clients
from fedc2i.methods.base import Method
from fedc2i.methods.messages import Download, Uploads

NOT_FINITE = "not finite"
REPORTS = "reports/"  # of a server's tensors: on the CPU, wherever the models are
FEWEST = 3  # uploads for a meaningful median
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


class Mailbox:
    """The latest upload of every client or, where that is all a method reads, the uploads of the latest round."""

    def __init__(self, clients: int, norm_bound: float = 0.0, keeps: bool = True) -> None:
        """``keeps``: whether uploads of earlier rounds stay."""
        self.keeps, self._norm_bound = keeps, norm_bound
        self.uploads: Stacked = {}
        self._row: dict[int, int] = {client: client for client in range(clients)} if keeps else {}
        self.sent = [0] * clients  # the round of each client's latest upload, 0 for none
        self.norms = [0.0] * clients  # of each client's latest upload; 0 without a bound

    def measure(self, uploads: Stacked) -> Tensor | None:
        """What `receive` reads of uploads to accept them: of each whether it is finite, and its norm with a bound."""
        if not uploads:
            return None
        sound = finite(uploads)
        return torch.cat([sound.to(torch.float64), norms(uploads)]) if self._norm_bound else sound

    def receive(
        self, clients: Sequence[int], uploads: Stacked, round: int, measured: Tensor | None = None
    ) -> dict[int, str]:
        """Takes the uploads of a round; returns the clients whose upload was rejected, and what was wrong with it.

        A rejected client counts as absent: its earlier upload, if any, stays. ``measured`` is the result of `measure`
        if the caller has it.
        """
        measured = self.measure(uploads) if measured is None else measured
        wrong, sizes = ({}, [0.0] * len(clients)) if measured is None else self._wrong(clients, measured.tolist())
        kept = [k for k in range(len(clients)) if k not in wrong]
        accepted = [clients[k] for k in kept]
        if self.keeps:
            if not self.uploads:
                count = len(self.sent)
                self.uploads = {name: own.new_zeros((count, *own.shape[1:])) for name, own in uploads.items()}
            if accepted:
                self.uploads = replace_rows(self.uploads, accepted, rows(uploads, kept))
        else:
            self._replace(accepted, rows(uploads, kept), round)
        for k in kept:
            self.sent[clients[k]], self.norms[clients[k]] = round, sizes[k]
        return {clients[k]: why for k, why in wrong.items()}

    def _replace(self, clients: Sequence[int], uploads: Stacked, round: int) -> None:
        """Keeps these uploads, with others of the same round; nobody reads a late one of an earlier round."""
        latest = max(self.sent)
        if round > latest or not self._row:
            self.uploads, self._row = uploads, {client: k for k, client in enumerate(clients)}
        elif round == latest:
            self.uploads = {name: torch.cat([self.uploads[name], own]) for name, own in uploads.items()}
            self._row |= {client: len(self._row) + k for k, client in enumerate(clients)}

    def _wrong(self, clients: Sequence[int], read: Sequence[float]) -> tuple[dict[int, str], list[float]]:
        """Which uploads are not usable: nan or infinity in them, or a norm far above the median of all; and the norms.

        If fewer than three have arrived, other clients' latest uploads are part of the median. With fewer than three
        in all, it is unclear which one is wrong.
        """
        if not self._norm_bound:
            return {k: NOT_FINITE for k, good in enumerate(read) if not good}, [0.0] * len(clients)
        others = [m for m, round in enumerate(self.sent) if round and m not in clients] if len(clients) < FEWEST else []
        flags, sizes = read[: len(clients)], [*read[len(clients) :], *(self.norms[m] for m in others)]
        wrong = {k: NOT_FINITE for k, good in enumerate(flags) if not good}
        usual = [size for k, size in enumerate(sizes) if k not in wrong]
        bound = self._norm_bound * median(usual) if len(usual) >= FEWEST else 0.0
        large = {k for k, size in enumerate(sizes[: len(clients)]) if size > bound > 0 and k not in wrong}
        wrong |= {k: f"{sizes[k] / median(usual):.3g} times the usual size" for k in large}
        return dict(sorted(wrong.items())), sizes

    def of(self, clients: Sequence[int]) -> Stacked:
        """The uploads of these clients, stacked."""
        return rows(self.uploads, [self._row[client] for client in clients])


class Server:
    """The method's server state and download for clients that receive from the same clients; knows no client's data."""

    def __init__(
        self,
        method: Method,
        samples: Tensor,
        models: Stacked,
        sources: Sequence[int] | None = None,
        mailbox: Mailbox | None = None,
    ) -> None:
        """Starts with nothing received.

        ``samples`` ``(M,)`` counts the clients' training samples, ``models`` are their initial models, stacked. It sees
        the models of ``sources`` only, initial and uploaded, by default of all. Several servers may read one mailbox.
        """
        self.method, self.samples = method, samples
        self.mailbox = Mailbox(len(samples), keeps=method.keeps_uploads) if mailbox is None else mailbox
        self.download = Download()
        self._sources = tuple(range(len(samples)) if sources is None else sources)
        self.state: Params = {}
        if type(method).opening is not Method.opening:  # a mean over all clients, which may be in a file
            known = floating(rows(models, self._sources))
            like = torch.zeros(0, device=next(iter(known.values())).device)
            mean = mix(uniform(len(self._sources), like), known)
            self.state = method.opening({name: own.to(samples.device) for name, own in mean.items()})
        self._place = {client: k for k, client in enumerate(self._sources)}
        self.reports: dict[str, Tensor] = {}  # by sources: (S, S, ...), nan where nothing was reported

    def take_reports(self, clients: Sequence[int], received: Sequence[int], reports: Mapping[str, Tensor]) -> None:
        """Takes what clients report of the models they ``received``, in place of their earlier reports.

        ``reports`` by name are ``(len(clients), len(received), ...)``.
        """
        count = len(self._sources)
        where = torch.tensor([self._place[m] for m in clients], dtype=torch.int64)
        columns = torch.tensor([self._place[m] for m in received], dtype=torch.int64)
        for name, values in reports.items():
            nothing = torch.full((count, count, *values.shape[2:]), torch.nan)
            full = self.reports.get(name, nothing).clone()  # a checkpoint may hold the earlier tensor
            full[where] = torch.nan
            full[where[:, None], columns] = values.to("cpu", torch.float32)
            self.reports[name] = full

    def combine(self, round: int) -> Download:
        """What its clients receive after this round; the same as last time if nothing usable arrived."""
        oldest, sent = 1 if self.method.keeps_uploads else round, self.mailbox.sent
        clients = [client for client in self._sources if sent[client] >= oldest]
        if clients:
            ages = torch.tensor([round - sent[client] for client in clients], device=self.samples.device)
            where = [self._place[client] for client in clients]
            reports = {name: full[where][:, where] for name, full in self.reports.items()}
            latest, samples = self.mailbox.of(clients), self.samples[clients]
            uploads = Uploads(latest, tuple(clients), samples, ages, round, reports)
            self.download, self.state = self.method.combine(uploads, self.state)
        return self.download

    def tensors(self) -> Params:
        """All that it keeps from round to round except the uploads."""
        received = prefixed("shared/", self.download.shared) | prefixed("personal/", self.download.personal)
        return prefixed("state/", self.state) | received | prefixed(REPORTS, self.reports)

    def restore(self, tensors: Params, clients: Sequence[int]) -> None:
        """Takes back what `tensors` returned; ``clients`` are those of the download."""
        self.state, self.reports = unprefixed("state/", tensors), unprefixed(REPORTS, tensors)
        self.download = Download(unprefixed("shared/", tensors), unprefixed("personal/", tensors), tuple(clients))


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
        self.mailbox = Mailbox(len(names), settings.norm_bound, context.method.keeps_uploads)
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
        tensors = prefixed("mailbox/", self.mailbox.uploads if self.mailbox.keeps else {})
        for s, server in enumerate(self.servers):
            tensors |= prefixed(f"server{s}/", server.tensors())
        downloads = [server.download.clients for server in self.servers]
        sent = {"sent": list(self.mailbox.sent), "norms": list(self.mailbox.norms)}
        return tensors, {**sent, "downloads": downloads, "patience": self._patience}

    def restore(self, tensors: Params, values: Mapping[str, Any]) -> None:
        """Takes back what `state` returned."""
        self.mailbox.sent, self.mailbox.norms = list(values["sent"]), list(values["norms"])
        if self.mailbox.keeps:
            self.mailbox.uploads = unprefixed("mailbox/", tensors)
        for s, (server, clients) in enumerate(zip(self.servers, values["downloads"], strict=True)):
            server.restore(unprefixed(f"server{s}/", tensors), clients)
        best, waited = values["patience"]
        self._patience = best, waited
