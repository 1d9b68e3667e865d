"""Results as tables: comparisons beside the published figures, and who helps whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.analysis.significance import indistinguishable, pooled_deviations
from fedc2i.core.files import to_json, write_atomically
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.attack_notes import attack_notes
from fedc2i.report.published import misprints, published
from fedc2i.report.table import Row, Table
from fedc2i.runs.results import Result, Score

POINTS_NOTE = (
    "received: the model a client starts a round from; trained: after its local run; *: the method's headline."
)
BEST_NOTE = "bold: the best of its column at that point."
TIES_NOTE = (
    "~: {average} not told apart from the best at that point by a paired bootstrap over seeds (95 % interval). With "
    "three seeds an interval leaves zero out as soon as all seeds agree, as they do for one in four equal pairs."
)
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
    tied = ties(results)
    table = Table(_title(first), ("Method", "Point", *columns), averages=len(columns) - len(first.federation.names))
    for result in results:
        printed = published_row(result)
        for point in POINTS:
            own = scores[result.key, point]
            marks = frozenset(k + 2 for k, c in enumerate(columns) if round(own[c].mean, 2) == best.get((point, c)))
            cells = [str(own[column]) for column in columns]
            cells[-1] += " ~" if (result.key, point) in tied else ""
            table.rows.append(Row((result.label, point_label(result, point), *cells), best=marks))
        if printed:
            cells = [str(printed[c]) if c in printed else "" for c in columns]
            table.rows.append(Row((result.label, "published", *cells), "published"))
            for point in POINTS if against_paper else ():
                away = [difference(scores[result.key, point][c], printed.get(c), c, result) for c in columns]
                table.rows.append(Row((result.label, f"difference, {point}", *away), "published"))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [
        POINTS_NOTE,
        *([BEST_NOTE] if best else []),
        *attack_notes(results),
        *([TIES_NOTE.format(average=columns[-1])] if tied else []),
        *([DIFFERENCE_NOTE] if against_paper else []),
        *other_protocol(first),
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


def ties(results: Sequence[Result]) -> set[tuple[str, Point]]:
    """Rows whose last average is not the best of its point, yet not distinguishable from it."""
    found: set[tuple[str, Point]] = set()
    if len(results[0].config.seeds) < 2:
        return found
    for point in POINTS:
        values = {result.key: list(result.averages(point).values())[-1] for result in results}
        best = max(values, key=lambda key: values[key].mean())
        found |= {(key, point) for key in values if key != best and indistinguishable(values[best], values[key])}
    return found


def difference(ours: Score, theirs: Score | None, column: str, result: Result) -> str:
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
    return f"Test accuracy (%) on {config.data}, {config.model}, {rounds}, {seeds_label(result)}"


def point_label(result: Result, point: Point) -> str:
    """With a star at the point that the method's authors report."""
    return f"{point} *" if point == result.method.headline else point


def published_row(result: Result) -> dict[str, Score]:
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


def other_protocol(result: Result) -> list[str]:
    """A warning where published rows stand beside results of other settings."""
    preset, config = result.federation.preset, result.config
    other = [name for name in ("model", "rounds") if preset.get(name, getattr(config, name)) != getattr(config, name)]
    if not other or not published_row(result):
        return []
    said = ", ".join(f"{name} {getattr(config, name)} for {preset[name]}" for name in other)
    return [f"Not the protocol on {config.data} ({said}): the published rows are no comparison."]


def seeds_label(result: Result) -> str:
    """How many seeds a table is over."""
    seeds = result.config.seeds
    return f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else f"seed {seeds[0]}"


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """``comparison.md`` and ``comparison.json`` beside the methods' run folders."""
    write_atomically(folder / "comparison.md", comparison(results).to_markdown().encode())
    write_atomically(folder / "comparison.json", to_json({result.key: result.summary() for result in results}).encode())
