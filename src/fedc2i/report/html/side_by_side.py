"""Runs side by side: which seeds can be paired, how far each run is below the best, which settings differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedc2i.analysis.significance import Paired, bootstrap_interval
from fedc2i.core.errors import UserError
from fedc2i.core.options import names
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.comparison import comparison_table
from fedc2i.report.table import POINT_COLUMN, SHORT, Row, Table
from fedc2i.runs.results import Array, Result
from fedc2i.runs.settings import RunSettings

MOST_NAMED = 6  # seeds listed in a line
MOST_COLUMNS = 12  # clients with their own column


@dataclass(frozen=True)
class Difference:
    """The best run of a point minus another, over the seeds that both have.

    Attributes:
        other: position of the other run.
        paired: mean difference in points, its standard error, wins and losses.
        interval: of 95 %, by bootstrap over seeds; None for one seed.
    """

    other: int
    paired: Paired
    interval: tuple[float, float] | None

    @property
    def is_clear(self) -> bool:
        """Whether the whole interval is above zero."""
        return self.interval is not None and self.interval[0] > 0


def distinct(results: Sequence[Result], names: Sequence[str]) -> list[Result]:
    """The results with labels that differ: the same method twice gets the name of its folder.

    Raises:
        UserError: if they are not of the same clients and classes.
    """
    first = results[0].federation
    for result in results[1:]:
        if result.federation.names != first.names or result.federation.classes != first.classes:
            raise UserError(
                f"{result.label} on {result.config.data} has other clients or classes than {results[0].label} on "
                f"{results[0].config.data}; write a report for each"
            )
    labels = [result.label for result in results]
    found: list[Result] = []
    for result, name in zip(results, names, strict=True):
        twice = labels.count(result.label) > 1
        label, key = (f"{result.label} [{name}]", f"{result.key} [{name}]") if twice else (result.label, result.key)
        while any(label == other.label for other in found):
            label, key = f"{label}'", f"{key}'"
        found.append(replace(result, label=label, key=key))
    return found


def distinct_by_folder(results: Sequence[Result], folders: Sequence[Path]) -> list[Result]:
    """`distinct` by the names of the runs' folders, with that of their parents where these are the same."""
    whole = [folder.absolute() for folder in folders]  # "." has no name
    short = [folder.name for folder in whole]
    same = len({*short}) < len(short)
    return distinct(results, [f"{folder.parent.name}/{folder.name}" for folder in whole] if same else short)


def named(seeds: Sequence[int]) -> str:
    """``seeds 0, 1, 2``; of many only the number."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(map(str, seeds))}" if len(seeds) <= MOST_NAMED else f"{len(seeds)} seeds"


def common_seeds(results: Sequence[Result]) -> tuple[int, ...]:
    """Those that every run has, in the first one's order."""
    return tuple(seed for seed in results[0].config.seeds if all(seed in one.config.seeds for one in results))


def restricted(result: Result, seeds: Sequence[int]) -> Result:
    """The same of some seeds only."""
    rounds = [report for report in result.rounds if report.seed in seeds]
    return replace(result, config=replace(result.config, seeds=tuple(seeds)), rounds=rounds, outcomes={})


def last_round(result: Result) -> int:
    """The last round that was run; early stopping may end before the last one that was set."""
    return max(report.round for report in result.rounds)


def rounds_text(results: Sequence[Result]) -> str:
    """``6 rounds``, or ``3 to 6 rounds`` where runs differ."""
    done = sorted({last_round(one) for one in results})
    return f"{done[0]} to {done[-1]} rounds" if len(done) > 1 else f"{done[0]} round{'s' * (done[0] != 1)}"


def last_average(result: Result, point: Point) -> tuple[str, Array]:
    """The name and ``(seeds,)`` of the data set's last average; ``Avg`` if it defines none."""
    return list(result.averages(point).items())[-1]


def differences(results: Sequence[Result], point: Point) -> tuple[int, list[Difference]]:
    """The best run at a point by its average, and how far it is above every other; empty without a common seed."""
    seeds = common_seeds(results)
    values = [last_average(restricted(one, seeds) if seeds else one, point)[1] for one in results]
    means = [float(np.mean(own)) for own in values]
    best = int(np.argmax([mean if np.isfinite(mean) else -np.inf for mean in means]))
    if not seeds:
        return best, []
    return best, [
        Difference(
            k,
            Paired.of(values[best], own),
            bootstrap_interval(values[best] - own) if len(seeds) > 1 and np.isfinite(own).all() else None,
        )
        for k, own in enumerate(values)
        if k != best
    ]


def score_table(results: Sequence[Result]) -> Table:
    """Accuracy of every run, client and point after the last round; of many clients only the averages."""
    seeds = common_seeds(results)
    if seeds:
        chosen = [restricted(one, seeds) for one in results]
        table = best_of_each_point(comparison_table(chosen), chosen)
    else:
        table = comparison_table(results[:1])
        table.rows = [row for one in results for row in comparison_table([one]).rows]
        table.rows = [replace(row, best=frozenset()) for row in table.rows]
    table.title = _title(results, table.title)
    clients = len(results[0].federation.names)
    if clients > MOST_COLUMNS:
        kept = [0, 1, *range(2 + clients, len(table.header))]
        table.rows = [
            Row(tuple(row.cells[k] for k in kept), row.kind, frozenset(kept.index(k) for k in row.best if k in kept))
            for row in table.rows
        ]
        table.header = tuple(table.header[k] for k in kept)
    return table


def best_of_each_point(table: Table, results: Sequence[Result]) -> Table:
    """The comparison's table with the best of each column marked among the rows of one point; of one run nothing.

    Args:
        table: of `comparison_table`.
        results: what it was made of, in the same order.
    """
    marks: dict[tuple[int, Point], set[int]] = {(k, point): set() for k in range(len(results)) for point in POINTS}
    for point in POINTS if len(results) > 1 else ():
        means = [[round(score.mean, 2) for score in one.scores(point).values()] for one in results]
        for column, values in enumerate(zip(*means, strict=True), 2):
            best = max((value for value in values if np.isfinite(value)), default=np.nan)
            for k, value in enumerate(values):
                marks[k, point] |= {column} if value == best else set()
    found = iter(marks.values())  # the rows have the same order; those of the paper stand between them
    rows = [replace(row, best=frozenset(next(found)) if row.kind == "plain" else frozenset()) for row in table.rows]
    return replace(table, rows=rows)


def _title(results: Sequence[Result], usual: str) -> str:
    """The usual title, which is the first run's, unless another has other rounds, model or seeds."""
    first = results[0].config
    seeds = common_seeds(results)
    done = {(one.config.rounds, last_round(one), one.config.model) for one in results}
    if len(done) == 1 and seeds:
        return usual
    models = " and ".join(dict.fromkeys(str(one.config.model) for one in results))
    many = f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else named(seeds) if seeds else "other seeds each"
    return f"Test accuracy (%) on {first.data}, {models}, {rounds_text(results)}, {many}"


def difference_table(results: Sequence[Result]) -> Table:
    """How far every run is below the best of each point, with its uncertainty over seeds."""
    seeds = common_seeds(results)
    title = last_average(results[0], "trained")[0]
    table = Table(
        f"Distance from the best, {title}",
        ("Method", POINT_COLUMN, "below the best", "95 % interval", "standard error", "best ahead / behind / equal"),
    )
    for point in POINTS:
        best, found = differences(results, point)
        table.rows.append(Row((results[best].label, SHORT[point], "best", "", "", ""), best=frozenset({2})))
        for one in found:
            mean, error, counts = one.paired.cells()
            ends = "" if one.interval is None else f"{one.interval[0]:+z.2f} to {one.interval[1]:+z.2f}"
            cells = (results[one.other].label, SHORT[point], mean.lstrip("+"), ends, error, counts)
            table.rows.append(Row(cells))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    many = len(seeds) > 1
    table.notes = [
        f"In points of {title}, paired over {named(seeds)}; bootstrap interval of the mean. The best run is chosen by "
        "the same scores, so an interval close to zero is slightly too optimistic."
        if many
        else "One seed in common: how much these differences vary is not known."
    ]
    return table if seeds else replace(table, rows=[], notes=["The runs have no seed in common: nothing is paired."])


def settings_that_differ(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Settings of the run (not the method's own options) that are not the same everywhere, with each run's value."""
    machine = {"method", *names(RunSettings, scope="machine")}
    values = {
        name: [str(getattr(one.config, name)) for one in results]
        for name in names(RunSettings, numbers=True)
        if name not in machine
    }
    return [(name, own) for name, own in values.items() if len(set(own)) > 1]
