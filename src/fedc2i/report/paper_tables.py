"""The paper's tables over several data sets: ablation, γ study and cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedc2i.engine.records import POINTS, Point
from fedc2i.report import points
from fedc2i.report.comparison import BEST, DIFFERENCE_NOTE, difference, seeds_label, tie_notes, ties
from fedc2i.report.notes import other_protocol, reconstructions
from fedc2i.report.published import published_row
from fedc2i.report.table import Row, Table
from fedc2i.runs.results import Result, Score

CHOSEN = "the γ that validation accuracy chooses at that point, and its test accuracy"
VALIDATION_NOTE = "Validation accuracy is averaged over the clients that have validation data."
PUBLISHED_NOTE = "The published Avg is over all clients of the published data, at a point the paper does not name."


def averages(title: str, found: Sequence[Sequence[Result]]) -> Table:
    """The averages of every method on several data sets, at both points, beside the published ones.

    Args:
        title: of the table.
        found: for each data set the same methods in the same order.
    """
    header = [name for results in found for name in (*_average_columns(results[0]), *_paper_columns(results[0]))]
    table = Table(f"{title}; {seeds_label(found[0][0])}", ("Method", points.COLUMN, *header), bold=BEST)
    all_ties = [ties(results) for results in found]
    for rows in zip(*found, strict=True):
        for point in POINTS:
            cells: list[str] = []
            marks: set[int] = set()
            for result, results, tied in zip(rows, found, all_ties, strict=True):
                own = _average_cells(result, point)
                marks |= {2 + len(cells) + k for k in range(len(own)) if _is_best(result, results, point, k)}
                own[-1] += " ~" if (result.key, point) in tied else ""
                cells += [*own, *_paper_cells(result, point)]
            where = points.starred(point, rows[0].method.headline)
            row = Row((rows[0].label, where, *cells), best=frozenset(marks), ends_section=point == "trained")
            table.rows.append(row)
    tied_notes = tie_notes("a data set's last average", found[0][0])
    table.notes = [points.NOTE, *tied_notes, PUBLISHED_NOTE, DIFFERENCE_NOTE, *_notes(found)]
    return table


def gamma_study(found: Sequence[Sequence[Result]]) -> Table:
    """Validation and test averages for every γ on several data sets; the choice falls on validation alone."""
    header: list[str] = []
    for results in found:
        header += [f"{results[0].config.data} validation", *_average_columns(results[0]), *_paper_columns(results[0])]
    table = Table(f"Effect of γ; {seeds_label(found[0][0])}", ("γ", points.COLUMN, *header), bold=CHOSEN)
    for rows in zip(*found, strict=True):
        for point in POINTS:
            cells: list[str] = []
            marks: set[int] = set()
            for result, results in zip(rows, found, strict=True):
                own = [str(_validation(result, point)), *_average_cells(result, point)]
                if result is max(results, key=lambda other: _validation(other, point).mean):
                    marks |= set(range(2 + len(cells), 2 + len(cells) + len(own)))
                cells += [*own, *_paper_cells(result, point)]
            gamma = f"{rows[0].config.options['gamma']:g}"
            where = points.starred(point, rows[0].method.headline)
            row = Row((gamma, where, *cells), best=frozenset(marks), ends_section=point == "trained")
            table.rows.append(row)
    table.notes = [points.NOTE, VALIDATION_NOTE, PUBLISHED_NOTE, DIFFERENCE_NOTE, *_notes(found)]
    return table


def costs(results: Sequence[Result]) -> Table:
    """Measured cost of every method: traffic of one client in one round, and seconds of a whole round."""
    device = results[0].config.torch_device()
    table = Table(
        f"Cost on {results[0].config.data}, {results[0].config.model}, {len(results[0].federation.names)} clients",
        ("Method", "Device", "up (kB)", "down (kB)", "seconds a round"),
    )
    for result in results:
        sizes = (f"{result.bytes_up / 1000:.1f}", f"{result.bytes_down / 1000:.1f}")
        table.rows.append(Row((result.label, device.type, *sizes, f"{result.seconds / len(result.rounds):.3f}")))
    table.notes = [
        "up and down: bytes of the tensors that one client sends and receives in a round, on average; seconds: local "
        "training of all clients, exchange, and evaluation in rounds that are scored. Seeds are computed side by "
        "side; this is the share of one.",
        *reconstructions(results),
    ]
    return table


def _average_columns(result: Result) -> list[str]:
    return [f"{result.config.data} {title}" for title in result.averages("trained")]


def _average_cells(result: Result, point: Point) -> list[str]:
    return [str(Score.of(values)) for values in result.averages(point).values()]


def _is_best(result: Result, results: Sequence[Result], point: Point, average: int) -> bool:
    """Whether no other result has a higher average, as printed."""
    means = {other.key: round(float(list(other.averages(point).values())[average].mean()), 2) for other in results}
    return means[result.key] == max(means.values())


def _paper_columns(result: Result) -> list[str]:
    return [f"{result.config.data} published Avg", "difference"]


def _paper_cells(result: Result, point: Point) -> list[str]:
    """The published average, said once, beside the trained point, and how far ours is from it."""
    printed = published_row(result).get("Avg")
    shown = str(printed) if printed is not None and point == "trained" else ""
    return [shown, difference(result.scores(point)["Avg"], printed, "Avg", result)]


def _notes(found: Sequence[Sequence[Result]]) -> list[str]:
    return [note for results in found for note in (*other_protocol(results[0]), *results[0].federation.notes)]


def _validation(result: Result, point: Point) -> Score:
    return Score.of(np.nanmean(result.accuracy(point, "validation_accuracy"), axis=1))
