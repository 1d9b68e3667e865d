"""Results in a notebook: HTML and pandas tables, and plots. `Result` imports this when it is asked for one."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.analysis.seed_mean import mean_weights
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.results import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedc2i.report.table import Table

COLUMNS = ("seed", "round", "client", "point", "metric", "value")
MOST_CLIENTS = 12  # columns of an HTML table; beyond, it is no longer compact
# Neither text nor background has a colour of its own, so that both are those of the notebook, light or dark.
_TABLE = "color:inherit;border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0.4em 0"
_CELL = "padding:0.15em 0.6em;text-align:{};white-space:nowrap"
_LINE = ";border-bottom:1px solid rgba(127,127,127,0.6)"
_NOTE = "font-size:85%;opacity:0.8;margin:0.2em 0"


class Comparison(list[Result]):
    """What `compare` returns: a list of results, one for each method, that shows itself as one table.

    One of your own is made of runs that were read back: ``Comparison([read_run(a), read_run(b)])``.
    """

    def table(self) -> str:
        """Scores of all methods at both points as Markdown, with the notes that belong to them.

        Raises:
            UserError: if there is nothing in it, or the results differ in their clients or seeds.
        """
        return _comparison(self).to_markdown()

    def to_pandas(self) -> Any:
        """The long table of all results, with what was run in the first column, ``method``."""
        return _frame(("method", *COLUMNS), ((own.key, *row) for own in self for row in long_rows(own)))

    def plot_accuracy(self, point: Point = "trained", *, seed: int | None = None, ax: Axes | None = None) -> Axes:
        """The average accuracy of every method over rounds, at one point; arguments as for `Result.plot_accuracy`."""
        from fedc2i.report import figures

        _check_point(point)
        if not self:
            raise UserError("nothing to plot: this comparison is empty")
        chosen = [_scored(own, seed) for own in self]
        axis = _axes(ax, 6, 3.8)
        figures.comparison_panel(axis, chosen, point)
        figures.name_lines(axis)
        title = f"average over clients on {chosen[0].config.data}, {point}{figures.mean_of(chosen[0])}"
        axis.set_title(figures.plain(title), fontsize=10)
        return axis

    def _repr_html_(self) -> str:
        alike = len({(own.federation.names, own.config.seeds) for own in self}) == 1
        if not alike or not all(map(_is_scored, self)):
            return "".join(map(html, self)) or "<p>an empty comparison</p>"
        return _html_scores(self)


def html(result: Result) -> str:
    """A result for a notebook: scores at both points and, if it was measured, who helps whom."""
    if not _is_scored(result):
        return f"<p>{escape(repr(result))}</p>"
    cost = f"{result.seconds:.1f} s; a client sends {_kilobytes(result.bytes_up)} a round and receives "
    cost += _kilobytes(result.bytes_down)
    return f'{_html_scores([result])}<p style="{_NOTE}">{cost}</p>{_html_influence(result)}'


def to_pandas(result: Result) -> Any:
    """Every metric of every scored round; see `Result.to_pandas`."""
    return _frame(COLUMNS, long_rows(result))


def long_rows(result: Result) -> Iterator[tuple[int, int, str, str, str, float]]:
    """One row a value, as in ``metrics.jsonl``; a metric that a client does not have has no row."""
    names = result.federation.names
    for report in result.rounds:
        for point, clients in report.metrics.items():
            for name, own in zip(names, clients, strict=True):
                for metric, value in own.items():
                    yield report.seed, report.round, name, point, metric, value


def plot_accuracy(result: Result, point: Point | None, seed: int | None, ax: Axes | None) -> Axes:
    """Accuracy over rounds; see `Result.plot_accuracy`."""
    from fedc2i.report import figures

    point = result.method.headline if point is None else point
    _check_point(point)
    own = _scored(result, seed)
    axis = _axes(ax, 6, 3.8)
    figures.accuracy_panel(axis, own, point)
    figures.name_lines(axis)
    axis.set_title(figures.plain(f"{own.label} on {own.config.data}, {point}{figures.mean_of(own)}"), fontsize=10)
    return axis


def plot_influence(result: Result, round: int | None, seed: int | None, client: str | None, ax: Axes | None) -> Axes:
    """Influence as a heat map; see `Result.plot_influence`."""
    from fedc2i.report import figures
    from fedc2i.report.html.packing import influence_rounds, influences

    own, names, classes = _of_seed(result, seed), result.federation.names, result.federation.classes
    if client is not None and client not in names:
        raise UserError(f"client must be one of {', '.join(names)}, got '{client}'")
    kind = "influence_vector" if client is None else "influence_matrix"
    measured = influences(own, kind)
    if not measured.size:
        raise UserError(f"{result.label} measured no {kind.replace('_', ' ')}; methods such as fedc2i do")
    every, numbers = mean_weights(measured, helpers=3), influence_rounds(own, kind)
    first, last = numbers[0], numbers[-1]
    try:
        number = last if round is None else operator.index(round)  # pandas has integers of its own
    except TypeError:
        number = first - 1
    if not first <= number <= last or isinstance(round, bool):
        raise UserError(f"round must be a whole number from {first} to {last}, got {round}")
    values = every[number - first] if client is None else every[number - first, names.index(client)]
    if not np.isfinite(values).any():
        raise UserError(f"nothing was measured in round {number}")
    side = min(max(3.2, 0.62 * len(names)), 8)
    if client is None:
        axis = _axes(ax, side + 1, side)
        image = figures.vector_panel(axis, values, float(np.nanmax(values)), names, names)
        axis.set(xlabel="client that helps", ylabel="client that is helped")
        label, title = "influence λ", f"{own.label} on {own.config.data}"
    else:
        axis = _axes(ax, max(4.2, min(0.45 * len(classes) + 1, 9)), max(3.0, 0.6 * side))
        shades = figures.around_equal_share(values, len(names))
        image = figures.matrix_panel(axis, values, shades, classes, names)
        axis.set(xlabel="class", ylabel="client that helps")
        label, title = "influence Λ (white: equal share)", f"{own.label}: who helps {client}"
    axis.figure.colorbar(image, ax=axis, shrink=0.9, label=label)
    axis.set_title(figures.plain(f"{title}, round {number}{figures.mean_of(own)}"), fontsize=10)
    return axis


def _frame(columns: Sequence[str], rows: Iterator[tuple[Any, ...]]) -> Any:
    try:
        import pandas
    except ImportError:
        raise UserError("to_pandas needs pandas: pip install 'fedc2i[notebook]'") from None
    return pandas.DataFrame.from_records(list(rows), columns=list(columns))


def _comparison(results: Sequence[Result]) -> Table:
    from fedc2i.report import tables

    if not results:
        raise UserError("this comparison is empty")
    if len({(own.federation.names, own.config.seeds) for own in results}) > 1:
        raise UserError("results of different clients or seeds do not go into one table")
    return tables.comparison(results)


def _html_scores(results: Sequence[Result]) -> str:
    """The best of each point in bold, if there are several to choose from."""
    from fedc2i.report.html.compare import best_of_each_point

    return _html_table(best_of_each_point(_comparison(results), results), len(results[0].federation.names))


def _html_table(table: Table, clients: int) -> str:
    """The first clients and all averages; the notes below."""
    shown = [*range(2 + min(clients, MOST_CLIENTS)), *range(2 + clients, len(table.header))]
    notes = [f"{MOST_CLIENTS} of {clients} clients are shown."] if clients > MOST_CLIENTS else []
    lines = [_html_row("th", [(table.header[k], k, "") for k in shown], _LINE)]
    for row in table.rows:
        cells = [(row.cells[k], k, ";font-weight:bold" if k in row.best else "") for k in shown]
        lines.append(_html_row("td", cells, _LINE if row.ends_section else ""))
    below = "".join(f'<p style="{_NOTE}">{escape(note)}</p>' for note in [*notes, *table.notes])
    return f"<p><b>{escape(table.title)}</b></p>{_html_lines(lines)}{below}"


def _html_lines(lines: Sequence[str]) -> str:
    """A table that scrolls by itself where a page is too narrow."""
    return f'<div style="overflow-x:auto"><table style="{_TABLE}">{"".join(lines)}</table></div>'


def _html_row(tag: str, cells: Sequence[tuple[str, int, str]], style: str) -> str:
    parts = []
    for text, column, own in cells:
        align = "left" if column < 2 else "right"
        shown = "–" if text.startswith("nan") else escape(text)
        parts.append(f'<{tag} style="{_CELL.format(align)}{style}{own}">{shown}</{tag}>')
    return f"<tr>{''.join(parts)}</tr>"


def _html_influence(result: Result) -> str:
    """λ after the last round, shaded, mean over seeds; nothing if it was not measured or has too many rows."""
    from fedc2i.report import figures
    from fedc2i.report.html.packing import last_influence

    last, names = last_influence(result, "influence_vector"), result.federation.names
    if not last.size or len(names) > MOST_CLIENTS:
        return ""
    top = float(np.nanmax(last)) or 1.0
    lines = [_html_row("th", [("", 0, ""), *((name, 2, "") for name in names)], _LINE)]
    for name, row in zip(names, last.tolist(), strict=True):
        shades = [0.0 if math.isnan(value) else max(0.0, 0.55 * value / top) for value in row]
        cells = [
            (f"{value:.2f}", 2, f";background:rgba(31,119,180,{shade:.2f})")
            for value, shade in zip(row, shades, strict=True)
        ]
        lines.append(_html_row("td", [(name, 0, ""), *cells], ""))
    title = "Influence λ after the last round: row, who is helped; column, who helps"
    return f"<p><b>{title}{figures.mean_of(result)}</b></p>{_html_lines(lines)}"


def _kilobytes(count: int) -> str:
    return f"{count / 1000:,.1f} kB"


def _is_scored(result: Result) -> bool:
    scored = {report.seed for report in result.rounds if report.metrics}
    return scored.issuperset(result.config.seeds)


def _scored(result: Result, seed: int | None) -> Result:
    own = _of_seed(result, seed)
    if not any(report.metrics for report in own.rounds):
        raise UserError(f"{result.label}: no round was scored yet")
    return own


def _of_seed(result: Result, seed: int | None) -> Result:
    if seed is None:
        return result
    if seed not in result.config.seeds:
        raise UserError(f"seed must be one of {', '.join(map(str, result.config.seeds))}, got {seed}")
    return result.only(seed)


def _check_point(point: str) -> None:
    if point not in POINTS:
        raise UserError(f"point must be {' or '.join(POINTS)}, got '{point}'")


def _axes(ax: Axes | None, wide: float, high: float) -> Axes:
    """The given one, or that of a new figure, which a notebook shows by itself."""
    if ax is not None:
        return ax
    from matplotlib import pyplot

    return pyplot.subplots(figsize=(wide, high), layout="constrained")[1]
