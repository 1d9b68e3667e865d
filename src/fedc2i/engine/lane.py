"""One seed's way through the rounds: its server, its clients' models, who takes part next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedc2i import seeding
from fedc2i.engine.client import Recipe
from fedc2i.engine.executor import Received, Trained, Turn
from fedc2i.engine.rounds import Metrics, Outcome, Point, Round
from fedc2i.engine.server import Server
from fedc2i.engine.settings import Settings
from fedc2i.methods.base import Download
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
        self._server = Server(recipe.method, samples, self._own)
        self._chosen = self._choose(1)
        self._audience = self._everyone
        self._starts = rows(self._own, self._chosen)
        self._received: Stacked = self._own
        self._patience = _Patience(settings.patience)
        self._last: Round | None = None
        self._metrics: dict[Point, Metrics] = {}
        self._refused: list[int] = []
        self._bytes_up = 0

    def to_train(self, number: int) -> Turn:
        """The local runs of a round."""
        return Turn(self.recipe, self._chosen, self._starts, self._server.download, number)

    def sitting_out(self, number: int) -> Turn:
        """The clients that do not train in this round, perhaps none, with the models they have."""
        others = tuple(m for m in self._everyone if m not in set(self._chosen))
        return Turn(self.recipe, others, rows(self._own, others), self._server.download, number)

    def collect(self, trained: Trained, others: Metrics, number: int, due: bool) -> None:
        """Takes the local runs in: clients keep their models, the server combines the uploads."""
        self._own = replace_rows(self._own, self._chosen, trained.params)
        self._metrics = {}
        if due:
            scored = dict(zip(self._chosen, trained.metrics, strict=True))
            scored |= dict(zip((m for m in self._everyone if m not in scored), others, strict=True))
            self._metrics["trained"] = [scored[m] for m in self._everyone]
        self._bytes_up = size_in_bytes(row(trained.uploads, 0))
        self._refused = self._server.receive(self._chosen, trained.uploads, number)
        self._server.combine(number)

    def to_personalise(self, number: int, due: bool) -> Turn:
        """What the exchange brings to those who need it: everyone when scored, else who trains next."""
        self._audience = self._everyone if due else self._choose(number + 1)
        return Turn(self.recipe, self._audience, rows(self._own, self._audience), self._server.download, number)

    def finish(self, received: Received, number: int, due: bool, seconds: float) -> Round:
        """Ends the round: who takes part in the next one, from which start, and the round's report."""
        if due:
            self._metrics["received"] = received.metrics
        download = self._server.download
        self._last = Round(
            self.recipe.seed,
            number,
            seconds,
            tuple(self._names[m] for m in self._chosen),
            self._metrics,
            _spread(received.report, self._audience, download, len(self._names)),
            tuple(self._names[m] for m in self._refused),
            bytes_up=self._bytes_up,
            bytes_down=size_in_bytes(download.to(self._chosen[0])),
        )
        self._received = received.params
        self._chosen = self._choose(number + 1)
        self._starts = rows(received.params, [self._audience.index(m) for m in self._chosen])
        return self._last

    def is_over(self, due: bool) -> bool:
        """Whether validation accuracy has stopped rising."""
        assert self._last is not None
        return due and self._patience.is_over(self._last, self.recipe.method.headline)

    def outcome(self) -> Outcome:
        """The last models; to be asked after a round that was scored, when everyone has received."""
        assert self._last is not None
        return Outcome(self._own, self._received, self._last)

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


def _spread(
    report: Mapping[str, Tensor], audience: Sequence[int], download: Download, clients: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all clients, nan elsewhere.

    ``(M, M, ...)`` for what a client says of each client it received, ``(M, ...)`` for what it says of itself.
    """
    full = {}
    for name, values in report.items():
        of_others = values.ndim > 1 and values.shape[1] == len(download.clients)
        shape = (clients, clients, *values.shape[2:]) if of_others else (clients, *values.shape[1:])
        array = np.full(shape, np.nan, dtype=np.float32)
        where = np.ix_(audience, download.clients) if of_others else list(audience)
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
