"""The clients of all seeds in parts that can be stacked and fit into memory, and their results put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from fedc2i.engine.executors.base import ClientBatch, Received, Trained

Piece = TypeVar("Piece", Trained, Received)


def in_parts(
    turns: Sequence[ClientBatch], at_once: int, compute: Callable[[list[ClientBatch]], list[Piece]]
) -> list[Piece]:
    """The results of ``turns`` in their order, no more than ``at_once`` clients computed at a time.

    Args:
        turns: whose turn it is, seed by seed; every seed has at least one client.
        at_once: at least 1.
        compute: the results of seeds with equally many clients and downloads of the same shapes.
    """
    pieces: list[list[Piece]] = [[] for _ in turns]
    for numbers, part in _parts(turns, at_once):
        for number, result in zip(numbers, compute(part), strict=True):
            pieces[number].append(result)
    return [_join(own) for own in pieces]


def _parts(turns: Sequence[ClientBatch], at_once: int) -> Iterator[tuple[list[int], list[ClientBatch]]]:
    """Seeds that fit together, with their numbers among ``turns``; whole seeds while they fit, else some clients."""
    groups: dict[Any, list[int]] = {}
    for number, turn in enumerate(turns):
        tensors = {**turn.download.shared, **turn.download.personal}
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        draws = turn.recipe.seed if turn.recipe.model.has_dropout else None  # masks must be the seed's own
        groups.setdefault((len(turn.clients), shapes, draws), []).append(number)
    for (clients, _, _), numbers in groups.items():
        seeds = max(1, at_once // clients)
        for low in range(0, len(numbers), seeds):
            some = numbers[low : low + seeds]
            for first in range(0, clients, at_once):
                yield some, [_slice(turns[number], first, min(first + at_once, clients)) for number in some]


def _slice(turn: ClientBatch, low: int, high: int) -> ClientBatch:
    """Some of the clients."""
    params = {name: tensor[low:high] for name, tensor in turn.params.items()}
    return replace(turn, clients=turn.clients[low:high], params=params)


def _join(pieces: list[Piece]) -> Piece:
    """The result of a turn that was computed in pieces."""
    if len(pieces) == 1:
        return pieces[0]

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [own for value in values for own in value]
        return {name: torch.cat([value[name] for value in values]) for name in values[0]}

    parts = {part.name: joined([getattr(own, part.name) for own in pieces]) for part in fields(pieces[0])}
    return type(pieces[0])(**parts)
