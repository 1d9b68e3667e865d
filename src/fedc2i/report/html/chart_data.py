"""A result as plain data for the page's scripts: curves, influence of the rounds to keep, and the graph's nodes.

Numbers take two bytes each, and only as many rounds as the page can hold are kept.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fedc2i.analysis import weights
from fedc2i.analysis.weights import domain_of, finite_mean, mean_weights
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.html.graph import graph_nodes
from fedc2i.report.html.side_by_side import last_average, named, run_to_show
from fedc2i.report.table import WHEN, metric_words
from fedc2i.runs.results import Array, Result

DIAGNOSTICS = {"vector": ("influence_vector", 2), "matrix": ("influence_matrix", 3)}  # λ (M, M), Λ (M, M, C)
STEPS = 65534  # between the lowest and the highest number; one more stands for nan
MOST_VALUES = 1_200_000  # of λ, and as many of Λ, in a page: 3.2 MB each


def chart_data(results: Sequence[Result]) -> dict[str, Any]:
    """Everything the scripts draw."""
    first, words = results[0].federation, metric_words(results[0].config.metric)
    domains = list(dict.fromkeys(map(domain_of, first.names)))
    weighed = [k for k, one in enumerate(results) if one.influence("influence_vector").size]
    return {
        "clients": list(first.names),
        "classes": list(first.classes),
        "points": dict(WHEN),
        "metric": {"name": words.name, "unit": words.unit, "points": words.points, "sign": words.sign},
        "domains": {"names": domains, "of": [domains.index(domain_of(name)) for name in first.names]},
        "runs": [_run_data(result, MOST_VALUES // len(results)) for result in results],
        "first": run_to_show(results, weighed or range(len(results))),
    }


def to_script(value: Any) -> str:
    """JSON that can stand inside a script element whatever the names in it are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _run_data(result: Result, most: int) -> dict[str, Any]:
    """One run, with at most ``most`` values of λ, and as many of Λ and of scores."""
    seeds = result.config.seeds
    labels = [f"mean over {named(seeds)}"] if len(seeds) > 1 else []
    labels += [f"seed {seed}" for seed in seeds]
    scored, _ = round_scores(result, "trained")
    drawn = spread(len(scored), max(2, most // (len(POINTS) * len(labels) * len(result.federation.names))))
    scores = {point: round_scores(result, point)[1][:, drawn] for point in POINTS}
    vector = weights.of_last_round(result, "influence_vector")
    nodes = graph_nodes(result.federation.names, vector if vector.ndim == 2 else None)
    kept = {name: _kept(result, *entry, most) for name, entry in DIAGNOSTICS.items()}
    numbers = {name: weights.round_numbers(result, entry[0]) for name, entry in DIAGNOSTICS.items()}
    views = [
        {
            "label": label,
            "scores": {point: pack(_view(scores[point], k, finite_mean)) for point in POINTS},
            **{name: _packed(*found, k) for name, found in kept.items()},
        }
        for k, label in enumerate(labels)
    ]
    return {
        "label": result.label,
        "rounds": [scored[t] for t in drawn],
        "scored": len(scored),
        "average": {point: _average(result, scores[point]) for point in POINTS},
        "averageName": last_average(result, "trained")[0],
        "headline": result.method.headline,
        "influenceRounds": {name: [numbers[name][t] for t in chosen] for name, (_, chosen, _) in kept.items()},
        "measured": {name: int(values.size > 0) for name, (values, _, _) in kept.items()},
        "nodes": {"kind": nodes.kind, "labels": list(nodes.labels), "of": list(nodes.members)},
        "views": views,
    }


def round_scores(result: Result, point: Point) -> tuple[list[int], Array]:
    """The evaluated rounds and ``(seeds, rounds, clients)``; nan where a client was not scored."""
    scored = [report for report in result.rounds if report.metrics]
    rounds, seeds = sorted({report.round for report in scored}), result.config.seeds
    values = np.full((len(seeds), len(rounds), len(result.federation.names)), np.nan)
    at = {number: t for t, number in enumerate(rounds)}
    for report in scored:
        own = [metrics.get(result.config.metric, np.nan) for metrics in report.metrics[point]]
        values[seeds.index(report.seed), at[report.round]] = own
    return rounds, values


def _kept(result: Result, name: str, dimensions: int, most: int) -> tuple[Array, list[int], bool]:
    """A diagnostic ``(seeds, rounds, ...)``, which of its rounds are kept, and whether single seeds are."""
    values = weights.of_seeds(result, name)
    if values.ndim != 2 + dimensions:
        return np.zeros((0,)), [], True
    seeds = len(result.config.seeds)
    return values, *rounds_to_keep(values, seeds + (seeds > 1), most)


def rounds_to_keep(values: Array, views: int, most: int) -> tuple[list[int], bool]:
    """Which rounds of ``(seeds, rounds, ...)`` a page keeps, from 0, and whether it keeps single seeds as well.

    Rounds in which nobody measured anything are skipped. If the others are more than ``most`` values, only the mean
    over seeds is kept, and of it rounds spread evenly from the first to the last; empty if one round is too large.
    """
    measured = np.flatnonzero(np.isfinite(values).any(axis=(0, *range(2, values.ndim)))).tolist()
    size = int(np.prod(values.shape[2:]))
    if len(measured) * size * views <= most:
        return measured, True
    return [measured[k] for k in spread(len(measured), most // size)], False


def spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to ``count`` - 1: all, or ``most`` of them, evenly from the first to the last; of one the last."""
    if most < 2:
        return list(range(count))[count - most :] if most else []
    return [int(k) for k in np.round(np.linspace(0, count - 1, min(most, count)))]


def _view(values: Array, view: int, combine: Callable[[Array], Array]) -> Array:
    """View 0 of several seeds is their mean; then each seed."""
    if len(values) == 1:
        return np.asarray(values[0])
    return combine(values) if view == 0 else np.asarray(values[view - 1])


def _packed(values: Array, chosen: list[int], singles: bool, view: int) -> dict[str, Any] | None:
    if not chosen or (view > 0 and not singles):
        return None
    return pack(_view(values[:, chosen], view, partial(mean_weights, helpers=3)))


def pack(values: Array) -> dict[str, Any]:
    """Numbers as ``low + step * q`` with 16-bit ``q``, base64; nan stays nan."""
    is_finite = np.isfinite(values)
    finite = values[is_finite]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    step = (high - low) / STEPS
    whole = np.round((np.where(is_finite, values, low) - low) / (step or 1.0))
    coded = np.where(is_finite, whole, STEPS + 1).astype("<u2")
    return {"shape": list(values.shape), "low": low, "step": step, "data": base64.b64encode(coded.tobytes()).decode()}


def _average(result: Result, scores: Array) -> dict[str, list[float | None]]:
    """Of each round the data set's last average, mean and sample standard deviation over seeds."""
    names = result.federation.names
    members = list({"": names, **result.federation.averages}.values())[-1]
    own = finite_mean(np.moveaxis(scores[:, :, [names.index(name) for name in members]], 2, 0))
    whole = len(own) > 1 and np.isfinite(own).all()
    deviation = np.std(own, axis=0, ddof=1) if whole else np.full(own.shape[1], np.nan)
    return {"mean": _numbers(finite_mean(own)), "sd": _numbers(deviation)}


def _numbers(values: Array) -> list[float | None]:
    return [round(float(value), 3) if np.isfinite(value) else None for value in values]
