"""Exact Shapley values of every giver for every receiver, and every cheap measure from one run of all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from experiments.agreement_probe import PREFIX, PROBED
from fedc2i.analysis.contribution.coalitions import CoalitionRuns, restricted
from fedc2i.analysis.contribution.measure import Values
from fedc2i.analysis.contribution.shapley import every_coalition, shapley
from fedc2i.analysis.weights import finite_mean
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.work_view import WorkView
from fedc2i.runs.driver import compute
from fedc2i.runs.plan import Plan
from fedc2i.runs.results import Array

METRIC = "loss"
WEIGHTS = {"λ": "influence_vector", "Λ, mean of classes": "influence_matrix"}


@dataclass(frozen=True)
class Truth:
    """Shapley values ``(seeds, M, M)`` by point, and every cheap measure ``(seeds, M, M)``."""

    values: Mapping[Point, Array]
    measures: Mapping[str, Array]


def cheap(plan: Plan, seeds: Sequence[int]) -> dict[str, Array]:
    """Every measure ``(seeds, M, M)`` from one run: of the last round, and the mean of rounds."""
    result = compute(plan)
    names = WEIGHTS | {
        name.removeprefix(PREFIX): name for name in result.rounds[-1].influence if name.startswith(PREFIX)
    }
    found: dict[str, list[Array]] = {}
    for seed in seeds:
        for title, name in names.items():
            rounds = result.influence(name, seed)
            rounds = rounds.mean(-1) if rounds.ndim == 4 else rounds
            if title in WEIGHTS:
                found.setdefault(f"{title}, last round", []).append(rounds[-1])
            found.setdefault(f"{title}, mean of rounds", []).append(finite_mean(rounds))
    return {title: np.stack(own) for title, own in found.items()}


def exact_values(plan: Plan, folder: Path, view: WorkView) -> dict[Point, Array]:
    """Runs all coalitions; Shapley values ``(seeds, M, M)`` by point, row m of receiver m."""
    clients = len(plan.federation.names)
    runs = CoalitionRuns(plan, folder, view.update, view.say)
    runs.compute([frozenset({0}), *every_coalition(clients)])
    values, found = Values(runs), {}
    for point in POINTS:
        table = np.full((len(plan.config.seeds), clients, clients), np.nan)
        for receiver, giver in values.pairs():
            weights = shapley(receiver, giver, clients)
            scores = values.of(receiver, METRIC, point, weights)
            table[:, receiver, giver] = sum(weight * scores[own][:, 0] for own, weight in weights.items())
        found[point] = table
    return found


def measure(plan: Plan, folder: Path, view: WorkView) -> Truth:
    """Runs all coalitions and one probed run of all clients."""
    values = exact_values(plan, folder, view)
    method = PROBED[plan.method.name](**plan.config.options)
    everyone = restricted(plan, frozenset(range(len(plan.federation.names))))
    probed = replace(everyone, method=method, config=replace(everyone.config, workers=0))
    return Truth(values, cheap(probed, plan.config.seeds))
