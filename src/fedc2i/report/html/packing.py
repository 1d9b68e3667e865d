"""Arrays for a page: means over seeds where some measured nothing, two bytes a number, and as many rounds as fit."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from fedc2i.analysis.seed_mean import mean_weights
from fedc2i.engine.diagnostics import LARGE
from fedc2i.engine.records import Point
from fedc2i.runs.results import Array, Result

STEPS = 65534  # between the lowest and the highest number; one more stands for nan
MOST_VALUES = 1_200_000  # of λ, and as many of Λ, in a page: 3.2 MB each


def pack(values: Array) -> dict[str, Any]:
    """Numbers as ``low + step * q`` with 16-bit ``q``, base64; nan stays nan."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    step = (high - low) / STEPS
    whole = np.round((np.where(np.isfinite(values), values, low) - low) / (step or 1.0))
    coded = np.where(np.isfinite(values), whole, STEPS + 1).astype("<u2")
    return {"shape": list(values.shape), "low": low, "step": step, "data": base64.b64encode(coded.tobytes()).decode()}


def mean(stack: Sequence[Array] | Array) -> Array:
    """Over the first axis, of what is there; nan where nothing is."""
    values = np.asarray(stack, dtype=np.float64)
    there = np.isfinite(values)
    count = there.sum(0)
    total: Array = np.where(there, values, 0.0).sum(0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def accuracies(result: Result, point: Point) -> tuple[list[int], Array]:
    """The evaluated rounds and ``(seeds, rounds, clients)``; nan where a client was not scored."""
    rounds = sorted({report.round for report in result.rounds if report.metrics})
    seeds = result.config.seeds
    values = np.full((len(seeds), len(rounds), len(result.federation.names)), np.nan)
    row_of, at = {seed: k for k, seed in enumerate(seeds)}, {number: t for t, number in enumerate(rounds)}
    for report in result.rounds:
        if report.metrics:
            own = [metrics.get("accuracy", np.nan) for metrics in report.metrics[point]]
            values[row_of[report.seed], at[report.round]] = own
    return rounds, values


def influences(result: Result, name: str) -> Array:
    """A diagnostic of all seeds, ``(seeds, rounds, M, M, ...)``, nan where nothing was measured; ``(0,)`` if none."""
    found = [result.influence(name, seed) for seed in result.config.seeds]
    shapes = [array.shape for array in found if array.size]
    if not shapes or not any(np.isfinite(array).any() for array in found):
        return np.zeros((0,))
    longest = max(shape[0] for shape in shapes)
    values = np.full((len(found), longest, *shapes[0][1:]), np.nan)
    for seed, array in enumerate(found):
        if array.size:
            values[seed, : len(array)] = array
    return values


def influence_rounds(result: Result, name: str) -> list[int]:
    """The numbers of the rounds in what `influences` returns; of a diagnostic that is kept of the last, only that."""
    found: list[list[int]] = [[]]
    for seed in result.config.seeds:
        own = [report for report in result.rounds if report.seed == seed]
        measured = [report for report in own if report.influence.get(name) is not None]
        large = any(report.influence[name].nbytes > LARGE for report in measured[:1])
        found.append([report.round for report in (measured if large else own if measured else ())])
    return max(found, key=lambda numbers: (len(numbers), numbers))


def last_influence(result: Result, name: str) -> Array:
    """The mean over seeds in the last round that measured anything; ``(0,)`` if none did."""
    by_round: dict[int, list[Array]] = {}
    for report in result.rounds:
        if name in report.influence:
            by_round.setdefault(report.round, []).append(report.influence[name])
    for number in sorted(by_round, reverse=True):
        if any(np.isfinite(array).any() for array in by_round[number]):
            return mean_weights(by_round[number], helpers=2)
    return np.zeros((0,))


def kept_rounds(values: Array, views: int, most: int) -> tuple[list[int], bool]:
    """Which rounds of ``(seeds, rounds, ...)`` a page keeps, from 0, and whether it keeps single seeds as well.

    Rounds in which nobody measured anything are left out. If not all fit, only the mean over seeds is kept, and of it
    rounds spread evenly from the first to the last; none if not even one fits.
    """
    measured = np.flatnonzero(np.isfinite(values).any(axis=(0, *range(2, values.ndim))))
    size = int(np.prod(values.shape[2:]))
    if len(measured) * size * views <= most:
        return [int(number) for number in measured], True
    return [int(measured[k]) for k in spread(len(measured), most // size)], False


def spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to ``count`` - 1: all, or as many as fit, evenly from the first to the last; of one the last."""
    if most < 2:
        return list(range(count))[count - most :] if most else []
    return [int(k) for k in np.round(np.linspace(0, count - 1, min(most, count)))]
