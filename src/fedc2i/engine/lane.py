"""One seed's way through the rounds: its server, its clients' models, who takes part next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedc2i import seeding
from fedc2i.engine import topology
from fedc2i.engine.client import Recipe
from fedc2i.engine.executor import Received, Trained, Turn
from fedc2i.engine.rounds import Metrics, Outcome, Point, Round
from fedc2i.engine.server import Mailbox, Server
from fedc2i.engine.settings import Settings
from fedc2i.params import Stacked, replace_rows, row, rows, size_in_bytes, stack


class Lane:
    """All that changes from round to round with one seed."""

    def __init__(
        self, recipe: Recipe, settings: Settings, names: Sequence[str], samples: Tensor, device: torch.device
    ) -> None:
        """Draws the first models and the first participants."""
        self.recipe = recipe
        self._settings = settings
        self._names = names
        self._everyone = tuple(range(len(names)))
        self._own = self._first_models(device)
        circles = topology.parse(settings.topology, names, recipe.seed).circles()
        self._circle = {client: c for c, circle in enumerate(circles) for client in circle.members}
        self._mailbox = Mailbox(len(names))
        self._servers = [Server(recipe.method, samples, self._own, one.sources, self._mailbox) for one in circles]
        self._chosen = self._choose(1)
        self._audience = self._everyone
        self._starts = rows(self._own, self._chosen)
        self._received: Stacked = self._own
        self._patience = _Patience(settings.patience)
        self._last: Round | None = None
        self._metrics: dict[Point, Metrics] = {}
        self._refused: list[int] = []
        self._bytes_up = 0

    def to_train(self, number: int) -> list[Turn]:
        """The local runs of a round: a turn for each circle of clients that received the same."""
        return self._turns(self._chosen, self._starts, number)

    def sitting_out(self, number: int) -> list[Turn]:
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
        self._bytes_up = size_in_bytes(row(uploads, 0))
        self._refused = self._mailbox.receive(self._chosen, uploads, number)
        for server in self._servers:
            server.combine(number)

    def to_personalise(self, number: int, due: bool) -> list[Turn]:
        """What the exchange brings to those who need it: everyone when scored, else who trains next."""
        self._audience = self._everyone if due else self._choose(number + 1)
        return self._turns(self._audience, rows(self._own, self._audience), number)

    def finish(self, received: Sequence[Received], number: int, due: bool, seconds: float) -> Round:
        """Ends the round: who takes part in the next one, from which start, and the round's report."""
        if due:
            scored = self._scored([own.metrics for own in received], self._audience)
            self._metrics["received"] = [scored[m] for m in self._audience]
        told = [
            _Told(own.report, clients, server.download.clients)
            for own, (server, clients) in zip(received, self._shares(self._audience), strict=True)
        ]
        self._last = Round(
            self.recipe.seed,
            number,
            seconds,
            tuple(self._names[m] for m in self._chosen),
            self._metrics,
            _spread(told, len(self._names)),
            tuple(self._names[m] for m in self._refused),
            bytes_up=self._bytes_up,
            bytes_down=self._bytes_down(),
        )
        self._received = self._joined([own.params for own in received], self._audience)
        self._chosen = self._choose(number + 1)
        self._starts = rows(self._received, [self._audience.index(m) for m in self._chosen])
        return self._last

    def is_over(self, due: bool) -> bool:
        """Whether validation accuracy has stopped rising."""
        assert self._last is not None
        return due and self._patience.is_over(self._last, self.recipe.method.headline)

    def outcome(self) -> Outcome:
        """The last models; to be asked after a round that was scored, when everyone has received."""
        assert self._last is not None
        return Outcome(self._own, self._received, self._last)

    # Clients by the circle they receive in; where that is one for all, its results are passed on as they are.

    def _shares(self, clients: Sequence[int]) -> list[tuple[Server, tuple[int, ...]]]:
        """The circles that some of ``clients`` are in: their server, and which."""
        members: dict[int, list[int]] = {}
        for client in clients:
            members.setdefault(self._circle[client], []).append(client)
        return [(self._servers[c], tuple(own)) for c, own in members.items()]

    def _turns(self, clients: Sequence[int], params: Stacked, number: int) -> list[Turn]:
        """The turns of ``clients``, whose models are ``params``."""
        place = {client: k for k, client in enumerate(clients)}
        return [
            Turn(self.recipe, own, rows(params, [place[m] for m in own]), server.download, number)
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

    def _bytes_down(self) -> int:
        """What a client that trained received, on average: with a topology not all receive equally much."""
        sizes = [(size_in_bytes(server.download.to(own[0])), len(own)) for server, own in self._shares(self._chosen)]
        return sum(size * clients for size, clients in sizes) // len(self._chosen)

    def _others(self) -> tuple[int, ...]:
        """Who does not train in this round."""
        trains = set(self._chosen)
        return tuple(m for m in self._everyone if m not in trains)

    def _first_models(self, device: torch.device) -> Stacked:
        recipe, apart = self.recipe, self._settings.init == "independent"
        keys: list[tuple[str, ...]] = [(name, "init") if apart else ("init",) for name in self._names]
        drawn = {key: recipe.method.setup(recipe.model.init(recipe.seed, *key), recipe.model) for key in set(keys)}
        return {name: tensor.to(device) for name, tensor in stack([drawn[key] for key in keys]).items()}

    def _choose(self, number: int) -> tuple[int, ...]:
        """Who takes part in a round, in table order."""
        count = self._settings.participants(len(self._names))
        if count == len(self._names):
            return self._everyone
        draw = torch.randperm(len(self._names), generator=seeding.generator(self.recipe.seed, number, "participants"))
        return tuple(sorted(draw[:count].tolist()))


class _Told(NamedTuple):
    """Diagnostics of clients, stacked, and whose models they had received."""

    report: Mapping[str, Tensor]
    clients: tuple[int, ...]
    received: tuple[int, ...]


def _spread(told: Sequence[_Told], clients: int) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all clients, nan elsewhere.

    ``(M, M, ...)`` for what a client says of each client it received, ``(M, ...)`` for what it says of itself.
    """
    full = {}
    for name in dict.fromkeys(name for one in told for name in one.report):
        parts = [(one.report[name], one) for one in told if name in one.report]
        of_others = all(values.ndim > 1 and values.shape[1] == len(one.received) for values, one in parts)
        some = parts[0][0]
        shape = (clients, clients, *some.shape[2:]) if of_others else (clients, *some.shape[1:])
        array = np.full(shape, np.nan, dtype=np.float32)
        for values, one in parts:
            where = np.ix_(one.clients, one.received) if of_others else list(one.clients)
            array[where] = values.to(torch.float32).cpu().numpy()
        full[name] = array
    return full


class _Patience:
    """Early stopping on mean validation accuracy; never on test data."""

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._waited = patience, -float("inf"), 0

    def is_over(self, last: Round, point: Point) -> bool:
        if not self._patience:
            return False
        score = last.mean(point, "validation_accuracy")
        self._waited = 0 if score > self._best else self._waited + 1
        self._best = max(self._best, score)
        return self._waited >= self._patience
