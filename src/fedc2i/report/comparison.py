"""The table of one or several results, with the published figures where there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedc2i.analysis.significance import indistinguishable, pooled_deviations
from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json, write_atomically
from fedc2i.engine.records import POINTS, Point
from fedc2i.report import points
from fedc2i.report.notes import attack_notes, other_protocol, privacy_costs, reconstructions
from fedc2i.report.published import misprints, published_row
from fedc2i.report.table import Row, Table
from fedc2i.runs.results import Result, Score
from fedc2i.runs.summary import summary

BEST = "the best of its column at that point"
TIES_NOTE = "~: the difference of {average} from the best may be chance (95 % bootstrap interval over paired seeds)."
FEW_NOTE = "With {seeds} seeds this test is weak: treat small differences with care."
FEW = 4  # seeds up to which the test is called weak
DIFFERENCE_NOTE = (
    "difference: ours minus published in pooled standard deviations; in points (pt) where one of the two has none. "
    "Nothing was tuned towards the published rows."
)


def comparison_table(results: Sequence[Result], against_paper: bool = False) -> Table:
    """One row per method and evaluation point, one column per client, averages last; published rows below, if any.

    Args:
        results: of different methods on the same data with the same seeds.
        against_paper: adds the differences from the published rows.

    Raises:
        UserError: if there are no results, or they differ in their clients or seeds.
    """
    if not results:
        raise UserError("this comparison is empty")
    if len({(own.federation.names, own.config.seeds) for own in results}) > 1:
        raise UserError("results of different clients or seeds do not go into one table")
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
    table = Table(
        _title(first),
        ("Method", points.COLUMN, *columns),
        averages=len(columns) - len(first.federation.names),
        bold=BEST if best else "",
    )
    for result in results:
        printed = published_row(result)
        for point in POINTS:
            own = scores[result.key, point]
            marks = frozenset(k + 2 for k, c in enumerate(columns) if round(own[c].mean, 2) == best.get((point, c)))
            cells = [str(own[column]) for column in columns]
            cells[-1] += " ~" if (result.key, point) in tied else ""
            where = points.starred(point, result.method.headline)
            table.rows.append(Row((result.label, where, *cells), best=marks))
        if printed:
            cells = [str(printed[c]) if c in printed else "" for c in columns]
            table.rows.append(Row((result.label, "published", *cells), "published"))
            for point in POINTS if against_paper else ():
                away = [difference(scores[result.key, point][c], printed.get(c), c, result) for c in columns]
                where = f"difference, {points.SHORT[point]}"
                table.rows.append(Row((result.label, where, *away), "published"))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    table.notes = [
        points.NOTE,
        *attack_notes(results),
        *(tie_notes(columns[-1], first) if tied else []),
        *([DIFFERENCE_NOTE] if against_paper else []),
        *other_protocol(first),
        *(misprints(first.federation.name) if against_paper else []),
        *reconstructions(results),
        *privacy_costs(results),
        *first.federation.notes,
    ]
    return table


def ties(results: Sequence[Result]) -> set[tuple[str, Point]]:
    """Rows whose last average is not the best of its point, but may differ from it by chance."""
    found: set[tuple[str, Point]] = set()
    if len(results[0].config.seeds) < 2:
        return found
    for point in POINTS:
        values = {result.key: list(result.averages(point).values())[-1] for result in results}
        best = max(values, key=lambda key: values[key].mean())
        found |= {(key, point) for key in values if key != best and indistinguishable(values[best], values[key])}
    return found


def tie_notes(average: str, result: Result) -> list[str]:
    """What the mark of a tie means, and how far to trust it."""
    seeds = len(result.config.seeds)
    return [TIES_NOTE.format(average=average), *([FEW_NOTE.format(seeds=seeds)] if seeds <= FEW else [])]


def difference(ours: Score, theirs: Score | None, column: str, result: Result) -> str:
    """How far a cell is from the published one; empty where they are not of the same data."""
    stand_ins = {name for members in result.federation.averages.values() for name in result.federation.names}
    for members in result.federation.averages.values():
        stand_ins -= set(members)
    if theirs is None or column in stand_ins or (column == "Avg" and stand_ins):
        return ""
    deviations = pooled_deviations(ours.mean, ours.sd, theirs.mean, theirs.sd)
    return f"{ours.mean - theirs.mean:+z.2f} pt" if deviations is None else f"{deviations:+z.1f} sd"


def seeds_label(result: Result) -> str:
    """How many seeds a table is over."""
    seeds = result.config.seeds
    return f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else f"seed {seeds[0]}"


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """``comparison.md`` and ``comparison.json`` beside the methods' run folders."""
    write_atomically(folder / "comparison.md", comparison_table(results).to_markdown().encode())
    write_atomically(folder / "comparison.json", to_json({result.key: summary(result) for result in results}).encode())


def _title(result: Result) -> str:
    config = result.config
    rounds = "1 round" if config.rounds == 1 else f"{config.rounds} rounds"
    return f"Test accuracy (%) on {config.data}, {config.model}, {rounds}, {seeds_label(result)}"
