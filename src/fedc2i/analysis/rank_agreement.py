"""How far two ways to rank clients agree: Spearman's ρ with a permutation p-value.

For every client m both rank the other clients; ρ is 1 for the same order, 0 for none of it, −1 for the reverse. With
few clients chance alone often gives a large ρ, so it comes with the share of all orders that agree, or disagree, at
least as much. The clients' ρ are not independent of each other: who is useful is useful to many. `agree_overall`
allows for that.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_ORDERS = 5040  # orders that are all tried; of more, this many are drawn
FEWEST = 3  # other clients: two can only agree or not
DRAWN = 9999  # ways to exchange the clients, where there are too many for all


@dataclass(frozen=True)
class RankAgreement:
    """Spearman's ρ, its two-sided permutation p-value, and over how many others; nan where there is no order."""

    rho: float
    p: float
    others: int


def agree_overall(influence: Array, effect: Array, seed: int = 0) -> RankAgreement:
    """The mean of the clients' ρ, and how often it is as far from 0 when the clients of one table are mixed up.

    Rows are no independent witnesses: a client that helps everybody stands high in all of them. So the names of one
    table are exchanged as a whole, rows and columns alike (Mantel's test, also called QAP): then it is another client
    that stands high, but again in all rows. All M! ways are tried, or some that are drawn. Both tables are ``(M, M)``;
    their diagonals do not count.
    """
    count = len(influence)
    rows = [_rho(*_ranks(*(np.delete(table[m], m) for table in (influence, effect)))) for m in range(count)]
    found = [rho for rho in rows if not math.isnan(rho)]
    if not found:
        return RankAgreement(math.nan, math.nan, 0)
    first, second = _standardised(influence), _standardised(effect)
    exact = math.factorial(count) <= MOST_ORDERS
    generator = np.random.default_rng(seed)
    every = np.tile(np.arange(count), (DRAWN, 1))
    orders = np.array(list(itertools.permutations(range(count)))) if exact else generator.permuted(every, axis=1)
    null = np.array([np.sum(first[np.ix_(order, order)] * second) for order in orders])
    beyond = int(np.sum(np.abs(null) >= abs(np.sum(first * second)) - 1e-9))
    return RankAgreement(float(np.mean(found)), beyond / len(null) if exact else (beyond + 1) / (DRAWN + 1), len(found))


def _standardised(table: Array) -> Array:
    """Each row's ranks of the others with mean 0 and length 1, so that a product is ρ; 0 where there is none."""
    from scipy import stats

    ranks = np.zeros(table.shape)
    for m, row in enumerate(table):
        there = np.isfinite(row)
        there[m] = False
        own = stats.rankdata(row[there]) if there.sum() >= FEWEST else np.zeros(int(there.sum()))
        own = own - own.mean() if len(own) else own
        ranks[m, there] = own / (np.linalg.norm(own) or 1.0)
    return ranks


def _ranks(influence: Array, effect: Array) -> tuple[Array, Array]:
    """Of those that have both."""
    from scipy import stats

    both = np.isfinite(influence) & np.isfinite(effect)
    return stats.rankdata(influence[both]), stats.rankdata(effect[both])


def _rho(first: Array, second: Array) -> float:
    """Spearman's, from ranks; nan where there is no order, or too few for one."""
    if len(first) < FEWEST or np.ptp(first) == 0 or np.ptp(second) == 0:
        return math.nan
    return float(np.corrcoef(first, second)[0, 1])
