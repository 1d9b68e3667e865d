"""How much of the influence vectors λ stays within the domain that a client is part of."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.runs.results import Array


@dataclass(frozen=True)
class Mass:
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
    def of(cls, vectors: Array, names: Sequence[str], gamma: float = math.nan, strangers: bool = False) -> Mass:
        """From the λ of one exchange, ``(M, M)``, row m what client m measured of each client.

        Nan is what nobody measured: whole rows of clients outside the audience, and columns of clients that have sent
        no model yet. A client whose own model is not among those received measured nothing either, and is left out;
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
        """The mass in uniform shares."""
        return self.domain / self.uniform

    @property
    def peers(self) -> float:
        """On the other clients of the domain."""
        return self.domain - self.itself

    @property
    def peers_times(self) -> float:
        """That in uniform shares; nan in a domain of one client."""
        others = self.uniform - self.uniform_itself
        return self.peers / others if others > 0 else math.nan


def domain_of(name: str) -> str:
    """Whose part a client is: ``SVHN/3`` is of ``SVHN``; a client that was not split is a domain of its own."""
    whole, _, number = name.rpartition("/")
    return whole if whole and number.isdecimal() else name
