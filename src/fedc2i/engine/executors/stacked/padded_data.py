"""All clients' data as stacks, and what is drawn from it: the batches of local runs, the samples of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedc2i.engine.attacks import Attackers, flips_labels
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked.steps import Steps, plan_steps
from fedc2i.methods.base import Phase
from fedc2i.training.local import Batch, pad

_Drawn = list[tuple[Phase, Steps]]


class Stacks:
    """Data of M clients on one device; answers are for the K clients of S seeds whose turn it is, ``(S, K, ...)``."""

    def __init__(self, data: Sequence[ClientData], attackers: Sequence[Attackers] = ()) -> None:
        """Clients that some seed's attackers are, and that turn their labels, are there a second time, turned."""
        self._data = data
        turned = [m for m, own in enumerate(data) if any(flips_labels(one, own.name) for one in attackers)]
        self._turned = {m: len(data) + k for k, m in enumerate(turned)}
        rows = [*data, *(data[m].with_flipped_labels() for m in turned)]
        self._device = data[0].counts.device
        self._most = max(own.samples for own in data)
        self._counts = torch.stack([own.counts for own in rows])
        self._ahead: dict[Any, _Drawn] = {}
        self.train = pad([own.train for own in rows])  # x (M, N, 3, H, W)
        self.validation = pad([own.validation for own in rows])

    def whose(self, part: Sequence[ClientBatch]) -> Tensor:
        """Which rows are the clients'."""
        return torch.tensor([[self._row(turn.recipe, m) for m in turn.clients] for turn in part], device=self._device)

    def _row(self, recipe: RunContext, client: int) -> int:
        turns = bool(recipe.attacks) and flips_labels(recipe.attacks, self._data[client].name)
        return self._turned[client] if turns else client

    def counts(self, part: Sequence[ClientBatch]) -> Tensor:
        """Training samples of each class."""
        return self._counts[self.whose(part)]

    def training_sets(self, part: Sequence[ClientBatch]) -> Batch:
        """All training samples of each."""
        return Batch(*(own[self.whose(part)] for own in self.train))

    def steps(self, part: Sequence[ClientBatch]) -> _Drawn:
        """The batches of the round's local runs, phase by phase; a phase without epochs is left out."""
        return self._ahead.pop(_who(part)) if _who(part) in self._ahead else self._draw(part)

    def draw_ahead(self, part: Sequence[ClientBatch]) -> None:
        """Draws what the next round will need, if everyone takes part in it, and it comes."""
        whole = all(len(turn.clients) == len(self._data) for turn in part)
        if not whole or part[0].round == part[0].recipe.rounds:
            return
        following = [replace(turn, round=turn.round + 1) for turn in part]
        self._ahead = {_who(following): self._draw(following)}

    def _draw(self, part: Sequence[ClientBatch]) -> _Drawn:
        training = part[0].recipe.training
        size, most = min(self._most, training.batch_size), training.batches(self._most)
        epochs = [[turn.recipe.epochs(self._data[m], turn.round) for m in turn.clients] for turn in part]
        shares = [[turn.recipe.run_phases(own) for own in seed] for turn, seed in zip(part, epochs, strict=True)]
        drawn = []
        for number, (phase, taken) in enumerate(shares[0][0]):
            batches = [[[i for epoch in own[number][1] for i in epoch] for own in seed] for seed in shares]
            if taken:
                drawn.append((phase, plan_steps(batches, len(taken) * most, size)))
        return drawn

    def probes(self, part: Sequence[ClientBatch]) -> Batch | None:
        """The samples that `Method.personalise` sees, padded to the most that a client has."""
        drawn = [turn.recipe.draw_probe(self._data[m], turn.round) for turn in part for m in turn.clients]
        probes = [probe for probe in drawn if probe is not None]
        if not probes:
            return None
        shape, whose = (len(part), len(part[0].clients), -1), self.whose(part)[..., None]
        index = pad_sequence([order for _, order in probes], batch_first=True).reshape(shape).to(self._device)
        weight = pad_sequence([torch.ones(len(order)) for _, order in probes], batch_first=True).reshape(shape)
        held_out = torch.tensor([split == "validation" for split, _ in probes], device=self._device).reshape(shape)

        def take(from_train: Tensor, from_validation: Tensor) -> Tensor:
            if not from_validation.shape[1]:
                return from_train[whose, index]
            both = (own[whose, index.clamp(max=own.shape[1] - 1)] for own in (from_train, from_validation))
            train, validation = both
            return torch.where(held_out.reshape(*held_out.shape, *[1] * (train.ndim - 3)), validation, train)

        x, y = take(self.train.x, self.validation.x), take(self.train.y, self.validation.y)
        return Batch(x, y, weight.to(self._device))


def _who(part: Sequence[ClientBatch]) -> tuple[Any, ...]:
    """Whose turn it is, and when."""
    return tuple((turn.recipe.seed, turn.round, turn.clients) for turn in part)
