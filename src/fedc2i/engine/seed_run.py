"""One seed's way through the rounds: its server, its clients' models, who takes part next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedc2i.core.params import Params, Stacked, prefixed, replace_rows, row, rows, size_in_bytes, unprefixed
from fedc2i.engine import state_check, topology
from fedc2i.engine.client import RunContext
from fedc2i.engine.diagnostics import Told, spread
from fedc2i.engine.executors.base import ClientBatch, Received, Trained
from fedc2i.engine.participation import Patience, choose
from fedc2i.engine.records import Metrics, Outcome, Point, Round
from fedc2i.engine.server import REPORTS, Mailbox, Server
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.upload import leave


class SeedRun:
    """All that changes from round to round with one seed."""

    def __init__(
        self, recipe: RunContext, settings: EngineSettings, names: Sequence[str], samples: Tensor, device: torch.device
    ) -> None:
        """Draws the first models and the first participants."""
        self.recipe = recipe
        self._settings = settings
        self._names = names
        self._device = device
        self._everyone = tuple(range(len(names)))
        self._own = self._first_models(device)
        circles = topology.parse(settings.topology, names, recipe.seed).circles()
        self._circle = {client: c for c, circle in enumerate(circles) for client in circle.members}
        self._mailbox = Mailbox(len(names), settings.norm_bound)
        self._servers = [Server(recipe.method, samples, self._own, one.sources, self._mailbox) for one in circles]
        self._chosen = self._choose(1)
        self._audience = self._everyone
        self._starts = rows(self._own, self._chosen)
        self._received: Stacked = self._own
        self._patience = Patience(settings.patience)
        self._last: Round | None = None
        self._metrics: dict[Point, Metrics] = {}
        self._refused: dict[int, str] = {}
        self._bytes_up = self._bytes_told = 0

    def to_train(self, number: int) -> list[ClientBatch]:
        """The local runs of a round: a turn for each circle of clients that received the same."""
        return self._turns(self._chosen, self._starts, number)

    def sitting_out(self, number: int) -> list[ClientBatch]:
        """The clients that do not train in this round, perhaps none, with the models they have."""
        others = self._others()
        return self._turns(others, rows(self._own, others), number)

    def collect(self, trained: Sequence[Trained], others: Sequence[Metrics], number: int, due: bool) -> None:
        """Takes the local runs in: clients keep their models, servers combine the uploads that are for their circle."""
        self._own = replace_rows(self._own, self._chosen, self._joined([own.params for own in trained], self._chosen))
        self._metrics = {}
        if due:
            scored = self._scored([own.metrics for own in trained], self._chosen)
            scored |= self._scored(others, self._others())
            self._metrics["trained"] = [scored[m] for m in self._everyone]
        uploads = self._joined([own.uploads for own in trained], self._chosen)
        sent_by = [self._names[m] for m in self._chosen]
        uploads = leave(uploads, self._starts, sent_by, number, self.recipe, self._settings, self._had_received)
        self._bytes_up = size_in_bytes(row(uploads, 0)) + self._bytes_told
        self._refused = self._mailbox.receive(self._chosen, uploads, number)
        for server in self._servers:
            server.combine(number)

    def to_personalise(self, number: int, due: bool) -> list[ClientBatch]:
        """What the exchange brings to those who need it: everyone when scored, else who trains next."""
        self._audience = self._everyone if due else self._choose(number + 1)
        return self._turns(self._audience, rows(self._own, self._audience), number)

    def finish(self, received: Sequence[Received], number: int, due: bool, seconds: float) -> Round:
        """Ends the round: who takes part in the next one, from which start, and the round's report."""
        if due:
            scored = self._scored([own.metrics for own in received], self._audience)
            self._metrics["received"] = [scored[m] for m in self._audience]
        told = [
            Told(own.report, clients, server.download.clients)
            for own, (server, clients) in zip(received, self._shares(self._audience), strict=True)
        ]
        self._last = Round(
            self.recipe.seed,
            number,
            seconds,
            tuple(self._names[m] for m in self._chosen),
            self._metrics,
            spread(told, len(self._names), number == self._settings.rounds),
            tuple(self._names[m] for m in self._refused),
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down(),
            why={self._names[m]: why for m, why in self._refused.items()},
        )
        self._received = self._joined([own.params for own in received], self._audience)
        self._chosen = self._choose(number + 1)
        self._starts = rows(self._received, [self._audience.index(m) for m in self._chosen])
        self._pass_on(told)
        return self._last

    def is_over(self, due: bool) -> bool:
        """Whether validation accuracy has stopped rising."""
        assert self._last is not None
        return due and self._patience.is_over(self._last, self.recipe.method.headline)

    def outcome(self) -> Outcome:
        """The last models; to be asked after a round that was scored, when everyone has received."""
        assert self._last is not None
        return Outcome(self._own, self._received, self._last)

    # Between two rounds: all that is needed to go on, as one flat mapping of tensors and plain values.

    def state(self) -> tuple[Params, dict[str, Any]]:
        """What `restore` takes; to be asked behind a round."""
        tensors = prefixed("own/", self._own) | prefixed("received/", self._received)
        tensors |= prefixed("mailbox/", self._mailbox.uploads)
        for s, server in enumerate(self._servers):
            tensors |= prefixed(f"server{s}/", server.tensors())
        values = {
            "sent": self._mailbox.sent,
            "audience": self._audience,
            "downloads": [server.download.clients for server in self._servers],
            "patience": self._patience.state,
            "bytes_told": self._bytes_told,
            "layout": state_check.layout(tensors),
            "on_cpu": [name for name, tensor in tensors.items() if self._stays_on_cpu(name, tensor)],
        }
        return tensors, values

    def check(self, tensors: Params, values: Any, number: int) -> None:
        """Refuses a state that is not one of this run.

        Raises:
            UserError: if it is of another model or of other clients, or damaged; see `state_check.check`.
        """
        state_check.check(self.recipe, self._settings, self._names, tensors, values, number)

    def restore(self, tensors: Params, values: Mapping[str, Any], number: int) -> None:
        """Goes on behind round ``number`` with the state after it, which `check` has let through."""
        on_cpu = set(values["on_cpu"])
        moved = {id(own): own.to(self._device) for own in tensors.values()}  # one of many names stays one
        tensors = {name: own if name in on_cpu else moved[id(own)] for name, own in tensors.items()}
        self._own = unprefixed("own/", tensors)
        self._received = unprefixed("received/", tensors)
        self._mailbox.restore(unprefixed("mailbox/", tensors), values["sent"])
        for s, (server, clients) in enumerate(zip(self._servers, values["downloads"], strict=True)):
            server.restore(unprefixed(f"server{s}/", tensors), clients)
        self._audience = tuple(values["audience"])
        best, waited = values["patience"]
        self._patience.state = best, waited
        self._bytes_told = values["bytes_told"]
        self._chosen = self._choose(number + 1)
        self._starts = rows(self._received, [self._audience.index(m) for m in self._chosen])

    def _stays_on_cpu(self, name: str, tensor: Tensor) -> bool:
        """Whether it lies there for its own reasons, not because everything does."""
        return tensor.device.type == "cpu" and (self._device.type != "cpu" or f"/{REPORTS}" in name)

    # Clients by the circle they receive in; where that is one for all, its results are passed on as they are.

    def _shares(self, clients: Sequence[int]) -> list[tuple[Server, tuple[int, ...]]]:
        """The circles that some of ``clients`` are in: their server, and which."""
        members: dict[int, list[int]] = {}
        for client in clients:
            members.setdefault(self._circle[client], []).append(client)
        return [(self._servers[c], tuple(own)) for c, own in members.items()]

    def _turns(self, clients: Sequence[int], params: Stacked, number: int) -> list[ClientBatch]:
        """The turns of ``clients``, whose models are ``params``."""
        place = {client: k for k, client in enumerate(clients)}
        return [
            ClientBatch(self.recipe, own, rows(params, [place[m] for m in own]), server.download, number)
            for server, own in self._shares(clients)
        ]

    def _joined(self, results: Sequence[Stacked], clients: Sequence[int]) -> Stacked:
        """Results of the turns of ``clients``, stacked in the order of ``clients``."""
        if len(results) == 1:
            return results[0]
        place = {client: k for k, client in enumerate(m for _, own in self._shares(clients) for m in own)}
        joined = {name: torch.cat([own[name] for own in results]) for name in results[0]}
        return rows(joined, [place[m] for m in clients])

    def _scored(self, metrics: Sequence[Metrics], clients: Sequence[int]) -> dict[int, dict[str, float]]:
        """Metrics of the turns of ``clients``, by client; none if there were no turns."""
        order = [m for _, own in self._shares(clients) for m in own]
        return dict(zip(order, (own for turn in metrics for own in turn), strict=True))

    def _pass_on(self, told: Sequence[Told]) -> None:
        """Servers hear what their method reads of the diagnostics, from those who train next: the others send nothing.

        What it takes counts as part of the next upload, with which it would travel.
        """
        names, size = self.recipe.method.reads_reports, 0
        for one, (server, clients) in zip(told, self._shares(self._audience), strict=True):
            some = [k for k, client in enumerate(clients) if names and client in self._chosen]
            reports = {name: one.report[name][some] for name in names if some and name in one.report}
            server.hear([clients[k] for k in some], one.received, reports)
            size += size_in_bytes(reports)
        self._bytes_told = size // len(self._chosen)

    def _bytes_down(self) -> int:
        """What a client that trained received, on average: with a topology not all receive equally much."""
        sizes = [(size_in_bytes(server.download.to(own[0])), len(own)) for server, own in self._shares(self._chosen)]
        return sum(size * clients for size, clients in sizes) // len(self._chosen)

    def _had_received(self, k: int) -> Params:
        """What the k-th client that trains had received before this round."""
        client = self._chosen[k]
        return self._servers[self._circle[client]].download.to(client)

    def _others(self) -> tuple[int, ...]:
        """Who does not train in this round."""
        trains = set(self._chosen)
        return tuple(m for m in self._everyone if m not in trains)

    def _first_models(self, device: torch.device) -> Stacked:
        first = self.recipe.first_models(self._names, self._settings.init)
        return {name: tensor.to(device) for name, tensor in first.items()}

    def _choose(self, number: int) -> tuple[int, ...]:
        """Who takes part in a round, in table order."""
        return choose(self.recipe.seed, self._settings, len(self._names), number)
