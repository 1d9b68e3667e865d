"""A result as plain data for the page's scripts: curves, influence of the rounds that fit, and the graph's nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedc2i.analysis.domain_share import domain_of
from fedc2i.analysis.seed_mean import mean_weights
from fedc2i.engine.records import POINTS
from fedc2i.report.html.compare import headline, named
from fedc2i.report.html.groups import grouped
from fedc2i.report.html.packing import (
    MOST_VALUES,
    accuracies,
    influence_rounds,
    influences,
    kept_rounds,
    last_influence,
    mean,
    pack,
    spread,
)
from fedc2i.runs.results import Array, Result

DIAGNOSTICS = {"vector": ("influence_vector", 2), "matrix": ("influence_matrix", 3)}  # λ (M, M), Λ (M, M, C)


def payload(results: Sequence[Result]) -> dict[str, Any]:
    """Everything the scripts draw."""
    first = results[0].federation
    domains = list(dict.fromkeys(map(domain_of, first.names)))
    return {
        "clients": list(first.names),
        "classes": list(first.classes),
        "domains": {"names": domains, "of": [domains.index(domain_of(name)) for name in first.names]},
        "runs": [run(result, MOST_VALUES // len(results)) for result in results],
    }


def run(result: Result, most: int) -> dict[str, Any]:
    """One run.

    Args:
        result: of the run.
        most: how many values of λ it may have, and as many of Λ and of accuracies.
    """
    seeds = result.config.seeds
    labels = [f"mean over {named(seeds)}"] if len(seeds) > 1 else []
    labels += [f"seed {seed}" for seed in seeds]
    scored, _ = accuracies(result, "trained")
    drawn = spread(len(scored), max(2, most // (len(POINTS) * len(labels) * len(result.federation.names))))
    scores = {point: accuracies(result, point)[1][:, drawn] for point in POINTS}
    vector = last_influence(result, "influence_vector")
    nodes = grouped(result.federation.names, vector if vector.ndim == 2 else None)
    kept = {name: _kept(result, *entry, most) for name, entry in DIAGNOSTICS.items()}
    views = [
        {
            "label": label,
            "accuracy": {point: pack(_view(scores[point], k, mean)) for point in POINTS},
            **{name: _packed(*found, k) for name, found in kept.items()},
        }
        for k, label in enumerate(labels)
    ]
    return {
        "label": result.label,
        "rounds": [scored[t] for t in drawn],
        "scored": len(scored),
        "average": {point: _average(result, scores[point]) for point in POINTS},
        "averageName": headline(result, "trained")[0],
        "headline": result.method.headline,
        "influenceRounds": {name: _numbered(result, name, chosen) for name, (_, chosen, _) in kept.items()},
        "measured": {name: int(values.size > 0) for name, (values, _, _) in kept.items()},
        "nodes": {"kind": nodes.kind, "labels": list(nodes.labels), "of": list(nodes.members)},
        "views": views,
    }


def _kept(result: Result, name: str, dimensions: int, most: int) -> tuple[Array, list[int], bool]:
    """A diagnostic ``(seeds, rounds, ...)``, which of its rounds are kept, and whether single seeds are."""
    values = influences(result, name)
    if values.ndim != 2 + dimensions:
        return np.zeros((0,)), [], True
    seeds = len(result.config.seeds)
    return values, *kept_rounds(values, seeds + (seeds > 1), most)


def _numbered(result: Result, name: str, chosen: list[int]) -> list[int]:
    numbers = influence_rounds(result, DIAGNOSTICS[name][0])
    return [numbers[k] for k in chosen]


def _view(values: Array, view: int, combine: Callable[[Array], Array]) -> Array:
    """View 0 of several seeds is their mean; then each seed."""
    if len(values) == 1:
        return np.asarray(values[0])
    return combine(values) if view == 0 else np.asarray(values[view - 1])


def _packed(values: Array, chosen: list[int], singles: bool, view: int) -> dict[str, Any] | None:
    if not chosen or (view > 0 and not singles):
        return None
    return pack(_view(values[:, chosen], view, partial(mean_weights, helpers=3)))


def _average(result: Result, scores: Array) -> dict[str, list[float | None]]:
    """Of each round the data set's own average, mean and sample standard deviation over seeds."""
    names = result.federation.names
    members = list(result.federation.averages.values())[-1] if result.federation.averages else names
    own = mean(np.moveaxis(scores[:, :, [names.index(name) for name in members]], 2, 0))
    whole = len(own) > 1 and np.isfinite(own).all()
    deviation = np.std(own, axis=0, ddof=1) if whole else np.full(own.shape[1], np.nan)
    return {"mean": _numbers(mean(own)), "sd": _numbers(deviation)}


def _numbers(values: Array) -> list[float | None]:
    return [round(float(value), 3) if np.isfinite(value) else None for value in values]


def to_script(value: Any) -> str:
    """JSON that can stand inside a script element whatever the names in it are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
