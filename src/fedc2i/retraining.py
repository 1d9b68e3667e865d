"""Does one-shot influence say what retraining would? The federation is trained again without each client.

Influence λ_{m,i} is measured in passing, by leaving model i out of a mean. What client i is really worth to client m is
how much worse m fares in a federation that never had i:

    effect_{m,i} = loss of m, trained without i  −  loss of m, trained with all

on data of m that nobody trained on. Both rank the other clients; Spearman's ρ says how far the two orders agree: 1 is
the same order, 0 none of it, −1 the reverse. With few clients chance alone often gives a large ρ, so every ρ comes with
the share of all orders that agree, or disagree, at least as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.plans import Plan
from fedc2i.results import Result

Array = np.ndarray[Any, np.dtype[np.float64]]
MOST_ORDERS = 5040  # orders that are all tried; of more, so many are drawn
FEWEST = 3  # other clients: two can only agree or not
DRAWN = 9999  # of the test over all clients


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
        return [agree(*pair) for pair in self._pairs(point, which)]

    def overall(self, point: Point, which: str = "mean") -> Agreement:
        """The mean of the clients' ρ, tested by drawing an order for each of them."""
        return agree_overall(self._pairs(point, which))

    def _pairs(self, point: Point, which: str) -> list[tuple[Array, Array]]:
        influence, everyone = getattr(self, which), range(len(self.clients))
        others = [[i for i in everyone if i != m] for m in everyone]
        return [(influence[m, own], self.effects[point][m, own]) for m, own in enumerate(others)]

    def to_json(self) -> dict[str, Any]:
        """Every number, and the correlations at both points, by mean and by last λ."""
        kinds = [(point, which) for point in self.effects for which in ("mean", "last")]
        return {
            "clients": list(self.clients),
            "seeds": list(self.seeds),
            "rounds": self.rounds,
            "split": self.split,
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

    both = np.isfinite(influence) & np.isfinite(effect)
    ranks = [stats.rankdata(values[both]) for values in (influence, effect)]
    count = int(both.sum())
    if count < FEWEST or any(np.ptp(own) == 0 for own in ranks):
        return Agreement(math.nan, math.nan, count)
    rho = _rho(*ranks)
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


def agree_overall(pairs: list[tuple[Array, Array]], seed: int = 0) -> Agreement:
    """The mean ρ over clients, and how often drawn orders give one as far from 0."""
    from scipy import stats

    generator = np.random.default_rng(seed)
    found, null = [], np.zeros(DRAWN)
    for influence, effect in pairs:
        own = agree(influence, effect)
        if math.isnan(own.rho):
            continue
        found.append(own.rho)
        both = np.isfinite(influence) & np.isfinite(effect)
        first, second = (stats.rankdata(values[both]) for values in (influence, effect))
        orders = generator.permuted(np.tile(first, (DRAWN, 1)), axis=1)
        first_spread, second_spread = first - first.mean(), second - second.mean()
        null += (orders - first.mean()) @ second_spread / np.sqrt((first_spread**2).sum() * (second_spread**2).sum())
    if not found:
        return Agreement(math.nan, math.nan, 0)
    rho = float(np.mean(found))
    beyond = int(np.sum(np.abs(null / len(found)) >= abs(rho) - 1e-9))
    return Agreement(rho, (beyond + 1) / (DRAWN + 1), len(found))


def _rho(first: Array, second: Array) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def check(plan: Plan, rounds: int, seeds: tuple[int, ...], say: Callable[[str], None] = lambda line: None) -> Check:
    """Trains with all clients and once without each.

    Args:
        plan: of the run.
        rounds: of every training.
        seeds: of every training; numbers are means over them.
        say: is told what is being trained.

    Raises:
        UserError: for a run whose clients cannot simply be left out, or whose method measures no influence.
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
    whole = replace(plan, config=config).compute()
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
        without = _losses(replace(plan, config=config, federation=federation).compute(), metric)
        for point in POINTS:
            effects[point][others, i] = without[point] - with_all[point][others]
    mean = np.mean([np.nanmean(vector, axis=0) for vector in vectors], axis=0)
    last = np.mean([vector[-1] for vector in vectors], axis=0)
    return Check(names, seeds, rounds, mean, last, effects, split)


def _losses(result: Result, metric: str) -> dict[Point, Array]:
    """By point ``(M,)``, mean over seeds."""
    return {point: np.mean(result.accuracy(point, metric), axis=0) for point in POINTS}
