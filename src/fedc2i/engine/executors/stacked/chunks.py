"""The clients of all seeds in chunks that can be stacked and fit into memory, and their results joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained

Result = TypeVar("Result", Trained, Personalised)
Compute = Callable[[list[ClientBatch]], list[Result]]


def in_chunks(batches: Sequence[ClientBatch], at_once: int, compute: Compute[Result]) -> list[Result]:
    """The results of ``batches`` in their order, at most ``at_once`` clients computed at a time.

    Args:
        batches: each with at least one client.
        at_once: at least 1.
        compute: the results of batches with equally many clients and downloads of the same shapes.
    """
    pieces: list[list[Result]] = [[] for _ in batches]
    for numbers, chunk in _chunks(batches, at_once):
        for number, result in zip(numbers, compute(chunk), strict=True):
            pieces[number].append(result)
    return [_join(own) for own in pieces]


def _chunks(batches: Sequence[ClientBatch], at_once: int) -> Iterator[tuple[list[int], list[ClientBatch]]]:
    """Batches that can be stacked, with their numbers; whole batches while they fit, else some of the clients."""
    groups: dict[Any, list[int]] = {}
    for number, batch in enumerate(batches):
        tensors = {**batch.download.shared, **batch.download.personal}
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        draws = batch.context.seed if batch.context.model.has_dropout else None  # masks must be the seed's own
        groups.setdefault((len(batch.clients), shapes, draws), []).append(number)
    for (clients, _, _), numbers in groups.items():
        count = max(1, at_once // clients)
        for low in range(0, len(numbers), count):
            some = numbers[low : low + count]
            for first in range(0, clients, at_once):
                yield some, [_slice(batches[number], first, min(first + at_once, clients)) for number in some]


def _slice(batch: ClientBatch, low: int, high: int) -> ClientBatch:
    params = {name: tensor[low:high] for name, tensor in batch.params.items()}
    return replace(batch, clients=batch.clients[low:high], params=params)


def _join(pieces: list[Result]) -> Result:
    """The result of a batch that was computed in pieces."""
    if len(pieces) == 1:
        return pieces[0]

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [own for value in values for own in value]
        return {name: torch.cat([value[name] for value in values]) for name in values[0]}

    parts = {part.name: joined([getattr(own, part.name) for own in pieces]) for part in fields(pieces[0])}
    return type(pieces[0])(**parts)
