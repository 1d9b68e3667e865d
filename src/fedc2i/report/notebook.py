"""Results and comparisons as HTML tables in a notebook."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from fedc2i.analysis.weights import of_last_round
from fedc2i.report import figures
from fedc2i.report.comparison import comparison_table
from fedc2i.report.table import size
from fedc2i.runs.results import Comparison, Result

MOST_CLIENTS = 12  # columns of an HTML table
# Text and background have no colour, so that both are those of the notebook, light or dark.
_TABLE = "color:inherit;border-collapse:collapse;font-variant-numeric:tabular-nums;margin:0.4em 0"
_CELL = "padding:0.15em 0.6em;text-align:{};white-space:nowrap"
_LINE = ";border-bottom:1px solid rgba(127,127,127,0.6)"
_NOTE = "font-size:85%;opacity:0.8;margin:0.2em 0"


def register() -> None:
    """Makes IPython show results and comparisons as HTML, if this is an IPython session."""
    from IPython.core.getipython import get_ipython

    session = get_ipython()
    if session is not None and session.display_formatter is not None:
        formatter = session.display_formatter.formatters["text/html"]
        formatter.for_type(Result, result_html)
        formatter.for_type(Comparison, comparison_html)


def result_html(result: Result) -> str:
    """Scores at both points and, if it was measured, who weighs most with whom."""
    if not _is_scored(result):
        return f"<p>{escape(repr(result))}</p>"
    cost = f"{result.seconds:.1f} s; a client sends {size(result.bytes_up)} a round and receives "
    cost += size(result.bytes_down)
    return f'{_scores([result])}<p style="{_NOTE}">{cost}</p>{_influence(result)}'


def comparison_html(results: Comparison) -> str:
    """One table of all results, or a table for each where they differ in clients or seeds."""
    alike = len({(own.federation.names, own.config.seeds) for own in results}) == 1
    if not alike or not all(map(_is_scored, results)):
        return "".join(map(result_html, results)) or "<p>an empty comparison</p>"
    return _scores(results)


def _scores(results: Sequence[Result]) -> str:
    """The first clients and all averages; the notes below."""
    table, clients = comparison_table(results), len(results[0].federation.names)
    shown = [*range(2 + min(clients, MOST_CLIENTS)), *range(2 + clients, len(table.header))]
    notes = [f"{MOST_CLIENTS} of {clients} clients are shown."] if clients > MOST_CLIENTS else []
    lines = [_row("th", [(table.header[k], k, "") for k in shown], _LINE)]
    for row in table.rows:
        cells = [(row.cells[k], k, ";font-weight:bold" if k in row.best else "") for k in shown]
        lines.append(_row("td", cells, _LINE if row.ends_section else ""))
    below = "".join(f'<p style="{_NOTE}">{escape(note)}</p>' for note in [*notes, *table.all_notes])
    return f"<p><b>{escape(table.title)}</b></p>{_lines(lines)}{below}"


def _lines(lines: Sequence[str]) -> str:
    """A table that scrolls by itself where a page is too narrow."""
    return f'<div style="overflow-x:auto"><table style="{_TABLE}">{"".join(lines)}</table></div>'


def _row(tag: str, cells: Sequence[tuple[str, int, str]], style: str) -> str:
    parts = []
    for text, column, own in cells:
        align = "left" if column < 2 else "right"
        parts.append(f'<{tag} style="{_CELL.format(align)}{style}{own}">{escape(text)}</{tag}>')
    return f"<tr>{''.join(parts)}</tr>"


def _influence(result: Result) -> str:
    """λ after the last round, shaded, mean over seeds; empty if it was not measured or has too many rows."""
    last, names = of_last_round(result, "influence_vector"), result.federation.names
    if not last.size or len(names) > MOST_CLIENTS:
        return ""
    top = float(np.nanmax(last)) or 1.0
    lines = [_row("th", [("", 0, ""), *((name, 2, "") for name in names)], _LINE)]
    for name, row in zip(names, last.tolist(), strict=True):
        shades = [0.0 if math.isnan(value) else max(0.0, 0.55 * value / top) for value in row]
        cells = [
            (f"{value:.2f}".replace("nan", "–"), 2, f";background:rgba(31,119,180,{shade:.2f})")
            for value, shade in zip(row, shades, strict=True)
        ]
        lines.append(_row("td", [(name, 0, ""), *cells], ""))
    title = "Influence λ after the last round: row, for whom; column, whose model"
    return f"<p><b>{title}{figures.mean_of(result)}</b></p>{_lines(lines)}"


def _is_scored(result: Result) -> bool:
    scored = {report.seed for report in result.rounds if report.metrics}
    return scored.issuperset(result.config.seeds)
