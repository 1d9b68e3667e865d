"""The study of FedC²I⁺ as tables: scores, paired differences, one option removed at a time, the choice of settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fedc2i.analysis.verdicts import Paired, Verdict
from fedc2i.engine.records import POINTS
from fedc2i.methods.base import Method
from fedc2i.report.study_plus import GRID, OURS, PRESET, Found, Study, plain, validation
from fedc2i.report.study_plus_verdict import compare, trial
from fedc2i.report.table import Row, Table
from fedc2i.report.tables import BEST_NOTE, POINTS_NOTE, point_label, seeds_label
from fedc2i.runs.results import Result, Score

SEEDS_NOTE = "Seeds change initial models and batches, not the data: standard errors say nothing about other images."
PAIRED_NOTE = (
    "difference: {ours} minus the row in points of the average that is named, mean over paired seeds with its standard "
    "error; wins / losses / ties: seeds in which {ours} is above, below, equal."
)


def write(folder: Path, work: Study, main: Found, parts: Found, said: Verdict) -> list[str]:
    """Every table as Markdown, CSV and LaTeX; returns the files' names."""
    notes = [*_how(work, main), SEEDS_NOTE, *_data_notes(main)]
    alone = [*trial(main), *notes]  # the verdict says so by itself
    labels = {name: _label(name, main) for name in main[next(iter(main))]}
    title = f"{_title(main)} on equal terms: test accuracy (%), {_seeds(main)}"
    written = scores(title, main, labels, alone).write(folder, "plus")
    written += paired(main, labels, [*notes, *said.sentences]).write(folder, "plus-paired")
    ours = labels[OURS]
    labels = {OURS: ours, **{name: f"with {name}" for name in parts[next(iter(parts))] if name != OURS}}
    title = f"{ours} with one option removed at a time: test accuracy (%), {_seeds(parts)}"
    more = "Nothing was chosen anew for what is left, and the differences need not add up; gamma=0 is FedAvg's mixing."
    written += scores(title, parts, labels, [more, *alone], differences=True).write(folder, "plus-parts")
    return written + (tuning_table(work).write(folder, "plus-tuning") if work.tuned else [])


def scores(title: str, found: Found, labels: Mapping[str, str], notes: list[str], differences: bool = False) -> Table:
    """One row per method and point, the averages of every benchmark as columns; with or without differences."""
    header: list[str] = ["Method", "Point"]
    for data, rows in found.items():
        header += [f"{data} {average}" for average in rows[OURS].averages("trained")]
        header += _paired_header(data, rows[OURS]) if differences else []
    table, pairs = Table(title, tuple(header)), compare(found)
    for name, label in labels.items():
        for point in POINTS:
            cells = [label, point_label(found[next(iter(found))][name], point)]
            best: set[int] = set()
            for data, rows in found.items():
                for average, values in rows[name].averages(point).items():
                    means = [round(float(other.averages(point)[average].mean()), 2) for other in rows.values()]
                    best |= {len(cells)} if round(float(values.mean()), 2) == max(means) else set()
                    cells.append(str(Score.of(values)))
                cells += _paired_cells(pairs.get((data, name, point))) if differences else []
            table.rows.append(Row(tuple(cells), best=frozenset(best), ends_section=point == POINTS[-1]))
    paired_note = [PAIRED_NOTE.format(ours=_title(found))] if differences else []
    table.notes = [POINTS_NOTE, BEST_NOTE, *paired_note, *notes]
    return table


def paired(found: Found, labels: Mapping[str, str], notes: list[str]) -> Table:
    """FedC²I⁺ minus every other row, by point and benchmark."""
    header = [name for data, rows in found.items() for name in _paired_header(data, rows[OURS])]
    title = f"{labels[OURS]} minus every other method, paired over {_count(found)}"
    table, pairs = Table(title, ("Minus", "Point", *header)), compare(found)
    for name in labels:
        for point in POINTS if name != OURS else ():
            cells = [cell for data in found for cell in _paired_cells(pairs[data, name, point])]
            where = point_label(found[next(iter(found))][name], point)
            table.rows.append(Row((labels[name], where, *cells), ends_section=point == POINTS[-1]))
    table.notes = [POINTS_NOTE, PAIRED_NOTE.format(ours=_title(found)), *notes]
    return table


def tuning_table(work: Study) -> Table:
    """Every grid point's validation accuracy, and the choice; no test accuracy was looked at."""
    benchmarks = list(dict.fromkeys(data for data, _ in work.tuned))
    header = [f"{data} {what}" for data in benchmarks for what in (*POINTS, "both", "choice")]
    seeds = ", ".join(map(str, work.tuning_seeds))
    table = Table(f"Choice of settings: validation accuracy (%), tuning seeds {seeds}", ("Method", "Setting", *header))
    for name in GRID:
        for results in zip(*(work.tuned[data, name] for data in benchmarks), strict=True):
            cells = [results[0].method.title, setting(results[0].method, name)]
            best: set[int] = set()
            for data, result in zip(benchmarks, results, strict=True):
                taken = result.method == work.chosen[data, name]
                best |= set(range(len(cells), len(cells) + 4)) if taken else set()
                cells += [str(Score.of(validation(result, points))) for points in (*((p,) for p in POINTS), POINTS)]
                cells.append("chosen" if taken else "")
            table.rows.append(Row(tuple(cells), best=frozenset(best)))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [
        "Chosen for each benchmark: the highest mean over both points, the tuning seeds and the clients that have "
        "validation data; a tie goes to the preset, then to the first. Test data and the reported seeds had no part.",
    ]
    return table


def _how(work: Study, found: Found) -> list[str]:
    """How settings came about."""
    if not work.tuning_seeds:
        return ["No setting was chosen (--no-tuning): every method runs as it comes."]
    sizes = {name: math.prod(map(len, GRID[name].values())) for name in GRID}
    many = ", ".join(f"{found[next(iter(found))][name].method.title} {size}" for name, size in sizes.items())
    seeds = ", ".join(map(str, work.tuning_seeds))
    return [
        f"Settings in brackets, but for presets, were chosen on validation accuracy with seeds {seeds}, which are not "
        f"reported, out of so many: {many}; see plus-tuning. Methods without brackets run as they come."
    ]


def _data_notes(found: Found) -> list[str]:
    return list(dict.fromkeys(note for rows in found.values() for note in rows[OURS].federation.notes))


def _label(name: str, found: Found) -> str:
    """The method's title, and for a tuned one its setting, by benchmark where they differ."""
    methods = {data: rows[name].method for data, rows in found.items()}
    method, tuned = next(iter(methods.values())), name.removesuffix(PRESET)
    if tuned not in GRID:
        return method.title
    settings = {data: setting(other, tuned) for data, other in methods.items()}
    same = len({*settings.values()}) == 1
    said = setting(method, tuned) if same else "; ".join(f"{data}: {own}" for data, own in settings.items())
    return f"{method.title}{PRESET * (tuned != name)} ({said})"


def setting(method: Method, name: str) -> str:
    """What was chosen of a tuned method."""
    return ", ".join(f"{option}={plain(getattr(method, option))}" for option in GRID[name])


def _title(found: Found) -> str:
    return found[next(iter(found))][OURS].method.title


def _seeds(found: Found) -> str:
    return seeds_label(found[next(iter(found))][OURS])


def _count(found: Found) -> str:
    count = len(found[next(iter(found))][OURS].config.seeds)
    return "1 seed" if count == 1 else f"{count} seeds"


def _paired_header(data: str, result: Result) -> list[str]:
    average = list(result.averages("trained"))[-1]
    return [f"{data} {average} difference", f"{data} standard error", f"{data} wins / losses / ties"]


def _paired_cells(pair: Paired | None) -> list[str]:
    """Empty for FedC²I⁺ itself."""
    return ["", "", ""] if pair is None else pair.cells()
