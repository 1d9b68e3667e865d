"""Who takes part in a round, and when a run stops before its last round."""

from __future__ import annotations

import torch

from fedc2i.core import seeding
from fedc2i.engine.records import Point, Round
from fedc2i.engine.settings import EngineSettings


def choose(seed: int, settings: EngineSettings, clients: int, number: int) -> tuple[int, ...]:
    """Who trains in a round, in table order."""
    count = settings.participants(clients)
    if count == clients:
        return tuple(range(clients))
    draw = torch.randperm(clients, generator=seeding.generator(seed, number, "participants"))
    return tuple(sorted(draw[:count].tolist()))


def audience(seed: int, settings: EngineSettings, clients: int, number: int) -> tuple[int, ...]:
    """Who needs what a round's exchange brought: everyone for an evaluation, else who trains in the next round."""
    return tuple(range(clients)) if settings.is_due(number) else choose(seed, settings, clients, number + 1)


class EarlyStopping:
    """Stops on mean validation accuracy; never on test data."""

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.state: tuple[float, int] = -float("inf"), 0  # the best score, and evaluations since then

    def should_stop(self, last: Round, point: Point) -> bool:
        """Whether the accuracy has not risen for long enough; to be asked once for every evaluated round."""
        if not self._patience:
            return False
        score, (best, waited) = last.mean(point, "validation_accuracy"), self.state
        self.state = max(best, score), 0 if score > best else waited + 1
        return self.state[1] >= self._patience
