"""Plots of results for notebooks and scripts: scores over rounds, and whose model weighs most."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedc2i.analysis import weights
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS, Point
from fedc2i.report import figures
from fedc2i.report.table import WHEN
from fedc2i.runs.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_accuracy(
    results: Result | Sequence[Result],
    point: Point | None = None,
    *,
    metric: str | None = None,
    seed: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plots the run's metric, such as test accuracy, over rounds.

    Of one result a line for each client and their average, of several the average of each.

    Args:
        results: one result, or several, such as `compare` returns.
        point: ``received`` (before local training) or ``trained`` (after it); by default the one that the method's
            authors report, or ``trained`` for several results.
        metric: another one than that of the run's settings.
        seed: one of the seeds; the mean over all by default.
        ax: where to draw; a new figure by default.

    Returns:
        The axes, to change titles and limits.

    Raises:
        UserError: if no round was scored, or there is no such point, metric or seed.
    """
    alone = isinstance(results, Result)
    chosen = [_of_seed(own, seed) for own in ([results] if isinstance(results, Result) else results)]
    if not chosen:
        raise UserError("nothing to plot: this comparison is empty")
    chosen = [own.showing(metric or own.config.metric) for own in chosen]
    first = chosen[0]
    point = point or (first.method.headline if alone else "trained")
    if point not in POINTS:
        raise UserError(f"point must be {' or '.join(POINTS)}, got '{point}'")
    for own in chosen:
        if not any(report.metrics for report in own.rounds):
            raise UserError(f"{own.label}: no round was scored yet")
    axis = _axes(ax, 6, 3.8)
    if alone:
        figures.accuracy_panel(axis, first, point)
    else:
        figures.comparison_panel(axis, chosen, point)
    figures.name_lines(axis)
    what = first.label if alone else figures.averaged(chosen)
    title = f"{what} on {first.config.data}, {WHEN[point]}{figures.mean_of(first)}"
    axis.set_title(figures.plain(title), fontsize=10)
    return axis


def plot_influence(
    result: Result,
    round: int | None = None,
    *,
    seed: int | None = None,
    client: str | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Plots whose model weighs most: the influence vectors, or with ``client`` its influence matrix by class.

    Args:
        result: of a method that measures influence.
        round: from 1; the last by default.
        seed: one of the seeds; the mean over all by default.
        client: whose matrix; without it the vectors of all clients, a row for each.
        ax: where to draw; a new figure by default.

    Returns:
        The axes, to change titles.

    Raises:
        UserError: if the method measured no influence, or there is no such round, seed or client.
    """
    own, names, classes = _of_seed(result, seed), result.federation.names, result.federation.classes
    if client is not None and client not in names:
        raise UserError(f"client must be one of {', '.join(names)}, got '{client}'")
    kind = "influence_vector" if client is None else "influence_matrix"
    every = weights.by_round(own, kind)
    if not every.size:
        raise UserError(f"{result.label} measured no {kind.replace('_', ' ')}; methods such as fedc2i do")
    numbers = weights.round_numbers(own, kind)
    number = numbers[-1] if round is None else round
    if number not in numbers:
        raise UserError(f"round must be a whole number from {numbers[0]} to {numbers[-1]}, got {round}")
    values = every[numbers.index(number)] if client is None else every[numbers.index(number), names.index(client)]
    if not np.isfinite(values).any():
        raise UserError(f"nothing was measured in round {number}")
    side = min(max(3.2, 0.62 * len(names)), 8)
    if client is None:
        axis = _axes(ax, side + 1, side)
        image = figures.vector_panel(axis, values, figures.span_of(every, len(names)), names, names)
        axis.set(xlabel="whose model weighs", ylabel="for whom")
        label, title = "influence λ", f"{own.label} on {own.config.data}"
    else:
        axis = _axes(ax, max(4.2, min(0.45 * len(classes) + 1, 9)), max(3.0, 0.6 * side))
        shades = figures.around_equal_share(every[:, names.index(client)], len(names))
        image = figures.matrix_panel(axis, values, shades, classes, names)
        axis.set(xlabel="class", ylabel="whose classifier row weighs")
        label, title = "influence Λ (white: equal share)", f"{own.label}: who weighs most for {client}"
    axis.figure.colorbar(image, ax=axis, shrink=0.9, label=label)
    axis.set_title(figures.plain(f"{title}, round {number}{figures.mean_of(own)}"), fontsize=10)
    return axis


def _of_seed(result: Result, seed: int | None) -> Result:
    if seed is None:
        return result
    if seed not in result.config.seeds:
        raise UserError(f"seed must be one of {', '.join(map(str, result.config.seeds))}, got {seed}")
    return result.only(seed)


def _axes(ax: Axes | None, wide: float, high: float) -> Axes:
    """The given one, or that of a new figure, which a notebook shows by itself."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(wide, high), layout="constrained")[1]
