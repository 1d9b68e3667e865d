"""The table of one or several results with published figures and notes, and the table of who weighs most with whom."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.core.errors import UserError, printable
from fedc2i.core.files import to_json, write_atomically
from fedc2i.engine.records import MOST_NAMED, POINTS, Point
from fedc2i.report.guessing import few_samples_notes, guessing_notes
from fedc2i.report.published import MISPRINTS, PUBLISHED
from fedc2i.report.table import POINT_COLUMN, POINT_NOTE, SHORT, Row, Table, counted, metric_words, starred
from fedc2i.runs.results import WORST, Result, Score, summary
from fedc2i.training.metrics import UNDEFINED

BEST = "the best of its column at that point"
TIES_NOTE = "~: the difference of {average} from the best may be chance (95 % interval, {source})."
SEEDS, SAMPLES = "paired bootstrap over seeds", "paired bootstrap over seeds and test samples"
WORST_NOTE = "Worst: the worst client of a seed, averaged over seeds."
MAJORITY = "Majority class"
MAJORITY_NOTE = "Majority class: always guessing the most frequent class of a client's test data."
FEW_NOTE = "With {seeds} this test is weak: treat small differences with care."
FEW = 4  # seeds up to which the test is called weak
MOST_DRAWS = 6  # different sets of attackers in a note
DIFFERENCE_NOTE = (
    "difference: ours minus published in pooled standard deviations; in points (pt) where one of the two has none. "
    "Nothing was tuned towards the published rows."
)


def comparison_table(results: Sequence[Result], against_paper: bool = False, *, metric: str | None = None) -> Table:
    """One row per method and evaluation point, one column per client, averages last; published rows below, if any.

    Args:
        results: of different methods on the same data with the same seeds.
        against_paper: adds the differences from the published rows.
        metric: what to show; by default the metric of the first result's settings.

    Raises:
        UserError: if there are no results, they differ in their clients or seeds, or there is no such metric.
    """
    if not results:
        raise UserError("this comparison is empty")
    if len({(own.federation.names, own.config.seeds) for own in results}) > 1:
        raise UserError("results of different clients or seeds do not go into one table")
    metric = metric or results[0].config.metric
    results = [result.showing(metric) for result in results]
    first, words = results[0], metric_words(metric)
    average = list(first.averages("trained"))[-1]
    columns = list(first.scores("trained", metric))
    scores = {(result.key, point): result.scores(point, metric) for result in results for point in POINTS}
    best: dict[tuple[Point, str], float] = {}
    for point, column in itertools.product(POINTS, columns) if len(results) > 1 else ():
        means = [words.sign * scores[result.key, point][column].mean for result in results]
        best[point, column] = round(words.sign * max(filter(math.isfinite, means), default=math.nan), words.digits)
    tied = ties(results)
    table = Table(
        f"{test_title(metric)} on {first.config.data}, {first.model}, {counted(first.config.rounds, 'round')}, "
        f"{seeds_label(first.config.seeds)}",
        ("Method", POINT_COLUMN, *columns),
        averages=len(columns) - len(first.federation.names),
        bold=BEST if best else "",
    )
    for result in results:
        for point in POINTS:
            own = scores[result.key, point]
            means = [round(own[column].mean, words.digits) for column in columns]
            marks = frozenset(k + 2 for k, c in enumerate(columns) if means[k] == best.get((point, c)))
            cells = [str(own[column]) for column in columns]
            cells[columns.index(average)] += " ~" if (result.key, point) in tied else ""
            table.rows.append(Row((result.label, starred(point, result.method.headline), *cells), best=marks))
        if printed := published_row(result):
            cells = [str(printed[c]) if c in printed else "" for c in columns]
            table.rows.append(Row((result.label, "published", *cells), "published"))
            for point in POINTS if against_paper else ():
                away = [difference(scores[result.key, point][c], printed.get(c), c, result) for c in columns]
                table.rows.append(Row((result.label, f"difference, {SHORT[point]}", *away), "published"))
        table.rows[-1] = replace(table.rows[-1], ends_section=True)
    guesses = majority_row(first, columns) if metric == "accuracy" and not against_paper else []
    table.rows += guesses
    table.notes = [
        POINT_NOTE,
        *attack_notes(results),
        WORST_NOTE,
        *([MAJORITY_NOTE] if guesses else []),
        *guessing_notes(results),
        *(few_samples_notes(results) if len(results) > 1 else []),
        *undefined_notes(results),
        *diverged_notes(results),
        *(tie_notes(average, results) if tied else []),
        *([DIFFERENCE_NOTE] if against_paper else []),
        *other_protocol(first),
        *(MISPRINTS.get(first.federation.name, []) if against_paper else []),
        *reconstructions(results),
        *privacy_costs(results),
        *first.federation.all_notes,
    ]
    return table


def test_title(metric: str) -> str:
    """The beginning of a table's title."""
    words = metric_words(metric)
    return f"Test {words.title}{' (lower is better)' if words.sign < 0 else ''}"


def majority_row(result: Result, columns: Sequence[str]) -> list[Row]:
    """The accuracy of the most frequent class at every client, the averages and the lowest; none if not known."""
    known, averages = result.majority, {"Avg": result.federation.names, **result.federation.averages}
    if not known.keys() >= {*result.federation.names}:
        return []
    known |= {title: float(np.mean([known[name] for name in members])) for title, members in averages.items()}
    known[WORST] = min(known[name] for name in result.federation.names)
    return [Row((MAJORITY, "", *(f"{known[column]:.2f}" for column in columns)), "majority", ends_section=True)]


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """``comparison.md`` and ``comparison.json`` beside the methods' run folders."""
    write_atomically(folder / "comparison.md", comparison_table(results).to_markdown().encode())
    write_atomically(folder / "comparison.json", to_json({result.key: summary(result) for result in results}).encode())


def ties(results: Sequence[Result]) -> set[tuple[str, Point]]:
    """Rows whose last average is not the best of its point, but may differ from it by chance."""
    found: set[tuple[str, Point]] = set()
    for point in POINTS if len(results) > 1 else ():
        best, intervals = distances(results, point)
        near = [k for k, ends in enumerate(intervals) if k != best and ends is not None and ends[0] <= 0]
        found |= {(results[k].key, point) for k in near}
    return found


def distances(results: Sequence[Result], point: Point) -> tuple[int, list[tuple[float, float] | None]]:
    """The best result by its last average, and for each the interval of how far the best is ahead; None if not known.

    Over seeds and test samples where all results have predictions, else over seeds alone; all have the same seeds.
    """
    metric, seeds = results[0].config.metric, results[0].config.seeds
    sign = metric_words(metric).sign
    values = [sign * list(result.averages(point, metric).values())[-1] for result in results]
    best = int(np.argmax([mean if np.isfinite(mean := own.mean()) else -np.inf for own in values]))
    predictions = tuple(result.predictions for result in results if result.predictions is not None)
    if has_samples(results):
        from fedc2i.analysis.paired_bootstrap import interval, resampled_averages  # for comparisons only

        names = results[0].federation.names
        members = list({"Avg": names, **results[0].federation.averages}.values())[-1]
        where = tuple(names.index(own) for own in members)
        drawn = sign * resampled_averages(predictions, point, metric, seeds, where)
        return best, [interval(drawn[best] - own) for own in drawn]
    if len(seeds) < 2:
        return best, [None] * len(results)
    from fedc2i.analysis.significance import DIGITS, bootstrap_interval

    differences = [np.round(values[best] - own, DIGITS) for own in values]
    return best, [bootstrap_interval(own) if np.isfinite(own).all() else None for own in differences]


def has_samples(results: Sequence[Result]) -> bool:
    """Whether all results have predictions for the same test samples."""
    own = [result.predictions for result in results]
    first = own[0]
    return first is not None and all(
        one is not None and np.array_equal(one.labels, first.labels) and one.samples == first.samples for one in own
    )


def published_row(result: Result) -> dict[str, Score]:
    """The paper's row for a result, with the data set's further averages computed from its columns; empty if none."""
    own = PUBLISHED.get(result.federation.name, {})  # a partition of the data has another name, and no such row
    if result.config.metric != "accuracy":
        return {}
    row = dict(own.get(result.key, {}))
    for title, members in result.federation.averages.items():
        if all(member in row for member in members):
            row[title] = Score(float(np.mean([row[member].mean for member in members])), None)
    return row


def difference(ours: Score, theirs: Score | None, column: str, result: Result) -> str:
    """How far a cell is from the published one; empty where they are not of the same data."""
    averages = result.federation.averages.values()
    stand_ins = {name for name in result.federation.names if averages and not any(name in own for own in averages)}
    if theirs is None or column in stand_ins or (column == "Avg" and stand_ins):
        return ""
    from fedc2i.analysis.significance import pooled_deviations  # for the paper's tables only

    deviations = pooled_deviations(ours.mean, ours.sd, theirs.mean, theirs.sd)
    return f"{ours.mean - theirs.mean:+z.2f} pt" if deviations is None else f"{deviations:+z.1f} sd"


def seeds_label(seeds: Sequence[int]) -> str:
    """How many seeds a table is over."""
    return f"{len(seeds)} seeds, mean ± sample sd" if len(seeds) > 1 else f"seed {seeds[0]}"


# Notes below a table.


def undefined_notes(results: Sequence[Result]) -> list[str]:
    """Where a score is missing, and over how many clients averages then are."""
    metric, names = results[0].config.metric, results[0].federation.names
    scored = np.array([np.isfinite(one.accuracy(point, metric)).all(0) for one in results for point in POINTS])  # rows
    if scored.all():
        return []
    if (scored != scored[0]).any():
        return ["–: not scored; averages are over the clients that were."]
    missing = [name for name, is_there in zip(names, scored[0], strict=True) if not is_there]
    why = "not defined, as the test data has one class" if metric in UNDEFINED else "not scored"
    return [
        f"–: {metric_words(metric).name} is {why} ({_clients(tuple(missing))}); averages and Worst are over "
        f"{len(names) - len(missing)} of {len(names)} clients."
    ]


def diverged_notes(results: Sequence[Result]) -> list[str]:
    """A line for every result with a model that predicts no numbers any more."""
    return [
        f"{result.label} diverged ({_clients(result.diverged)}): its log-loss is not finite, and samples without a "
        "prediction count as wrong."
        for result in results
        if result.diverged
    ]


def tie_notes(average: str, results: Sequence[Result]) -> list[str]:
    """What the mark of a tie means, and how far to trust it."""
    seeds, source = len(results[0].config.seeds), SAMPLES if has_samples(results) else SEEDS
    few = [FEW_NOTE.format(seeds=counted(seeds, "seed"))] if seeds <= FEW else []
    return [TIES_NOTE.format(average=average, source=source), *few]


def attack_notes(results: Sequence[Result]) -> list[str]:
    """A line for every attack among the results, and one for every result of which no upload was ever usable."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.attackers:
            found.setdefault(_attackers(result.attackers), []).append(result.label)
    notes = [
        f"Under attack{'' if len(labels) == len(results) else f' ({_listed(labels)})'}: {who}; averages include the "
        "attackers."
        for who, labels in found.items()
    ]
    return notes + [
        f"{result.label}: no upload of any client was ever usable ({_seeds(result.unheard)}); nobody learned from "
        "anyone else."
        for result in results
        if result.unheard
    ]


def other_protocol(result: Result) -> list[str]:
    """A warning where published rows stand beside results of other settings."""
    preset, config = result.federation.preset, result.config
    other = [name for name in ("model", "rounds") if preset.get(name, getattr(config, name)) != getattr(config, name)]
    if not other or not published_row(result):
        return []
    listed = ", ".join(f"{name} {getattr(config, name)} instead of {preset[name]}" for name in other)
    return [f"Not the protocol on {config.data} ({listed}): do not compare with the published rows."]


def reconstructions(results: Sequence[Result]) -> list[str]:
    """A line for every method that had to be reconstructed."""
    return list(dict.fromkeys(result.method.reconstruction for result in results if result.method.reconstruction))


def privacy_costs(results: Sequence[Result]) -> list[str]:
    """A line for every ε among results whose uploads were clipped, and one for those whose uploads were masked."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.privacy is not None:
            found.setdefault(str(result.privacy), []).append(result.label)
    costs = [f"Privacy of {_listed(labels)}: {text}." for text, labels in found.items()]
    masked = [result.label for result in results if result.config.secure_aggregation]
    return [*costs, f"Secure aggregation of {_listed(masked)}: only the mean of uploads was seen."] if masked else costs


def _attackers(by_seed: Mapping[int, Mapping[str, Sequence[str]]]) -> str:
    """By attack the clients, each set of them with its seeds."""
    draws: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for seed, kinds in by_seed.items():
        for kind, names in kinds.items():
            draws.setdefault(kind, {}).setdefault(tuple(names), []).append(seed)
    said = []
    for kind, own in draws.items():
        listed = [f"{_clients(names)} ({_seeds(seeds)})" for names, seeds in own.items()]
        more = len(listed) - MOST_DRAWS
        rest = f" and others in {more} more draws, see summary.json" if more > 0 else ""
        said.append(f"{kind} by {_listed(listed[:MOST_DRAWS])}{rest}")
    return "; ".join(said)


def _clients(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    *first, last = [*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{_listed(first)} and {last}" if first else last


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {_listed(seeds)}"


def _listed(parts: Sequence[object]) -> str:
    return ", ".join(map(str, parts))


# Whose model weighs most.


def influence_table(result: Result, width: int) -> RichTable | Text | None:
    """The influence vectors after the last round, mean over seeds, shaded; None if nothing was measured.

    Where they need more than ``width`` columns of the terminal, a line that says where to look.
    """
    vectors = [result.influence("influence_vector", seed) for seed in result.config.seeds]
    if not all(vector.size for vector in vectors):
        return None
    mean = np.mean([vector[-1] for vector in vectors], axis=0)
    names = result.federation.names
    if max(map(len, names)) + sum(max(len(name), 5) + 3 for name in names) + 4 > width:
        return Text(
            f"Whose model weighs most: {printable(result.label)}, {len(names)} clients, "
            "see influence.png in the run folder\n"
        )
    title = (
        f"Whose model weighs most: {printable(result.label)}, influence vector λ after the last round (row: for whom)"
    )
    table = RichTable(title=Text(title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in names:
        table.add_column(Text(printable(name)), justify="right")
    for m, name in enumerate(names):
        table.add_row(Text(printable(name)), *(_shaded(value, 1 / len(names)) for value in mean[m]))
    return table


def _shaded(value: float, equal: float) -> Text:
    if np.isnan(value):
        return Text("-", style="dim")
    style = "bold green" if value > 1.2 * equal else "dim" if value < 0.8 * equal else ""
    return Text(f"{value:.3f}", style=style)
