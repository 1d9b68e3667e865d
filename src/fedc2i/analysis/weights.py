"""Measured influence weights of a result: means over seeds, the last round, and the share within a domain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.engine.records import LARGE
from fedc2i.runs.results import Array, Result

CEILING = 0.5  # the largest weight where a client's own model weighs as much as the best other one
NEAR = 0.01  # below it, a weight counts as the largest


def finite_mean(stack: Sequence[Array] | Array) -> Array:
    """Over the first axis, of the finite values; nan where there is none."""
    values = np.asarray(stack, dtype=np.float64)
    finite = np.isfinite(values)
    count = finite.sum(0)
    total: Array = np.where(finite, values, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def mean_weights(stack: Sequence[Array] | Array, helpers: int) -> Array:
    """Mean of λ or Λ over the first axis, so that rows still sum to one; nan where nothing was measured.

    With partial participation a client receives other models in each seed. Where it measured anything, a model that it
    did not receive has weight 0; where it measured nothing, that seed is ignored. ``stack`` is ``(S, ..., M, M)`` of λ,
    ``(S, ..., M, M, C)`` of Λ; ``helpers`` is the axis of the clients that help.
    """
    values = np.asarray(stack, dtype=np.float64)
    finite = np.isfinite(values)
    count = finite.any(axis=helpers, keepdims=True).sum(0)
    total: Array = np.where(finite, values, 0.0).sum(0)
    return np.where(finite.any(0), total / np.maximum(count, 1), np.nan)


def of_seeds(result: Result, name: str) -> Array:
    """A diagnostic of all seeds, ``(seeds, rounds, M, M, ...)``, nan where nothing was measured; ``(0,)`` if never."""
    found = [result.influence(name, seed) for seed in result.config.seeds]
    shapes = [array.shape for array in found if array.size]
    if not shapes or not any(np.isfinite(array).any() for array in found):
        return np.zeros((0,))
    longest = max(shape[0] for shape in shapes)  # early stopping may end seeds at different rounds
    values = np.full((len(found), longest, *shapes[0][1:]), np.nan)
    for seed, array in enumerate(found):
        if array.size:
            values[seed, : len(array)] = array
    return values


def round_numbers(result: Result, name: str) -> list[int]:
    """The rounds in what `of_seeds` returns; only the last one of a diagnostic too large to keep more."""
    found: list[list[int]] = [[]]
    for seed in result.config.seeds:
        own = [report for report in result.rounds if report.seed == seed]
        measured = [report for report in own if report.influence.get(name) is not None]
        large = any(report.influence[name].nbytes > LARGE for report in measured[:1])
        found.append([report.round for report in (measured if large else own if measured else ())])
    return max(found, key=lambda numbers: (len(numbers), numbers))


def by_round(result: Result, name: str) -> Array:
    """λ ``(rounds, M, M)`` or Λ of every round, mean over the seeds that measured it; ``(0,)`` if none did."""
    values = of_seeds(result, name)
    return mean_weights(values, helpers=3) if values.size else values


def of_last_round(result: Result, name: str) -> Array:
    """The mean over seeds in the last round that measured anything; ``(0,)`` if none did."""
    found: dict[int, list[Array]] = {}
    for report in result.rounds:
        if name in report.influence:
            found.setdefault(report.round, []).append(report.influence[name])
    for number in sorted(found, reverse=True):
        if any(np.isfinite(array).any() for array in found[number]):
            return mean_weights(found[number], helpers=2)
    return np.zeros((0,))


def at_ceiling(vector: Array, m: int) -> bool:
    """Whether λ ``(M, M)`` gives client m's own model and one other a half each, and there are more models.

    Where the own model is not measured but weighs as much as the best other one, no weight can be larger.
    """
    others = np.delete(vector[m], m)
    best = max(others[np.isfinite(others)], default=0.0)
    is_shared = np.isfinite(vector[m]).sum() > 2 and np.isclose(vector[m, m], best, rtol=1e-5, atol=0)
    return bool(is_shared and best >= CEILING - NEAR)


@dataclass(frozen=True)
class DomainShare:
    """λ within a client's own domain, the mean over clients, as shares of one.

    Attributes:
        domain: on the clients of the domain, itself among them.
        itself: on itself.
        uniform: what equal weights would give to the domain.
        uniform_itself: what they would give to itself.
        gamma: the γ that was used; the mean over clients of an adaptive one.
    """

    domain: float
    itself: float
    uniform: float
    uniform_itself: float
    gamma: float

    @classmethod
    def of(cls, vectors: Array, names: Sequence[str], gamma: float = math.nan, strangers: bool = False) -> DomainShare:
        """From the λ of one exchange, ``(M, M)``, row m what client m measured of each client.

        Nan is what nobody measured: whole rows of clients outside the audience, and columns of clients that have sent
        no model yet. A client whose own model is not among those received is ignored, as it measured nothing either;
        with ``strangers`` such clients did measure, and give nothing to themselves.
        """
        domains = np.array([domain_of(name) for name in names])
        rows = np.flatnonzero(np.isfinite(vectors).any(1) if strangers else np.isfinite(np.diagonal(vectors)))
        if not len(rows):
            return cls(math.nan, math.nan, math.nan, math.nan, gamma)
        sent = np.isfinite(vectors[rows])
        peers = sent & (domains[rows, None] == domains)
        inside = np.where(peers, vectors[rows], 0.0).sum(1).mean()
        equal = 1 / sent.sum(1)
        there = np.isfinite(vectors[rows, rows])
        shares = (peers.sum(1) * equal).mean(), np.where(there, equal, 0.0).mean()
        itself = np.where(there, vectors[rows, rows], 0.0).mean()
        return cls(float(inside), float(itself), float(shares[0]), float(shares[1]), gamma)

    @property
    def times(self) -> float:
        """The domain's share as a multiple of the uniform one."""
        return self.domain / self.uniform

    @property
    def peers(self) -> float:
        """On the other clients of the domain."""
        return self.domain - self.itself

    @property
    def peers_times(self) -> float:
        """The same as a multiple of the uniform share; nan in a domain of one client."""
        others = self.uniform - self.uniform_itself
        return self.peers / others if others > 0 else math.nan


def domain_of(name: str) -> str:
    """The domain of a client: ``SVHN/3`` is a part of ``SVHN``; a client that was not split is its own domain."""
    whole, _, number = name.rpartition("/")
    return whole if whole and number.isdecimal() else name
