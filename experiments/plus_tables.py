"""The study of FedC²I⁺ as tables: scores, paired differences, one option removed at a time, the choice of settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments.grid import SEEDS_NOTE
from experiments.plus_verdict import OURS, PRESET, Found, compare
from experiments.verdict import Verdict, counted
from fedc2i.analysis.significance import Paired
from fedc2i.engine.records import POINTS, Point
from fedc2i.methods.base import Method
from fedc2i.report.comparison import BEST, seeds_label
from fedc2i.report.table import POINT_COLUMN, POINT_NOTE, SHORT, Row, Table, starred
from fedc2i.runs.results import Array, Result, Score

PAIRED_NOTE = (
    "difference: {ours} minus the row in points of the named average, mean over paired seeds with its standard error; "
    "wins / losses / ties: seeds in which {ours} is above, below, equal."
)
PARTS_NOTE = "Settings were not chosen again without the option; differences need not add up; gamma=0 is FedAvg's mean."
TUNING_NOTE = (
    "Chosen for each benchmark: the highest mean over both points, the tuning seeds and the clients that have "
    "validation data; a tie goes to the preset, then to the first. Test data and the reported seeds had no part."
)
Options = Mapping[str, Mapping[str, Sequence[Any]]]  # the grid: by method, then by option


def tables(
    main: Found, parts: Found, grid: Options, verdict: Verdict, notes: list[str], warnings: Sequence[str]
) -> dict[str, Table]:
    """By file name: scores, paired differences with the verdict, and FedC²I⁺ with one option removed at a time."""
    first = next(iter(main.values()))[OURS]
    labels = {name: _label(name, main, grid) for name in next(iter(main.values()))}
    smaller = {name: f"with {name}" for name in next(iter(parts.values())) if name != OURS}
    titles = f"{first.method.title} on equal terms", f"{labels[OURS]} with one option removed at a time"
    scored, removed = (f"{title}: test accuracy (%), {seeds_label(first.config.seeds)}" for title in titles)
    notes = [SEEDS_NOTE, *notes]
    ours = {OURS: labels[OURS], **smaller}
    return {
        "plus": scores(scored, main, labels, [*warnings, *notes]),
        "plus-paired": paired(main, labels, [*notes, *verdict.sentences]),
        "plus-parts": scores(removed, parts, ours, [PARTS_NOTE, *warnings, *notes], differences=True),
    }


def scores(title: str, found: Found, labels: Mapping[str, str], notes: list[str], differences: bool = False) -> Table:
    """One row per method and point, the averages of every benchmark as columns; with or without differences."""
    header = ["Method", POINT_COLUMN]
    for data, rows in found.items():
        header += [f"{data} {average}" for average in rows[OURS].averages("trained")]
        header += _paired_header(data, rows[OURS]) if differences else []
    table, pairs, first = Table(title, tuple(header), bold=BEST), compare(found), next(iter(found.values()))
    for name, label in labels.items():
        for point in POINTS:
            cells, best = [label, starred(point, first[name].method.headline)], set[int]()
            for data, rows in found.items():
                for average, values in rows[name].averages(point).items():
                    means = [round(float(other.averages(point)[average].mean()), 2) for other in rows.values()]
                    best |= {len(cells)} if round(float(values.mean()), 2) == max(means) else set()
                    cells.append(str(Score.of(values)))
                cells += _paired_cells(pairs.get((data, name, point))) if differences else []
            table.rows.append(Row(tuple(cells), best=frozenset(best), ends_section=point == POINTS[-1]))
    more = [PAIRED_NOTE.format(ours=first[OURS].method.title)] if differences else []
    table.notes = [POINT_NOTE, *more, *notes]
    return table


def paired(found: Found, labels: Mapping[str, str], notes: list[str]) -> Table:
    """FedC²I⁺ minus every other row, by point and benchmark."""
    first = next(iter(found.values()))
    header = [name for data, rows in found.items() for name in _paired_header(data, rows[OURS])]
    seeds = counted(len(first[OURS].config.seeds), "seed")
    title = f"{labels[OURS]} minus every other method, paired over {seeds}"
    table, pairs = Table(title, ("Minus", POINT_COLUMN, *header)), compare(found)
    for name in labels:
        for point in POINTS if name != OURS else ():
            cells = [cell for data in found for cell in _paired_cells(pairs[data, name, point])]
            where = starred(point, first[name].method.headline)
            table.rows.append(Row((labels[name], where, *cells), ends_section=point == POINTS[-1]))
    table.notes = [POINT_NOTE, PAIRED_NOTE.format(ours=first[OURS].method.title), *notes]
    return table


def tuning(
    tuned: Mapping[tuple[str, str], Sequence[Result]],
    chosen: Mapping[tuple[str, str], Method],
    grid: Options,
    seeds: Sequence[int],
) -> Table:
    """Validation accuracy of every setting, and the choice; test accuracy had no part in it."""
    benchmarks = list(dict.fromkeys(data for data, _ in tuned))
    header = [f"{data} {what}" for data in benchmarks for what in (*SHORT.values(), "both", "choice")]
    listed = ", ".join(map(str, seeds))
    title = f"Choice of settings: validation accuracy (%) before and after local training, tuning seeds {listed}"
    table = Table(title, ("Method", "Setting", *header), bold="the choice")
    for name in grid:
        for results in zip(*(tuned[data, name] for data in benchmarks), strict=True):
            cells, best = [results[0].method.title, setting(results[0].method, grid[name])], set[int]()
            for data, result in zip(benchmarks, results, strict=True):
                taken = result.method == chosen[data, name]
                best |= set(range(len(cells), len(cells) + 4)) if taken else set()
                cells += [str(Score.of(validation(result, own))) for own in (*((p,) for p in POINTS), POINTS)]
                cells.append("chosen" if taken else "")
            table.rows.append(Row(tuple(cells), best=frozenset(best)))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [TUNING_NOTE]
    return table


def tuning_notes(found: Found, grid: Options, seeds: Sequence[int]) -> list[str]:
    """How settings were chosen."""
    if not seeds:
        return ["No setting was chosen (--no-tuning): every method runs with its preset."]
    rows = next(iter(found.values()))
    sizes = {name: int(np.prod([len(values) for values in grid[name].values()])) for name in grid}
    tried = ", ".join(f"{rows[name].method.title} {size}" for name, size in sizes.items())
    return [
        f"Settings in brackets were chosen on validation accuracy with seeds {', '.join(map(str, seeds))}, which are "
        f"not reported; settings tried: {tried}; see plus-tuning. Presets and methods without brackets were not tuned."
    ]


def validation(result: Result, at: Sequence[Point] = POINTS) -> Array:
    """``(seeds,)`` validation accuracy: the mean over points and over the clients that have validation data."""
    metrics = result.last(result.config.seeds[0]).metrics[at[0]]
    has = ["validation_accuracy" in own for own in metrics]
    return np.array(np.mean([result.accuracy(point, "validation_accuracy")[:, has] for point in at], axis=(0, 2)))


def setting(method: Method, options: Mapping[str, Any]) -> str:
    """The values of a tuned method's options."""
    return ", ".join(f"{option}={typed(getattr(method, option))}" for option in options)


def typed(value: Any) -> str:
    """An option's value as typed on a command line."""
    return f"{value:g}" if type(value) in (int, float) else str(value).lower()


def _label(name: str, found: Found, grid: Options) -> str:
    """The method's title, and for a tuned one its setting, by benchmark where they differ."""
    methods = {data: rows[name].method for data, rows in found.items()}
    title, tuned = next(iter(methods.values())).title, name.removesuffix(PRESET)
    if tuned not in grid:
        return title
    settings = {data: setting(method, grid[tuned]) for data, method in methods.items()}
    same = len({*settings.values()}) == 1
    listed = next(iter(settings.values())) if same else "; ".join(f"{data}: {own}" for data, own in settings.items())
    return f"{title}{PRESET * (tuned != name)} ({listed})"


def _paired_header(data: str, result: Result) -> list[str]:
    average = list(result.averages("trained"))[-1]
    return [f"{data} {average} difference", f"{data} standard error", f"{data} wins / losses / ties"]


def _paired_cells(pair: Paired | None) -> list[str]:
    """Empty for FedC²I⁺ itself."""
    return ["", "", ""] if pair is None else pair.cells()
