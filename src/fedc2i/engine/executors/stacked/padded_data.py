"""All clients' data padded to one length, and what is drawn from it: batches of local training, samples of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch
from fedc2i.methods.base import Phase
from fedc2i.training.local import Batch


def pad(sets: Sequence[Batch]) -> Batch:
    """K batches of unequal length to one with a client axis; padding has weight 0."""
    return Batch(*(pad_sequence(list(parts), batch_first=True) for parts in zip(*sets, strict=True)))


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the CPU on the device; does not wait for what the device computes."""
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Steps:
    """The batches of a local run: indices ``(T, S, K, B)``, their weights, and how many steps each client takes."""

    index: Tensor
    weight: Tensor
    count: Tensor  # (S, K)

    def shares(self) -> Tensor:
        """``(T, S, K)`` what an iterate counts in the running mean over the second half of its client's steps.

        All up to that half's first, which the mean starts with, then 1/2, 1/3, ... as in `training.train`.
        """
        number = torch.arange(1, len(self.index) + 1)[:, None, None]
        return 1 / (number - self.count // 2).clamp(min=1).to(torch.float64)


def plan_steps(batches: Sequence[Sequence[Sequence[Tensor]]], steps: int, size: int) -> Steps:
    """From every client's batches, ``batches[s][k]`` a list of index tensors, padded to ``steps`` and ``size``."""
    seeds, clients = len(batches), len(batches[0])
    index = torch.zeros(seeds, clients, steps, size, dtype=torch.int64)
    weight = torch.zeros(seeds, clients, steps, size)
    count = torch.tensor([[len(own) for own in seed] for seed in batches])
    for s, seed in enumerate(batches):
        for k, own in enumerate(seed):
            taken = torch.arange(size) < torch.tensor([len(batch) for batch in own])[:, None]
            index[s, k, : len(own)][taken] = torch.cat(list(own))
            weight[s, k, : len(own)] = taken.to(weight.dtype)
    return Steps(index.movedim(2, 0), weight.movedim(2, 0), count)


_Drawn = list[tuple[Phase, Steps]]


class PaddedData:
    """Data of M clients on one device; results are for the K clients of S seeds in a chunk, ``(S, K, ...)``."""

    def __init__(self, data: Sequence[ClientData], contexts: Sequence[RunContext] = ()) -> None:
        """Clients that flip their labels with some seed have a second row, with flipped labels."""
        self._data = data
        flipped = [m for m, own in enumerate(data) if any(one.flips_labels(own.name) for one in contexts)]
        self._flipped = {m: len(data) + k for k, m in enumerate(flipped)}
        rows = [*data, *(data[m].with_flipped_labels() for m in flipped)]
        self._device = data[0].counts.device
        self._most = max(own.samples for own in data)
        self._counts = torch.stack([own.counts for own in rows])
        self._ahead: dict[Any, _Drawn] = {}
        self.train = pad([own.train for own in rows])  # x (M, N, 3, H, W)
        self.validation = pad([own.validation for own in rows])

    def rows(self, chunk: Sequence[ClientBatch]) -> Tensor:
        """Which rows are the clients'."""

        def one(context: RunContext, client: int) -> int:
            return self._flipped[client] if context.flips_labels(self._data[client].name) else client

        rows = torch.tensor([[one(batch.context, m) for m in batch.clients] for batch in chunk])
        return moved(rows, self._device)

    def counts(self, chunk: Sequence[ClientBatch]) -> Tensor:
        """Training samples of each class."""
        return self._counts[self.rows(chunk)]

    def training_sets(self, rows: Tensor) -> Batch:
        """All training samples of each client."""
        return Batch(*(own[rows] for own in self.train))

    def steps(self, chunk: Sequence[ClientBatch]) -> _Drawn:
        """The batches of the round's local training, phase by phase; a phase without epochs is skipped."""
        return self._ahead.pop(_key(chunk)) if _key(chunk) in self._ahead else self._draw(chunk)

    def draw_ahead(self, chunk: Sequence[ClientBatch]) -> None:
        """Draws what the next round will need, if there is one and everyone takes part in it."""
        whole = all(len(batch.clients) == len(self._data) for batch in chunk)
        if not whole or chunk[0].round == chunk[0].context.rounds:
            return
        following = [replace(batch, round=batch.round + 1) for batch in chunk]
        self._ahead = {_key(following): self._draw(following)}

    def _draw(self, chunk: Sequence[ClientBatch]) -> _Drawn:
        training = chunk[0].context.training
        size, most = min(self._most, training.batch_size), training.batches(self._most)
        epochs = [[batch.context.epochs(self._data[m], batch.round) for m in batch.clients] for batch in chunk]
        shares = [[batch.context.run_phases(own) for own in seed] for batch, seed in zip(chunk, epochs, strict=True)]
        drawn = []
        for number, (phase, taken) in enumerate(shares[0][0]):
            batches = [[[i for epoch in own[number][1] for i in epoch] for own in seed] for seed in shares]
            if taken:
                drawn.append((phase, plan_steps(batches, len(taken) * most, size)))
        return drawn

    def probes(self, chunk: Sequence[ClientBatch]) -> Batch | None:
        """The samples that `Method.personalise` sees, padded to the most that a client has."""
        drawn = [batch.context.draw_probe(self._data[m], batch.round) for batch in chunk for m in batch.clients]
        return self._take(chunk, [probe for probe in drawn if probe is not None])

    def held_out(self, chunk: Sequence[ClientBatch]) -> Batch | None:
        """The samples for `Site.held_out`, padded likewise."""
        drawn = [batch.context.draw_held_out(self._data[m], batch.round) for batch in chunk for m in batch.clients]
        held = [own for own in drawn if own is not None]
        samples = self._take(chunk, [(own.split, own.rows) for own in held])
        if samples is None:
            return None
        unseen = moved(torch.tensor([own.unseen for own in held]), self._device).reshape(*samples.w.shape[:2], 1)
        return samples._replace(w=samples.w * unseen)

    def _take(self, chunk: Sequence[ClientBatch], probes: Sequence[tuple[str, Tensor]]) -> Batch | None:
        """For each client of each seed the samples at some indices of a split; none if there are no indices."""
        if not probes:
            return None
        shape, rows = (len(chunk), len(chunk[0].clients), -1), self.rows(chunk)[..., None]
        index = moved(pad_sequence([order for _, order in probes], batch_first=True).reshape(shape), self._device)
        weight = pad_sequence([torch.ones(len(order)) for _, order in probes], batch_first=True).reshape(shape)
        held_out = moved(torch.tensor([split == "validation" for split, _ in probes]), self._device).reshape(shape)

        def take(from_train: Tensor, from_validation: Tensor) -> Tensor:
            if not from_validation.shape[1]:
                return from_train[rows, index]
            both = (own[rows, index.clamp(max=own.shape[1] - 1)] for own in (from_train, from_validation))
            train, validation = both
            return torch.where(held_out.reshape(*held_out.shape, *[1] * (train.ndim - 3)), validation, train)

        x, y = take(self.train.x, self.validation.x), take(self.train.y, self.validation.y)
        return Batch(x, y, moved(weight, self._device))


def _key(chunk: Sequence[ClientBatch]) -> tuple[Any, ...]:
    return tuple((batch.context.seed, batch.round, batch.clients) for batch in chunk)
