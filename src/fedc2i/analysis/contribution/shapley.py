"""The game of one receiver: its givers are the players, a coalition is worth the receiver's score among it.

The receiver is in every coalition. v({r}) is its score alone, v(N) its score with everyone. Every measure of a giver is
a weighted sum of values of coalitions, so a `Contrast` of weights is all there is to compute:

    shapley         the mean of v(T + giver) − v(T) over all orders in which givers may join
    leave-one-out   v(N) − v(N without the giver)
    pairwise        v({r, giver}) − v({r})
    gain            v(N) − v({r}), of all givers together: the sum of their Shapley values

A coalition is the frozen set of its members' numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Coalition = frozenset[int]
Contrast = Mapping[Coalition, float]  # the weight of each coalition's value
MOST_EXACT = 6  # clients up to which all coalitions are run


def every_coalition(clients: int) -> list[Coalition]:
    """All that have at least two members, the largest first."""
    sizes = range(clients, 1, -1)
    return [frozenset(own) for size in sizes for own in itertools.combinations(range(clients), size)]


def shapley(receiver: int, giver: int, clients: int) -> dict[Coalition, float]:
    """The exact value, from all coalitions with the receiver."""
    others = [i for i in range(clients) if i not in (receiver, giver)]
    weights: dict[Coalition, float] = {}
    for size in range(len(others) + 1):
        share = 1 / ((len(others) + 1) * math.comb(len(others), size))
        for own in itertools.combinations(others, size):
            before = frozenset({receiver, *own})
            weights[before | {giver}], weights[before] = share, -share
    return weights


def leave_one_out(giver: int, clients: int) -> dict[Coalition, float]:
    """With everyone, minus without the giver."""
    everyone = frozenset(range(clients))
    return {everyone: 1.0, everyone - {giver}: -1.0}


def pairwise(receiver: int, giver: int) -> dict[Coalition, float]:
    """With the giver only, minus alone."""
    return {frozenset({receiver, giver}): 1.0, frozenset({receiver}): -1.0}


def gain(receiver: int, clients: int) -> dict[Coalition, float]:
    """With everyone, minus alone."""
    return {frozenset(range(clients)): 1.0, frozenset({receiver}): -1.0}


@dataclass(frozen=True)
class Ring:
    """Clients in a circle. From each receiver on they join one way round, and the other way: two reversed orders.

    So every stretch of the circle is a coalition of two receivers, the one at its first and the one at its last place,
    and both orders of every receiver need M(M−2)+1 runs, in place of about twice as many.
    """

    order: tuple[int, ...]

    @classmethod
    def draw(cls, clients: int, number: int) -> Ring:
        """The ring of that number; the same at every call."""
        return cls(tuple(np.random.default_rng([clients, number]).permutation(clients).tolist()))

    def joining(self, receiver: int, forward: bool) -> Iterator[int]:
        """The givers in the order in which they join."""
        start, count = self.order.index(receiver), len(self.order)
        for step in range(1, count):
            yield self.order[(start + step if forward else start - step) % count]

    def stretch(self, receiver: int, forward: bool, length: int) -> Coalition:
        """The receiver and the givers that joined first, ``length`` clients in all."""
        return frozenset([receiver, *itertools.islice(self.joining(receiver, forward), length - 1)])

    def contrasts(
        self, receiver: int, stops: Callable[[int, bool], int] = lambda receiver, forward: 10**9
    ) -> dict[int, dict[Coalition, float]]:
        """By giver, the mean over both orders of what it adds when it joins.

        Beyond ``stops(receiver, forward)`` members a coalition counts as everyone: truncation.
        """
        count = len(self.order)
        everyone = frozenset(self.order)
        found = {giver: {everyone: 0.0} for giver in self.order if giver != receiver}
        for forward in (True, False):
            known = min(stops(receiver, forward), count)
            lengths = [length if length <= known else count for length in range(1, count + 1)]
            stretches = [self.stretch(receiver, forward, length) for length in lengths]
            for giver, (before, after) in zip(
                self.joining(receiver, forward), itertools.pairwise(stretches), strict=True
            ):
                if before != after:
                    add(found[giver], after, 0.5)
                    add(found[giver], before, -0.5)
        return found


def add(contrast: dict[Coalition, float], coalition: Coalition, weight: float) -> None:
    """Adds to the weight of a coalition."""
    contrast[coalition] = contrast.get(coalition, 0.0) + weight


def mean_contrast(parts: Sequence[Contrast]) -> dict[Coalition, float]:
    """The mean of several."""
    found: dict[Coalition, float] = {}
    for part in parts:
        for coalition, weight in part.items():
            add(found, coalition, weight / len(parts))
    return found
