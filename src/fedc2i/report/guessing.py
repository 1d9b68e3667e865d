"""Scores that say little, no more than guessing would or of few samples: lines for tables, reports and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedc2i.analysis.weights import finite_mean
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.table import SHORT, counted
from fedc2i.runs.results import Result

CLOSE = 1.0  # points above the most frequent class that are no gain over guessing it
NEAR = {"auroc": 55.0}  # percent, below which a score is near chance
MUCH = 10.0  # points of a client's score that one test sample decides
MOST = 3  # methods, clients of each, and groups of methods that are named


def guessing_notes(results: Sequence[Result]) -> list[str]:
    """A line on the clients at which a method is no better than guessing, before or after local training.

    Methods with the same such clients are named together. Empty if there are no such clients.
    """
    groups: dict[tuple[str, ...], list[tuple[Result, tuple[Point, ...]]]] = {}
    for one in results:
        by_clients: dict[tuple[str, ...], tuple[Point, ...]] = {}
        for point in POINTS:
            if found := _near_guessing(one, point):
                by_clients[found] = (*by_clients.get(found, ()), point)
        for names, points in by_clients.items():
            groups.setdefault(names, []).append((one, points))
    if not groups:
        return []
    said = []
    for names, own in list(groups.items())[:MOST]:
        first, points = own[0]
        is_all = MOST < len(own) == len(results) and len({when for _, when in own}) == 1
        who = f"all {len(own)} methods{_when(points)}" if is_all else _few([f"{one.label}{_when(p)}" for one, p in own])
        # of several methods the table has the scores
        clients = [_scored(first, name, points) for name in names] if len(results) == 1 else names
        said.append(f"{who} at {_few(clients)}")
    more = sum(len(points) for own in list(groups.values())[MOST:] for _, points in own)
    said += [counted(more, "more row")] if more else []
    is_accuracy = results[0].config.metric == "accuracy"
    return [f"No better than guessing{' the most frequent class' if is_accuracy else ''}: {'; '.join(said)}."]


def few_samples_notes(results: Sequence[Result]) -> list[str]:
    """A line on the clients with so few test samples that a single one decides much of their accuracy."""
    first = results[0]
    if first.config.metric != "accuracy":
        return []
    sizes = {name: own.get("test", 0) for name, own in first.federation.samples().items()}
    few = {name: size for name, size in sizes.items() if size and 100 / size >= MUCH}
    said = [
        f"{name} has {counted(size, 'test sample')}: one {'of them ' if size > 1 else ''}is {100 / size:.3g} points of "
        f"its score, and {100 / size / len(sizes):.3g} of Avg"
        for name, size in list(few.items())[:MOST]
    ]
    said += [f"{len(few) - MOST} more have as few"] if len(few) > MOST else []
    return [f"{'; '.join(said)}."] if said else []


def _when(points: Sequence[Point]) -> str:
    return f" ({' and '.join(SHORT[point] for point in points)})"


def _few(parts: Sequence[str]) -> str:
    more = len(parts) - MOST
    return ", ".join(parts[:MOST]) + (f" and {more} more" if more > 0 else "")


def _scored(result: Result, name: str, points: Sequence[Point]) -> str:
    """``north (33.0 %, guessing 33.3 %)``; only accuracy has a share to compare with."""
    values = " and ".join(dict.fromkeys(f"{_scores(result, point)[name]:.1f}" for point in points))
    guess = f", guessing {result.majority[name]:.1f} %" if result.config.metric == "accuracy" else ""
    return f"{name} ({values} %{guess})"


def _scores(result: Result, point: Point) -> dict[str, float]:
    values = finite_mean(result.accuracy(point, result.config.metric)).tolist()
    return dict(zip(result.federation.names, values, strict=True))


def _near_guessing(result: Result, point: Point) -> tuple[str, ...]:
    """The names of such clients."""
    metric, scores = result.config.metric, _scores(result, point)
    if metric == "accuracy":
        guess = result.majority
        return tuple(
            name
            for name, value in scores.items()
            if name in guess and not math.isnan(value) and value < guess[name] + CLOSE and guess[name] < 100
        )
    limit = NEAR.get(metric, -np.inf)
    if metric == "balanced_accuracy":
        limit = 100 / len(result.federation.classes) + NEAR["auroc"] - 50
    return tuple(name for name, value in scores.items() if value < limit)
