"""Scores that say no more than guessing would, in one line that tables, reports and the terminal share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedc2i.analysis.weights import finite_mean
from fedc2i.report.table import SHORT, counted
from fedc2i.runs.results import Result

CLOSE = 1.0  # points above the most frequent class that are no gain over guessing it
NEAR = {"auroc": 55.0}  # percent, below which a score is near chance
MOST = 3  # methods, clients of each, and groups of methods that are named


def guessing_notes(results: Sequence[Result]) -> list[str]:
    """A line on the clients at which a method is no better than guessing, at the point that its authors report.

    Methods with the same such clients are named together. Empty if there are no such clients.
    """
    groups: dict[tuple[str, ...], list[tuple[Result, list[float]]]] = {}
    for one in results:
        found = _near_guessing(one)
        if found:
            groups.setdefault(tuple(found), []).append((one, list(found.values())))
    if not groups:
        return []
    said = []
    for names, own in list(groups.items())[:MOST]:
        methods = [f"{one.label} ({SHORT[one.method.headline]})" for one, _ in own]
        who = f"all {len(own)} methods" if MOST < len(own) == len(results) else _few(methods)
        clients = list(names)
        if len(results) == 1:  # of several methods the table has the scores
            clients = [_scored(own[0][0], name, value) for name, value in zip(names, own[0][1], strict=True)]
        said.append(f"{who} at {_few(clients)}")
    more = sum(map(len, list(groups.values())[MOST:]))
    said += [counted(more, "other method")] if more else []
    is_accuracy = results[0].config.metric == "accuracy"
    return [f"No better than guessing{' the most frequent class' if is_accuracy else ''}: {'; '.join(said)}."]


def _few(parts: Sequence[str]) -> str:
    more = len(parts) - MOST
    return ", ".join(parts[:MOST]) + (f" and {more} more" if more > 0 else "")


def _scored(result: Result, name: str, value: float) -> str:
    """``north (33.0 %, guessing 33.3 %)``; only accuracy has a share to compare with."""
    guess = f", guessing {result.majority[name]:.1f} %" if result.config.metric == "accuracy" else ""
    return f"{name} ({value:.1f} %{guess})"


def _near_guessing(result: Result) -> dict[str, float]:
    """The scores of such clients, by name."""
    metric = result.config.metric
    values = finite_mean(result.accuracy(result.method.headline, metric)).tolist()
    scores = dict(zip(result.federation.names, values, strict=True))
    if metric == "accuracy":
        guess = result.majority
        return {
            name: value
            for name, value in scores.items()
            if name in guess and not math.isnan(value) and value < guess[name] + CLOSE and guess[name] < 100
        }
    limit = NEAR.get(metric, -np.inf)
    if metric == "balanced_accuracy":
        limit = 100 / len(result.federation.classes) + NEAR["auroc"] - 50
    return {name: value for name, value in scores.items() if value < limit}
