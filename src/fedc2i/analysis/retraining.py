"""Does one-shot influence say what retraining would? The federation is trained again without each client.

Influence λ_{m,i} is measured in passing, by leaving model i out of a mean. What client i is really worth to client m is
how much worse m fares in a federation that never had i:

    effect_{m,i} = loss of m, trained without i  −  loss of m, trained with all

on data of m that nobody trained on. Both rank the other clients; Spearman's ρ says how far the two orders agree: 1 is
the same order, 0 none of it, −1 the reverse. With few clients chance alone often gives a large ρ, so every ρ comes with
the share of all orders that agree, or disagree, at least as much.

The clients' ρ are not independent of each other: who is useful is useful to many. `agree_overall` allows for that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedc2i.analysis.weights import finite_mean
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.driver import compute
from fedc2i.runs.plan import Plan
from fedc2i.runs.results import Result

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_ORDERS = 5040  # orders that are all tried; of more, this many are drawn
FEWEST = 3  # other clients: two can only agree or not
DRAWN = 9999  # ways to exchange the clients, where there are too many for all


@dataclass(frozen=True)
class Agreement:
    """Spearman's ρ, its two-sided permutation p-value, and over how many others; nan where there is no order."""

    rho: float
    p: float
    others: int


@dataclass(frozen=True)
class Check:
    """What retraining without each client gave.

    Attributes:
        clients: names, rows and columns of all arrays.
        seeds: all arrays are means over these.
        rounds: of every training.
        mean: ``(M, M)`` λ, mean over rounds.
        last: ``(M, M)`` λ after the last round.
        effects: by point ``(M, M)``, nan on the diagonal.
        split: what the losses are on.
    """

    clients: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    mean: Array
    last: Array
    effects: dict[Point, Array]
    split: str

    def agreement(self, point: Point, which: str = "mean") -> list[Agreement]:
        """Of every client's own ranking of the others."""
        influence, effect = getattr(self, which), self.effects[point]
        return [agree(np.delete(influence[m], m), np.delete(effect[m], m)) for m in range(len(self.clients))]

    def overall(self, point: Point, which: str = "mean") -> Agreement:
        """The mean of the clients' ρ, tested by exchanging clients, see `agree_overall`."""
        return agree_overall(getattr(self, which), self.effects[point])

    def to_json(self) -> dict[str, Any]:
        """Every number, and the correlations at both points, by mean and by last λ."""
        kinds = [(point, which) for point in self.effects for which in ("mean", "last")]
        return {
            **{name: getattr(self, name) for name in ("clients", "seeds", "rounds", "split")},
            "influence": {"mean": self.mean.tolist(), "last": self.last.tolist()},
            "effects": {point: effect.tolist() for point, effect in self.effects.items()},
            "agreement": [
                {
                    "point": point,
                    "influence": which,
                    "overall": vars(self.overall(point, which)),
                    "clients": [vars(own) for own in self.agreement(point, which)],
                }
                for point, which in kinds
            ],
        }


def agree(influence: Array, effect: Array, seed: int = 0) -> Agreement:
    """How two rankings ``(n,)`` of the same clients agree; p over all n! orders, or over some that are drawn."""
    from scipy import stats  # slow to import

    ranks = _ranks(influence, effect)
    rho, count = _rho(*ranks), len(ranks[0])
    if math.isnan(rho):
        return Agreement(math.nan, math.nan, count)
    null = stats.permutation_test(
        (ranks[0],),
        lambda own: _rho(own, ranks[1]),
        permutation_type="pairings",
        n_resamples=MOST_ORDERS,
        alternative="two-sided",
        rng=np.random.default_rng(seed),
    ).null_distribution
    exact = math.factorial(count) <= MOST_ORDERS
    beyond = int(np.sum(np.abs(null) >= abs(rho) - 1e-9))
    return Agreement(rho, beyond / len(null) if exact else (beyond + 1) / (len(null) + 1), count)


def agree_overall(influence: Array, effect: Array, seed: int = 0) -> Agreement:
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
        return Agreement(math.nan, math.nan, 0)
    first, second = _standardised(influence), _standardised(effect)
    exact = math.factorial(count) <= MOST_ORDERS
    generator = np.random.default_rng(seed)
    every = np.tile(np.arange(count), (DRAWN, 1))
    orders = np.array(list(itertools.permutations(range(count)))) if exact else generator.permuted(every, axis=1)
    null = np.array([np.sum(first[np.ix_(order, order)] * second) for order in orders])
    beyond = int(np.sum(np.abs(null) >= abs(np.sum(first * second)) - 1e-9))
    return Agreement(float(np.mean(found)), beyond / len(null) if exact else (beyond + 1) / (DRAWN + 1), len(found))


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


def check(plan: Plan, rounds: int, seeds: tuple[int, ...], say: Callable[[str], None] = lambda line: None) -> Check:
    """Trains with all clients and once without each, over these rounds and seeds; ``say`` receives a line for each.

    Raises:
        UserError: for a run without whose clients one cannot simply train, or whose method measures no influence.
    """
    names, config = plan.federation.names, plan.config
    if len(names) < FEWEST + 1:
        raise UserError(f"at least {FEWEST + 1} clients are needed to compare rankings, here are {len(names)}")
    if config.attack or config.topology != "full":
        raise UserError("influence check is for runs without attack and with topology=full")
    if rounds < 1:
        raise UserError(f"rounds must be at least 1, got {rounds}")
    config = replace(config, rounds=rounds, seeds=seeds, evaluate_every=0, patience=0, checkpoint_every=1)
    say(f"training with all {len(names)} clients, {rounds} rounds")
    whole = compute(replace(plan, config=config))
    vectors = [whole.influence("influence_vector", seed) for seed in seeds]
    if not all(vector.size for vector in vectors):
        raise UserError(f"{plan.label} measures no influence vector")
    held_out = all(len(client.validation) for client in plan.federation.clients)
    metric, split = ("validation_loss", "validation") if held_out else ("loss", "test")
    with_all = _losses(whole, metric)
    effects = {point: np.full((len(names), len(names)), np.nan) for point in POINTS}
    for i, left_out in enumerate(names):
        others = [m for m in range(len(names)) if m != i]
        say(f"training without {left_out} ({i + 1} of {len(names)})")
        federation = plan.federation.select([names[m] for m in others])
        without = _losses(compute(replace(plan, config=config, federation=federation)), metric)
        for point in POINTS:
            effects[point][others, i] = without[point] - with_all[point][others]
    mean = finite_mean([finite_mean(vector) for vector in vectors])
    last = finite_mean([vector[-1] for vector in vectors])
    return Check(names, seeds, rounds, mean, last, effects, split)


def _losses(result: Result, metric: str) -> dict[Point, Array]:
    """By point ``(M,)``, mean over seeds."""
    return {point: np.mean(result.accuracy(point, metric), axis=0) for point in POINTS}
