"""The top of a page: the verdict in words, warnings beside it, and a few key numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from fedc2i.analysis.contribution.uncertainty import FEWEST_OF_CLASS
from fedc2i.analysis.weights import DomainShare, finite_mean, of_last_round
from fedc2i.core.errors import listed
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.comparison import FEW, SEEDS, diverged_notes, undefined_notes
from fedc2i.report.guessing import guessing_notes
from fedc2i.report.html.side_by_side import (
    Difference,
    are_clear,
    common_seeds,
    differences,
    last_average,
    last_round,
    models_text,
    named,
    restricted,
    rounds_text,
    scarce_clients,
    settings_that_differ,
)
from fedc2i.report.table import WHEN, counted, metric_words, percent
from fedc2i.runs.results import Result, Score

MOST_SETTINGS = 5  # that are named; the table below the verdict has them all
MOST_CLIENTS = 6  # whose uploads are named
OVER_SEEDS = " Seeds change initial models and batches, not the data; such intervals say nothing about other samples."


@dataclass(frozen=True)
class Text:
    """A headline, the sentences below it, and warnings that must be read before believing it."""

    headline: str
    sentences: tuple[str, ...]
    warnings: tuple[str, ...] = ()


class KeyNumber(NamedTuple):
    """A number, its name, and a line below it."""

    value: str
    name: str
    note: str


def verdict_text(results: Sequence[Result]) -> Text:
    """Of one run how it scored, of several which is best at each point."""
    if len(results) == 1:
        return _one_run(results[0])
    best = {point: differences(results, point) for point in POINTS}
    seeds, source = common_seeds(results), next((one.source for _, found in best.values() for one in found), "")
    leaders = {point: results[found[0]].label for point, found in best.items()}
    clear = {point: are_clear(found) for point, (_, found) in best.items()}
    one_leader, words = len(set(leaders.values())) == 1, metric_words(results[0].config.metric)
    top = "highest" if words.sign > 0 else "lowest"
    if all(found and all(one.paired.mean == 0 for one in found) for _, found in best.values()):
        line = f"All {len(results)} runs have the same average {words.name} at both points."
    elif one_leader and all(clear.values()):
        line = f"{leaders['trained']} has the {top} average {words.name} at both points, beyond chance."
    elif any(clear.values()):
        places = [(WHEN[point].capitalize(), leaders[point]) for point in POINTS if clear[point]]
        line = " ".join(f"{where}, {leader} is clearly best." for where, leader in places)
    elif one_leader:
        doubt = _doubt(results, [one for _, found in best.values() for one in found])
        line = f"{leaders['trained']} has the {top} average {words.name} at both points{doubt}."
    else:
        first, then = (f"{leaders[point]} leads {WHEN[point]}" for point in POINTS)
        line = f"No run is clearly best: {first}, {then}."
    sentences = [_best(results, point, top) for point in POINTS]
    if not seeds:
        sentences.append("The uncertainty is not known, as the runs share no seed.")
    elif not source:
        sentences.append(
            "The uncertainty is not known, as the runs share one seed; a second seed could change the order."
        )
    else:
        sentences.append(f"Intervals: {source}, {named(seeds)}.{OVER_SEEDS if source == SEEDS else ''}")
    if 0 < len(seeds) <= FEW:
        sentences.append(
            f"{counted(len(seeds), 'seed')} cannot show that a run is clearly best; {FEW + 1} or more can."
        )
    warnings = warning_notes(results)
    scarce = list(dict.fromkeys(name for one in results for name in scarce_clients(one)))
    if scarce and source:
        warnings += (
            f"The intervals are too narrow: they treat classes with fewer than {FEWEST_OF_CLASS} test samples as "
            f"certain, at {listed(scarce)}.",
        )
    return Text(line, tuple(sentences + undefined_notes(results)), warnings)


def _doubt(results: Sequence[Result], found: Sequence[Difference]) -> str:
    """Why the best run is not clearly best."""
    near = [one for one in found if one.interval and one.interval[0] <= 0]
    if near:
        nearest = min(near, key=lambda one: one.paired.mean)
        return f", but its lead over {results[nearest.other].label} may be chance"
    seeds = len(common_seeds(results))
    if 0 < seeds <= FEW:
        these = "this seed" if seeds == 1 else f"these {seeds} seeds"
        return f" in {these}; {FEW + 1} seeds are needed to call it clearly best"
    return ", but is not clearly best"


def _best(results: Sequence[Result], point: Point, top: str) -> str:
    """The best run of a point, and every other one with its distance."""
    words, (best, found) = metric_words(results[0].config.metric), differences(results, point)
    title, values = last_average(restricted(results[best], common_seeds(results)), point)
    text = f"{WHEN[point].capitalize()}, {results[best].label} has the {top} {title} {words.name}, "
    text += f"{Score.of(values, words.digits)}{words.unit}"
    parts: dict[bool, list[str]] = {True: [], False: []}  # by whether the interval leaves zero out
    for one in sorted(found, key=lambda one: one.paired.mean):
        label, mean = results[one.other].label, f"{one.paired.mean:.{words.digits}f}"
        if not np.isfinite(one.paired.mean):
            parts[False].append(f"{label} (not scored)")
        elif one.interval is None:
            parts[False].append(f"{label} by {mean}{words.points}")
        else:
            ends = " to ".join(f"{end:.{words.digits}f}" for end in one.interval)
            parts[one.interval[0] > 0].append(f"{label} by {mean}{words.points} (95 % interval {ends})")
    ahead, near = parts[True], parts[False]
    text += f": ahead of {'; '.join(ahead)}." if ahead else "."
    chance = "It may be chance that it is ahead of" if any(one.interval for one in found) else "Ahead of"
    return text + (f" {chance} {'; '.join(near)}." if near else "")


def _one_run(result: Result) -> Text:
    words = metric_words(result.config.metric)
    scores = {point: Score.of(last_average(result, point)[1], words.digits) for point in POINTS}
    title = last_average(result, "trained")[0]
    point, warnings = result.method.headline, warning_notes([result])
    if not np.isfinite(scores[point].mean):
        line = f"{result.label} on {result.config.data}: no client was scored after the last round."
        return Text(line, (), warnings)
    rounds = counted(last_round(result), "round")
    name = "" if result.config.metric == "accuracy" else f"{words.name} "
    line = f"{result.label} reaches {name}{scores[point]}{words.unit} on {result.config.data} after {rounds}."
    other: Point = "received" if point == "trained" else "trained"
    sentences = [
        f"That is {title} {WHEN[point]}, the point that the method's authors report; {WHEN[other]} it is "
        f"{scores[other]}{words.unit}."
    ]
    values, names = finite_mean(result.accuracy(point, result.config.metric)), result.federation.names
    high, low = (int(place(values)) for place in (np.nanargmax, np.nanargmin))
    if high != low:  # both are the first of equal clients
        sentences.append(
            f"Clients differ: {names[high]} has {values[high]:.{words.digits - 1}f}{words.unit}, {names[low]} has "
            f"{values[low]:.{words.digits - 1}f}{words.unit}."
        )
    seeds = len(result.config.seeds)
    sentences.append(
        f"± is the sample standard deviation over {seeds} seeds."
        if seeds > 1
        else "One seed was run: how much these numbers vary is not known."
    )
    return Text(line, tuple(sentences + undefined_notes([result])), warnings)


# Warnings.


def warning_notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Sentences that a reader must know before believing the verdict, from other settings to models that only guess."""
    said = ["There is one client: nothing to federate."] if len(results[0].federation.names) == 1 else []
    said += _unequal(results)
    if len({str(one.federation.checksums) for one in results}) > 1:
        said.append("Not the same data: the checksums of the runs' samples differ.")
    for attack in dict.fromkeys(one.config.attack for one in results if one.config.attack):
        labels = [one.label for one in results if one.config.attack == attack]
        who = "" if len(labels) == len(results) else f" ({', '.join(labels)})"
        said.append(f"Under attack: {attack}{who}; averages include the attackers.")
    for one in results:
        rejected = [f"{name} {count}" for name, count in _rejected_uploads(one).items()]
        if rejected:
            more = f" and of {len(rejected) - MOST_CLIENTS} more clients" if len(rejected) > MOST_CLIENTS else ""
            of = f" of {one.label}" if len(results) > 1 else ""
            said.append(f"Rejected uploads{of}: {', '.join(rejected[:MOST_CLIENTS])}{more}.")
    return (*said, *diverged_notes(results), *guessing_notes(results))


def _rejected_uploads(result: Result) -> dict[str, int]:
    """How many uploads were rejected, by client; of a run that was read back only its summary says so."""
    if result.refused:
        return result.refused
    written: Any = result.written.get("refused_uploads", {})
    if not isinstance(written, Mapping):
        return {}
    return {name: written[name] for name in result.federation.names if type(written.get(name)) is int and written[name]}


def _unequal(results: Sequence[Result]) -> list[str]:
    """Settings that differ: ``rounds 6 (FedAvg, FedC²I), 3 (FedProx)``."""
    differing = settings_that_differ(results)
    done = [str(last_round(one)) for one in results]
    if len(set(done)) > 1 and all(name != "rounds" for name, _ in differing):  # some stopped early
        differing.insert(0, ("rounds run", done))
    said = []
    for name, values in differing[:MOST_SETTINGS]:
        parts = []
        for value in dict.fromkeys(values):
            own = [one.label for one, other in zip(results, values, strict=True) if other == value]
            parts.append(f"{value or 'not set'} ({', '.join(own) if len(own) <= 3 else f'{len(own)} runs'})")
        said.append(f"{name} {', '.join(parts)}")
    more = f"; and {len(differing) - MOST_SETTINGS} more" if len(differing) > MOST_SETTINGS else ""
    return [f"Not on equal terms: {'; '.join(said)}{more}."] if said else []


# Numbers.


def key_numbers(results: Sequence[Result]) -> list[KeyNumber]:
    """The best average at both points, then the size of the run; of one run also the λ that clients keep."""
    seeds, first = common_seeds(results), results[0]
    words, plain = metric_words(first.config.metric), first.config.metric == "accuracy"
    found = []
    for point in POINTS:
        best = results[differences(results, point)[0]]
        title, values = last_average(restricted(best, seeds), point)
        note = best.label if len(results) > 1 else f"{title} over clients{', % of test samples' if plain else ''}"
        value = str(Score.of(values, words.digits))
        found.append(KeyNumber(value, f"{words.name if plain else words.title} {WHEN[point]}", note))
    vector = of_last_round(first, "influence_vector")
    if len(results) == 1 and vector.ndim == 2:
        share = DomainShare.of(vector, first.federation.names)
        if np.isfinite(share.itself):
            equal = f"of λ on a client's own model; equal share: {percent(share.uniform_itself)}"
            found.append(KeyNumber(f"{100 * share.itself:.0f} %", "kept by the client", equal))
    number, clients = counted(len(first.federation.names), "client").split()
    found.append(KeyNumber(number, clients, f"{len(first.federation.classes)} classes"))
    rounds, _, unit = rounds_text(results).rpartition(" ")
    found.append(KeyNumber(rounds, unit, f"model {models_text(results)}"))
    if len(results) > 1:
        found.append(KeyNumber(str(len(results)), "runs", f"{counted(len(seeds), 'seed')} in common"))
    else:
        number, unit = counted(len(seeds), "seed").split()
        found.append(KeyNumber(number, unit, named(seeds)))
    return found
