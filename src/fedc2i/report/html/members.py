"""The opening of a page: each client alone and together, who is first for it, and the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fedc2i.analysis.contribution.records import Contribution
from fedc2i.analysis.contribution.shapley import gain
from fedc2i.analysis.contribution.uncertainty import FEWEST_OF_CLASS, coalition_scores, estimate, is_scarce, step_of
from fedc2i.analysis.weights import finite_mean
from fedc2i.core.errors import listed
from fedc2i.engine.records import Point
from fedc2i.report.comparison import has_samples
from fedc2i.report.contribution_report import UNPROVEN, first_giver, gain_of, interval_text, reachable
from fedc2i.report.html.influence_text import client_influences
from fedc2i.report.html.side_by_side import class_sizes, common_seeds, restricted, run_to_show, scarce_clients
from fedc2i.report.table import WHEN, counted, decimals, metric_words
from fedc2i.runs.results import Result

LOCAL, POOLED = "local", "pooled"
MOST_METHODS = 4  # with a warning of one kind


class Member(NamedTuple):
    """A row: scores, their difference (positive is better) with its interval, the first giver, and the evidence."""

    name: str
    alone: str
    together: str
    difference: str
    ends: str
    helper: str
    proof: str
    is_worse: bool  # than alone
    is_certain: bool


@dataclass(frozen=True)
class Members:
    """The rows of one run, what they are of, and warnings for the top of the page."""

    title: str
    first: str  # the heading of the column of helpers
    rows: tuple[Member, ...]
    note: str
    warnings: tuple[str, ...]


def members(results: Sequence[Result], contributions: Sequence[Contribution | None]) -> Members | None:
    """From a contribution in a run's folder, else from a run of Local beside another; None without either.

    It is the run that the verdict names, else the best that was measured or has influence. Warnings are of all methods
    that are shown, if Local is one of them.
    """
    local = next((one for one in results if one.method.name == LOCAL), None)
    others = [one for one in results if one.method.name not in (LOCAL, POOLED)]
    measured = {k: own for k, own in enumerate(contributions) if own is not None}
    beside = [k for k, one in enumerate(results) if local is not None and one.method.name not in (LOCAL, POOLED)]
    if not measured and not beside:
        return None
    weighed = [k for k in beside if results[k].influence("influence_vector").size]
    place = run_to_show(results, {*measured, *beside}, measured or weighed)
    chosen = results[place]
    if place in measured:
        found = _of_contribution(chosen, measured[place])
    else:
        assert local is not None
        found = _against_local(chosen, local)
    rest = [] if local is None else [one for one in others if one is not chosen]
    if not rest:
        return found
    assert local is not None
    by_method = [(chosen.label, found.warnings), *((one.label, _against_local(one, local).warnings) for one in rest)]
    return replace(found, warnings=_labelled(by_method))


def _labelled(by_method: Sequence[tuple[str, Sequence[str]]]) -> tuple[str, ...]:
    """The warnings of several methods, each with its method's name; of very many methods only their number."""
    warned = [(label, own) for label, own in by_method if own]
    said = [f"{label}: {text[0].lower()}{text[1:]}" for label, own in warned[:MOST_METHODS] for text in own]
    if len(warned) > MOST_METHODS:
        said.append(f"The same holds for {counted(len(warned) - MOST_METHODS, 'other method')}.")
    return tuple(said)


def _of_contribution(result: Result, own: Contribution) -> Members:
    words, rows = metric_words(own.metric), []
    for name in own.clients:
        score, gain, first = own.score(name), gain_of(own, name), first_giver(own, name)
        helper = "–" if first is None or first.value <= 0 else first.giver
        proof = "–"
        if first is not None and first.value > 0:
            value = f"adds {first.value:+z.{words.digits}f}"
            proof = f"{value}, {UNPROVEN}" if first.verdict == UNPROVEN else f"helps: {value}, p {first.p:.2g}"
        ends = interval_text(gain, words.digits, " to ")
        told = gain.verdict != UNPROVEN
        rows.append(_member(name, score.alone, score.together, gain.value, ends, helper, proof, own.metric, told))
    title = f"{result.label}: each client alone and together, {words.title} {WHEN[own.point]}"
    note = (
        f"Measured by fedc2i contribution with {counted(len(own.seeds), 'seed')}: alone is the method Local; who "
        "gives most has the largest value over coalitions. Difference: positive is better."
    )
    return Members(title, "gives most", tuple(rows), note, _warnings(rows, own.point))


def _against_local(result: Result, local: Result) -> Members:
    seeds = common_seeds([result, local])
    point, metric, names = result.method.headline, result.config.metric, result.federation.names
    words = metric_words(metric)
    ours, alone = (finite_mean(restricted(one, seeds).accuracy(point, metric)) for one in (result, local))
    influences, rows = client_influences(result), []
    for k, name in enumerate(names):
        difference = words.sign * float(ours[k] - alone[k])
        found = _interval(result, local, point, seeds, k)
        ends = "" if found is None else " to ".join(f"{reachable(end, metric):+z.{words.digits}f}" for end in found)
        helper, proof = "–", "no influence is measured"
        if influences and influences[k].learned:
            first, share = influences[k].learned[0]
            helper = names[first]
            proof = f"λ {share:.{decimals(len(names))}f}, not checked"
        told = found is not None and (found[0] > 0 or found[1] < 0)
        rows.append(_member(name, float(alone[k]), float(ours[k]), difference, ends, helper, proof, metric, told))
    title = f"{result.label}: each client alone (Local) and together, {words.title} {WHEN[point]}"
    note = (
        f"{counted(len(seeds), 'common seed')}; difference: positive is better, 95 % interval over test samples and "
        "seeds. λ says who weighs most in a client's mixture, not who helps; fedc2i contribution RUN measures that."
    )
    scarce = scarce_clients(result)
    if scarce:
        note += f" No interval: fewer than {FEWEST_OF_CLASS} test samples of a class at {listed(scarce)}."
    return Members(title, "weighs most", tuple(rows), note, _warnings(rows, point))


def _member(
    name: str,
    alone: float,
    together: float,
    difference: float,
    ends: str,
    helper: str,
    proof: str,
    metric: str,
    told: bool,
) -> Member:
    digits = metric_words(metric).digits
    numbers = [f"{alone:.{digits}f}", f"{together:.{digits}f}", f"{difference:+z.{digits}f}"]
    first, second, third = (number.replace("+nan", "–").replace("nan", "–") for number in numbers)
    ends = "" if "nan" in ends else ends
    shown = round(difference, digits)  # what is rounded away is no difference
    return Member(name, first, second, third, ends, helper, proof, shown < 0, told and shown != 0)


def _interval(
    result: Result, local: Result, point: Point, seeds: tuple[int, ...], client: int
) -> tuple[float, float] | None:
    """Of the difference of one client, over seeds and test samples; None where it cannot be told."""
    ours, alone = result.predictions, local.predictions
    if ours is None or alone is None or not seeds or not has_samples([result, local]):
        return None
    metric, rows = result.config.metric, ours.rows(client)
    labels = ours.labels[rows]
    sizes = class_sizes(result, client)
    if is_scarce(metric, sizes):
        return None
    contrast, logs = gain(0, 2), {}
    for coalition, own in zip(contrast, (ours, alone), strict=True):
        logs[coalition] = np.stack([own.logs[seed, point][rows] for seed in seeds])
    values = {coalition: coalition_scores(own, labels, metric) for coalition, own in logs.items()}
    low, high = estimate(values, contrast, step=step_of(metric, len(labels), sizes)).ends
    return None if math.isnan(low) else (low, high)


def _warnings(rows: Sequence[Member], point: Point) -> tuple[str, ...]:
    """Clients that fare worse than alone at this point, in one sentence if there are any."""
    said = []
    for certain, words in ((True, "beyond chance"), (False, "which may be chance")):
        worse = [f"{row.name} ({row.difference})" for row in rows if row.is_worse and row.is_certain == certain]
        if worse:
            said.append(f"{words}: {listed(worse)}")
    return (f"Worse than training alone ({WHEN[point]}), {'; '.join(said)}.",) if said else ()
