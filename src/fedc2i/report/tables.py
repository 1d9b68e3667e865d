"""Results as tables: comparisons beside the published figures, ablation, γ study, cost, influence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.engine.rounds import POINTS, Point
from fedc2i.paper import misprints, published
from fedc2i.report.attacked import attack_notes
from fedc2i.report.table import Row, Table
from fedc2i.results import Result, Score
from fedc2i.runs import to_json, write_atomically
from fedc2i.significance import indistinguishable, pooled_deviations

POINTS_NOTE = (
    "received: the model a client starts a round from; trained: after its local run; *: the method's headline."
)
BEST_NOTE = "bold: the best of its column at that point."
TIES_NOTE = (
    "~: {average} not told apart from the best at that point by a paired bootstrap over seeds (95 % interval). With "
    "three seeds an interval leaves zero out as soon as all seeds agree, as they do for one in four equal pairs."
)
PUBLISHED_NOTE = "The published Avg is over all clients of the published data, at a point the paper does not name."
DIFFERENCE_NOTE = (
    "difference: ours minus published in pooled standard deviations; in points (pt) where one of the two has none. "
    "Nothing was tuned towards the published rows."
)


def comparison(results: Sequence[Result], against_paper: bool = False) -> Table:
    """One row per method and evaluation point, one column per client, averages last; published rows below, if any.

    Args:
        results: of different methods on the same data with the same seeds.
        against_paper: adds the differences from the published rows.
    """
    first = results[0]
    columns = list(first.scores("trained"))
    scores = {(result.key, point): result.scores(point) for result in results for point in POINTS}
    best = {
        (point, column): max(round(scores[result.key, point][column].mean, 2) for result in results)
        for point in POINTS
        for column in columns
        if len(results) > 1
    }
    ties = _ties(results)
    table = Table(_title(first), ("Method", "Point", *columns), averages=len(columns) - len(first.federation.names))
    for result in results:
        printed = _published(result)
        for point in POINTS:
            own = scores[result.key, point]
            marks = frozenset(k + 2 for k, c in enumerate(columns) if round(own[c].mean, 2) == best.get((point, c)))
            cells = [str(own[column]) for column in columns]
            cells[-1] += " ~" if (result.key, point) in ties else ""
            table.rows.append(Row((result.label, _point(result, point), *cells), best=marks))
        if printed:
            cells = [str(printed[c]) if c in printed else "" for c in columns]
            table.rows.append(Row((result.label, "published", *cells), "published"))
            for point in POINTS if against_paper else ():
                away = [_difference(scores[result.key, point][c], printed.get(c), c, result) for c in columns]
                table.rows.append(Row((result.label, f"difference, {point}", *away), "published"))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [
        POINTS_NOTE,
        *([BEST_NOTE] if best else []),
        *attack_notes(results),
        *([TIES_NOTE.format(average=columns[-1])] if ties else []),
        *([DIFFERENCE_NOTE] if against_paper else []),
        *_other_protocol(first),
        *(misprints(first.federation.name) if against_paper else []),
        *reconstructions(results),
        *privacy_costs(results),
        *first.federation.notes,
    ]
    return table


def reconstructions(results: Sequence[Result]) -> list[str]:
    """A line for every method that had to be reconstructed."""
    return list(dict.fromkeys(result.method.reconstruction for result in results if result.method.reconstruction))


def privacy_costs(results: Sequence[Result]) -> list[str]:
    """A line for every ε among results whose uploads were clipped."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.privacy is not None:
            found.setdefault(str(result.privacy), []).append(result.label)
    return [f"Privacy of {', '.join(labels)}: {text}." for text, labels in found.items()]


def _ties(results: Sequence[Result]) -> set[tuple[str, Point]]:
    """Rows whose last average is not the best of its point, yet not distinguishable from it."""
    found: set[tuple[str, Point]] = set()
    if len(results[0].config.seeds) < 2:
        return found
    for point in POINTS:
        values = {result.key: list(result.averages(point).values())[-1] for result in results}
        best = max(values, key=lambda key: values[key].mean())
        found |= {(key, point) for key in values if key != best and indistinguishable(values[best], values[key])}
    return found


def _difference(ours: Score, theirs: Score | None, column: str, result: Result) -> str:
    """How far a cell is from the published one; empty where they are not of the same data."""
    stand_ins = {name for members in result.federation.averages.values() for name in result.federation.names}
    for members in result.federation.averages.values():
        stand_ins -= set(members)
    if theirs is None or column in stand_ins or (column == "Avg" and stand_ins):
        return ""
    deviations = pooled_deviations(ours.mean, ours.sd, theirs.mean, theirs.sd)
    return f"{ours.mean - theirs.mean:+z.2f} pt" if deviations is None else f"{deviations:+z.1f} sd"


def _title(result: Result) -> str:
    config = result.config
    rounds = "1 round" if config.rounds == 1 else f"{config.rounds} rounds"
    return f"Test accuracy (%) on {config.data}, {config.model}, {rounds}, {_seeds(result)}"


def _point(result: Result, point: Point) -> str:
    return f"{point} *" if point == result.method.headline else point


def _published(result: Result) -> dict[str, Score]:
    """The paper's row, with the data set's further averages computed from its columns."""
    row = published(result.federation.name, result.key)  # a partition of it has another name, and no such row
    for title, members in result.federation.averages.items():
        if all(member in row for member in members):
            row[title] = Score(float(np.mean([row[member].mean for member in members])), None)
    return row


def influence(result: Result, width: int) -> RichTable | Text | None:
    """The influence vectors after the last round, shaded, mean over seeds; None if nothing was measured.

    Where they do not fit into ``width``, a line that says where to look.
    """
    vectors = [result.influence("influence_vector", seed) for seed in result.config.seeds]
    if not all(vector.size for vector in vectors):
        return None
    mean = np.mean([vector[-1] for vector in vectors], axis=0)
    names = result.federation.names
    if max(map(len, names)) + sum(max(len(name), 5) + 3 for name in names) + 4 > width:
        return Text(f"Who helps whom: {result.label}, {len(names)} clients, see influence.png in the run folder\n")
    table = RichTable(
        title=Text(
            f"Who helps whom: {result.label}, influence vector λ after the last round (row: who is helped)",
            "table.title",
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right")
    for m, name in enumerate(names):
        table.add_row(Text(name), *(_shaded(value, len(names)) for value in mean[m]))
    return table


def _shaded(value: float, clients: int) -> Text:
    if np.isnan(value):
        return Text("-", style="dim")
    uniform = 1 / clients
    style = "bold green" if value > 1.2 * uniform else "dim" if value < 0.8 * uniform else ""
    return Text(f"{value:.3f}", style=style)


def averages(title: str, found: Sequence[Sequence[Result]]) -> Table:
    """The averages of every method on several data sets, at both points, beside the published ones.

    Args:
        title: of the table.
        found: for each data set the same methods in the same order.
    """
    header = [name for results in found for name in (*_average_columns(results[0]), *_paper_columns(results[0]))]
    table = Table(f"{title}; {_seeds(found[0][0])}", ("Method", "Point", *header))
    ties = [_ties(results) for results in found]
    for rows in zip(*found, strict=True):
        for point in POINTS:
            cells: list[str] = []
            marks: set[int] = set()
            for result, results, tied in zip(rows, found, ties, strict=True):
                own = _average_cells(result, point)
                marks |= {2 + len(cells) + k for k in range(len(own)) if _is_best(result, results, point, k)}
                own[-1] += " ~" if (result.key, point) in tied else ""
                cells += [*own, *_paper_cells(result, point)]
            row = Row((rows[0].label, _point(rows[0], point), *cells), best=frozenset(marks))
            table.rows.append(replace(row, ends_section=point == "trained"))
    table.notes = [
        POINTS_NOTE,
        BEST_NOTE,
        TIES_NOTE.format(average="the last average of a data set"),
    ]
    table.notes += [PUBLISHED_NOTE, DIFFERENCE_NOTE, *_notes(found)]
    return table


def gamma_study(found: Sequence[Sequence[Result]]) -> Table:
    """Validation and test averages for every γ on several data sets; the choice falls on validation alone."""
    header: list[str] = []
    for results in found:
        header += [f"{results[0].config.data} validation", *_average_columns(results[0]), *_paper_columns(results[0])]
    table = Table(f"Effect of γ; {_seeds(found[0][0])}", ("γ", "Point", *header))
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
            row = Row((gamma, _point(rows[0], point), *cells), best=frozenset(marks), ends_section=point == "trained")
            table.rows.append(row)
    table.notes = [
        POINTS_NOTE,
        "bold: the γ that validation accuracy chooses at that point, and its test accuracy; validation is averaged "
        "over the clients that have validation data.",
        PUBLISHED_NOTE,
        DIFFERENCE_NOTE,
        *_notes(found),
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
    printed = _published(result).get("Avg")
    shown = str(printed) if printed is not None and point == "trained" else ""
    return [shown, _difference(result.scores(point)["Avg"], printed, "Avg", result)]


def _notes(found: Sequence[Sequence[Result]]) -> list[str]:
    return [note for results in found for note in (*_other_protocol(results[0]), *results[0].federation.notes)]


def _other_protocol(result: Result) -> list[str]:
    """A warning where published rows stand beside results of other settings."""
    preset, config = result.federation.preset, result.config
    other = [name for name in ("model", "rounds") if preset.get(name, getattr(config, name)) != getattr(config, name)]
    if not other or not _published(result):
        return []
    said = ", ".join(f"{name} {getattr(config, name)} for {preset[name]}" for name in other)
    return [f"Not the protocol on {config.data} ({said}): the published rows are no comparison."]


def _validation(result: Result, point: Point) -> Score:
    return Score.of(np.nanmean(result.accuracy(point, "validation_accuracy"), axis=1))


def _seeds(result: Result) -> str:
    seeds = result.config.seeds
    return f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else f"seed {seeds[0]}"


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


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """``comparison.md`` and ``comparison.json`` beside the methods' run folders."""
    write_atomically(folder / "comparison.md", comparison(results).to_markdown().encode())
    write_atomically(folder / "comparison.json", to_json({result.key: result.summary() for result in results}).encode())
