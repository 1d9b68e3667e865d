"""The verdict of a page in words: which method is best, and how certain that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.weights import finite_mean
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.html.side_by_side import common_seeds, differences, last_average, last_round, named, restricted
from fedc2i.report.html.warning_notes import warning_notes
from fedc2i.report.table import WHEN, counted
from fedc2i.runs.results import Result, Score

FEW = 4  # seeds up to which an interval is called weak


@dataclass(frozen=True)
class Text:
    """A headline, the sentences below it, and warnings that must be read before believing it."""

    headline: str
    sentences: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def verdict_text(results: Sequence[Result]) -> Text:
    """Of one run how it scored, of several which is best at each point."""
    if len(results) == 1:
        return _one_run(results[0])
    best = {point: differences(results, point) for point in POINTS}
    leaders = {point: results[found[0]].label for point, found in best.items()}
    clear = {point: bool(found[1]) and all(one.is_clear for one in found[1]) for point, found in best.items()}
    if len(set(leaders.values())) == 1 and all(clear.values()):
        line = f"{leaders['trained']} has the highest average at both points, beyond the spread over seeds."
    elif not any(clear.values()):
        line = "No run is clearly best."
        if len(set(leaders.values())) == 1:
            line = f"{leaders['trained']} has the highest average at both points, but is not clearly best."
    else:
        places = [(WHEN[point].capitalize(), leaders[point]) for point in POINTS if clear[point]]
        line = " ".join(f"{where}, {leader} is clearly best." for where, leader in places)
    sentences = [_best(results, point) for point in POINTS]
    seeds = common_seeds(results)
    if len(seeds) < 2:
        why = "the runs share one seed" if seeds else "the runs share no seed"
        sentences.append(f"The uncertainty is not known, as {why}; a second seed could change the order.")
    else:
        sentences.append(
            f"The {named(seeds)} change initial models and batches, not the data; intervals say nothing about other "
            "images."
        )
        if len(seeds) <= FEW:
            sentences.append(f"{len(seeds)} seeds are few: treat small differences with care.")
    return Text(line, tuple(sentences), warning_notes(results))


def _best(results: Sequence[Result], point: Point) -> str:
    best, found = differences(results, point)
    seeds = common_seeds(results)
    title, values = last_average(restricted(results[best], seeds) if seeds else results[best], point)
    lead = f"{WHEN[point].capitalize()}, {results[best].label} has the highest {title}, {Score.of(values)} %"
    clear = [one for one in found if one.is_clear]
    near = [one for one in found if not one.is_clear]
    parts = []
    for one in sorted(clear, key=lambda one: one.paired.mean)[:3]:
        low, high = one.interval or (0.0, 0.0)
        parts.append(
            f"{one.paired.mean:.2f} points above {results[one.other].label} (95 % interval {low:.2f} to {high:.2f})"
        )
    more = f", and clearly above {counted(len(clear) - 3, 'more run')}" if len(clear) > 3 else ""
    text = f"{lead}: {'; '.join(parts)}{more}." if parts else f"{lead}."
    if near:
        listed = ", ".join(f"{results[one.other].label} ({one.paired.mean:.2f} points below)" for one in near[:4])
        listed += f" and {len(near) - 4} more" if len(near) > 4 else ""
        text += f" Not clearly below it: {listed}."
    return text


def _one_run(result: Result) -> Text:
    scores = {point: Score.of(last_average(result, point)[1]) for point in POINTS}
    title = last_average(result, "trained")[0]
    point, warnings = result.method.headline, warning_notes([result])
    if not np.isfinite(scores[point].mean):
        line = f"{result.label} on {result.config.data}: no client was scored after the last round."
        return Text(line, (), warnings)
    rounds = counted(last_round(result), "round")
    line = f"{result.label} reaches {scores[point]} % on {result.config.data} after {rounds}."
    other: Point = "received" if point == "trained" else "trained"
    change = scores["trained"].mean - scores["received"].mean
    sentences = [
        f"That is {title} {WHEN[point]}, the point that the method's authors report; {WHEN[other]} it is "
        f"{scores[other]} %. Local training changes the accuracy of the received model by {change:+.2f} points."
    ]
    values = finite_mean(result.accuracy(point))
    names = result.federation.names
    if np.isfinite(values).sum() > 1:
        high, low = int(np.nanargmax(values)), int(np.nanargmin(values))
        sentences.append(
            f"Clients differ: {names[high]} has {values[high]:.1f} %, {names[low]} has {values[low]:.1f} %."
        )
    seeds = len(result.config.seeds)
    sentences.append(
        f"± is the sample standard deviation over {seeds} seeds."
        if seeds > 1
        else "One seed was run: how much these numbers vary is not known."
    )
    return Text(line, tuple(sentences), warnings)
