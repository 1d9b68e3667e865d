"""CUDA graphs of a round's work, kept from round to round for tensors of the same shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from fedc2i.engine.executors.base import ClientBatch
from fedc2i.engine.executors.stacked.stepper import GraphedFunction

_Made = TypeVar("_Made")
Kind = tuple[Any, ...]  # names a piece of a round's work


class _Cached(NamedTuple):
    """Something with a CUDA graph, the round it is for (0: any), and the round it was last used in."""

    work: Any
    round: int
    used: int


@dataclass
class _Uses:
    """A function, since the round of its first use; from the next use on as a CUDA graph."""

    since: int
    graphed: GraphedFunction | None = None


class GraphCache:
    """What was made for kinds of work and shapes.

    Attributes:
        reads_round: the kinds of work that depend on the round's number: what is made for them serves one round.
    """

    def __init__(self, device: torch.device) -> None:
        self.reads_round: set[Kind] = set()
        self._device = device
        self._cache: dict[Any, _Cached] = {}

    def clear(self) -> None:
        """Releases the CUDA graphs and their memory."""
        self._cache.clear()

    def graphed(
        self, first: ClientBatch, kind: Kind, tensors: Mapping[str, Any], function: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The function; from the second round that needs it for these shapes, on a GPU, as a CUDA graph.

        A capture takes longer than a few calls. It does not pay for one round: for the uploads of the first, that have
        received nothing, or for the last, the only one that is evaluated in many runs.
        """
        uses = self.cached(first, kind, tensors, lambda: _Uses(first.round))
        if uses.graphed is None and first.round in (uses.since, first.context.rounds):
            return function
        uses.graphed = uses.graphed or GraphedFunction(function, self._device)
        return uses.graphed

    def cached(self, first: ClientBatch, kind: Kind, tensors: Mapping[str, Any], make: Callable[[], _Made]) -> _Made:
        """What was made for this kind of work and these shapes; made again where the round's number matters.

        What was not used in this round or the last is dropped when something new is made: every CUDA graph reserves
        the memory it needs.
        """
        shapes = tuple(tuple(leaf.shape) for leaf in tree_leaves(tensors))
        number = first.round if kind in self.reads_round else 0
        key = (kind, *tensors["received"], shapes)
        before = self._cache.get(key)
        if before is None:  # a server that comes to know more clients sends other shapes every round
            self._cache = {key: cached for key, cached in self._cache.items() if cached.used >= first.round - 1}
        made: _Made = make() if before is None or before.round != number else before.work
        self._cache[key] = _Cached(made, number, first.round)
        return made
