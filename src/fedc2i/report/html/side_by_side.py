"""Runs side by side: their labels, scores, distance from the best over common seeds, settings that differ, and cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedc2i.analysis.contribution.uncertainty import is_scarce
from fedc2i.analysis.significance import Paired
from fedc2i.core.errors import UserError
from fedc2i.core.options import names
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.comparison import (
    FEW,
    SAMPLES,
    SEEDS,
    comparison_table,
    distances,
    has_samples,
    reconstructions,
    seeds_label,
    test_title,
)
from fedc2i.report.table import POINT_COLUMN, SHORT, Row, Table, counted, metric_words, size
from fedc2i.runs.results import Array, Result
from fedc2i.runs.settings import RunSettings

MOST_NAMED = 6  # seeds listed in a line
MOST_COLUMNS = 12  # clients with their own column


def distinct(results: Sequence[Result], folders: Sequence[Path]) -> list[Result]:
    """The results with labels that differ: the same method twice gets the name of its folder.

    Where these names are the same, they include that of the parent folder.

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
    whole = [folder.absolute() for folder in folders]  # "." has no name
    short = [folder.name for folder in whole]
    if len({*short}) < len(short):
        short = [f"{folder.parent.name}/{folder.name}" for folder in whole]
    labels = [result.label for result in results]
    found: list[Result] = []
    for result, name in zip(results, short, strict=True):
        mark = f" [{name}]" if labels.count(result.label) > 1 else ""
        while any(result.label + mark == other.label for other in found):
            mark += "'"
        found.append(replace(result, label=result.label + mark, key=result.key + mark))
    return found


# Seeds and rounds.


def named(seeds: Sequence[int]) -> str:
    """``seeds 0, 1, 2``; of many only the number."""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {', '.join(map(str, seeds))}" if len(seeds) <= MOST_NAMED else f"{len(seeds)} seeds"


def common_seeds(results: Sequence[Result]) -> tuple[int, ...]:
    """Those that every run has, in the first one's order."""
    return tuple(seed for seed in results[0].config.seeds if all(seed in one.config.seeds for one in results))


def restricted(result: Result, seeds: Sequence[int]) -> Result:
    """The same of some seeds only; of all if there are none."""
    if not seeds:
        return result
    rounds = [report for report in result.rounds if report.seed in seeds]
    return replace(result, config=replace(result.config, seeds=tuple(seeds)), rounds=rounds, outcomes={})


def last_round(result: Result) -> int:
    """The last round that was run; early stopping may end before the last one that was set."""
    return max(report.round for report in result.rounds)


def rounds_text(results: Sequence[Result]) -> str:
    """``6 rounds``, or ``3 to 6 rounds`` where runs differ."""
    done = sorted({last_round(one) for one in results})
    return f"{done[0]} to {done[-1]} rounds" if len(done) > 1 else counted(done[0], "round")


def models_text(results: Sequence[Result]) -> str:
    """Every model, named once."""
    return " and ".join(dict.fromkeys(one.model for one in results))


def last_average(result: Result, point: Point) -> tuple[str, Array]:
    """The name and ``(seeds,)`` of the data set's last average; ``Avg`` if it defines none."""
    return list(result.averages(point, result.config.metric).items())[-1]


# Distance from the best.


@dataclass(frozen=True)
class Difference:
    """The best run of a point minus another, over the seeds that both have."""

    other: int  # position of the other run
    paired: Paired
    interval: tuple[float, float] | None  # of 95 %, by bootstrap; None where it is not known
    source: str  # what was resampled; empty if nothing was

    @property
    def is_clear(self) -> bool:
        """Whether the whole interval is above zero, and there are enough seeds to say so."""
        return self.interval is not None and self.interval[0] > 0 and self.paired.count > FEW


def differences(results: Sequence[Result], point: Point) -> tuple[int, list[Difference]]:
    """The best run at a point by its average, and how far it is above every other; empty without a common seed."""
    seeds = common_seeds(results)
    sign = metric_words(results[0].config.metric).sign
    common = [restricted(one, seeds) for one in results]
    values = [sign * last_average(one, point)[1] for one in common]
    if not seeds:
        return int(np.argmax([np.nan_to_num(own.mean(), nan=-np.inf) for own in values])), []
    best, intervals = distances(common, point)
    source = SAMPLES if has_samples(common) else SEEDS
    found = [
        Difference(k, Paired.of(values[best], own), ends, source if ends else "")
        for k, (own, ends) in enumerate(zip(values, intervals, strict=True))
        if k != best
    ]
    return best, found


def are_clear(found: Sequence[Difference]) -> bool:
    """Whether the best run is clearly above every other."""
    return bool(found) and all(one.is_clear for one in found)


def run_to_show(results: Sequence[Result], able: Collection[int], preferred: Collection[int] = ()) -> int:
    """The position of the run that the verdict names, if it is among those ``able`` to be shown.

    Else the best after local training of the ``preferred`` ones, or of all that are able.
    """
    found = sorted((differences(results, point) for point in reversed(POINTS)), key=lambda own: not are_clear(own[1]))
    sign, seeds = metric_words(results[0].config.metric).sign, common_seeds(results)

    def score(place: int) -> float:
        own = sign * last_average(restricted(results[place], seeds), "trained")[1].mean()
        return float(own) if np.isfinite(own) else -np.inf

    return next((best for best, _ in found if best in able), max(sorted(preferred or able), key=score))


def settings_that_differ(results: Sequence[Result]) -> list[tuple[str, list[str]]]:
    """Settings of the run (not the method's own options) that are not the same everywhere, with each run's value."""
    machine = {"method", *names(RunSettings, scope="machine")}
    wanted = [name for name in names(RunSettings, numbers=True) if name not in machine]
    values = [(name, [str(getattr(one.config, name)) for one in results]) for name in wanted]
    return [(name, own) for name, own in values if len(set(own)) > 1]


# Tables.


def score_table(results: Sequence[Result]) -> Table:
    """The score of every run, client and point after the last round; of many clients only the averages."""
    seeds = common_seeds(results)
    if seeds:
        table = comparison_table([restricted(one, seeds) for one in results])
    else:
        table = comparison_table(results[:1])
        every = [row for one in results for row in comparison_table([one]).rows]
        table.rows = list(dict.fromkeys(sorted(every, key=lambda row: row.kind == "majority")))
    if not seeds or len({(one.config.rounds, last_round(one), one.config.model) for one in results}) > 1:
        over = seeds_label(seeds) if seeds else "other seeds each"
        what = f"{models_text(results)}, {rounds_text(results)}, {over}"
        table.title = f"{test_title(results[0].config.metric)} on {results[0].config.data}, {what}"
    clients = len(results[0].federation.names)
    if clients > MOST_COLUMNS:
        kept = [0, 1, *range(2 + clients, len(table.header))]
        table.rows = [
            Row(tuple(row.cells[k] for k in kept), row.kind, frozenset(kept.index(k) for k in row.best if k in kept))
            for row in table.rows
        ]
        table.header = tuple(table.header[k] for k in kept)
    return table


def difference_table(results: Sequence[Result]) -> Table:
    """How far every run is below the best of each point, with its uncertainty over seeds."""
    seeds = common_seeds(results)
    words = metric_words(results[0].config.metric)
    title = f"{last_average(results[0], 'trained')[0]} {words.name}"
    table = Table(
        f"Distance from the best, {title}",
        (
            "Method",
            POINT_COLUMN,
            "below the best" if words.sign > 0 else "above the best",
            "95 % interval",
            "standard error",
            "best ahead / behind / equal",
        ),
    )
    if not seeds:
        table.notes = ["The runs have no seed in common: nothing is paired."]
        return table
    for point in POINTS:
        best, found = differences(results, point)
        table.rows.append(Row((results[best].label, SHORT[point], "best", "", "", ""), best=frozenset({2})))
        for one in found:
            mean, error, counts = one.paired.cells(words.digits)
            ends = " to ".join(f"{end:+z.{words.digits}f}" for end in one.interval or ())
            if np.isfinite(one.paired.mean):
                cells = mean.lstrip("+"), ends, error, counts
            else:
                cells = "not scored", "", "", ""
            table.rows.append(Row((results[one.other].label, SHORT[point], *cells)))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    source = next((one.source for one in differences(results, "trained")[1] if one.source), "")
    table.notes = [
        f"Of {title}, {named(seeds)}; intervals: {source}. The best run is chosen by the same scores, so an interval "
        "close to zero is slightly too optimistic."
        if source
        else "One seed in common: how much these differences vary is not known."
    ]
    return table


def cost_table(results: Sequence[Result]) -> Table:
    """Bytes of one client and seconds of a round and of the whole run, for each run."""
    spans = [f"{way} {span}" for span in ("a round", "in all") for way in ("up", "down", "seconds")]
    table = Table("Traffic of one client, and time", ("Method", "Length", *spans))
    for result in results:
        rounds, up, down, seconds = last_round(result), result.bytes_up, result.bytes_down, result.seconds
        once = size(up), size(down), f"{seconds / len(result.rounds):.2f}"
        in_all = size(up * rounds), size(down * rounds), f"{seconds:.1f}"
        table.rows.append(Row((result.label, counted(rounds, "round"), *once, *in_all)))
    table.notes = [
        "Bytes of the tensors that one client sends and receives, on average over rounds; in all: if it takes part in "
        "every round. Seconds: local training of all clients, exchange and evaluation, on the machine of the run; "
        "seeds are computed side by side, a round's seconds are the share of one seed.",
        *reconstructions(results),
    ]
    return table


def class_sizes(result: Result, client: int) -> list[int]:
    """Test samples of each class; empty where only a site knows."""
    own = result.predictions
    return [] if own is None else [int(size) for size in np.bincount(own.labels[own.rows(client)])]


def scarce_clients(result: Result) -> list[str]:
    """Clients whose score is a mean over classes and rests on very few test samples of one."""
    names = result.federation.names
    return [name for k, name in enumerate(names) if is_scarce(result.config.metric, class_sizes(result, k))]
