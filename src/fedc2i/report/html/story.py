"""What a page says in words: which method is best and how sure that is, and what the influence shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.domain_share import Mass, domain_of
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.html.caveats import caveats
from fedc2i.report.html.compare import common_seeds, differences, headline, last_round, named, restricted
from fedc2i.report.html.insights import Insight, digits, insights
from fedc2i.report.html.packing import last_influence, mean
from fedc2i.runs.results import Result, Score

FEW = 4  # seeds; all of them agree too easily
FLAT = 0.1  # others within a tenth of their equal share: nobody is singled out


@dataclass(frozen=True)
class Story:
    """A sentence to remember, those that stand behind it, and what must be known before believing it."""

    headline: str
    sentences: tuple[str, ...]
    caveats: tuple[str, ...] = ()


def verdict(results: Sequence[Result]) -> Story:
    """Of one run how it scored, of several which is best at each point."""
    if len(results) == 1:
        return _alone(results[0])
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
        line = " ".join(f"At {point}, {leaders[point]} is clearly best." for point in POINTS if clear[point])
    sentences = [_best(results, point) for point in POINTS]
    seeds = common_seeds(results)
    if len(seeds) < 2:
        why = "the runs share one seed" if seeds else "the runs share no seed"
        sentences.append(f"Nothing is said of uncertainty, as {why}; a second seed could turn the order around.")
    else:
        sentences.append(
            f"The {named(seeds)} change initial models and batches, not the data; intervals say "
            "nothing about other images."
        )
        if len(seeds) <= FEW:
            sentences.append(
                f"{len(seeds)} seeds are few: an interval leaves zero out as soon as all of them agree, as they do for "
                f"one in {2 ** (len(seeds) - 1)} pairs of equal methods."
            )
    return Story(line, tuple(sentences), caveats(results))


def _best(results: Sequence[Result], point: Point) -> str:
    best, found = differences(results, point)
    seeds = common_seeds(results)
    title, values = headline(restricted(results[best], seeds) if seeds else results[best], point)
    said = f"At {point}, {results[best].label} has the highest {title}, {Score.of(values)} %"
    if not found:
        return f"{said}."
    clear = [one for one in found if one.is_clear]
    near = [one for one in found if not one.is_clear]
    parts = []
    for one in sorted(clear, key=lambda one: one.paired.mean)[:3]:
        low, high = one.interval or (0.0, 0.0)
        parts.append(
            f"{one.paired.mean:.2f} points above {results[one.other].label} (95 % interval {low:.2f} to {high:.2f})"
        )
    more = f", and clearly above {_count(len(clear) - 3, 'more run')}" if len(clear) > 3 else ""
    text = f"{said}: {'; '.join(parts)}{more}." if parts else f"{said}."
    if near:
        listed = ", ".join(f"{results[one.other].label} ({one.paired.mean:.2f} points below)" for one in near[:4])
        listed += f" and {len(near) - 4} more" if len(near) > 4 else ""
        text += f" Not told apart from it: {listed}."
    return text


def _alone(result: Result) -> Story:
    scores = {point: Score.of(headline(result, point)[1]) for point in POINTS}
    title = headline(result, "trained")[0]
    point = result.method.headline
    rounds = last_round(result)
    known = caveats([result])
    if not np.isfinite(scores[point].mean):
        return Story(f"{result.label} on {result.config.data}: no client was scored after the last round.", (), known)
    line = f"{result.label} reaches {scores[point]} % on {result.config.data} after {_count(rounds, 'round')}."
    other: Point = "received" if point == "trained" else "trained"
    sentences = [
        f"That is {title} at its headline point, {point}; at {other} it is {scores[other]} %. A local run changes the "
        f"model a client receives by {scores['trained'].mean - scores['received'].mean:+.2f} points."
    ]
    values = mean(result.accuracy(point))
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
        else "One seed was run: how far these numbers would vary is not known."
    )
    return Story(line, tuple(sentences), known)


def influence_story(result: Result, known: Sequence[Insight] | None = None) -> Story:
    """Who helps whom after the last round, the mean over seeds.

    Args:
        result: of the run.
        known: its `insights`, where they are at hand.
    """
    found = insights(result) if known is None else known
    names = result.federation.names
    if not found:
        also = " It weighs classes, see the matrix below." if last_influence(result, "influence_matrix").size else ""
        return Story(f"{result.label} measures no influence of clients on each other.", (also.strip(),) if also else ())
    vector = last_influence(result, "influence_vector")
    equal = 1 / np.maximum(1, np.isfinite(vector).sum(1))
    own = [m for m in range(len(names)) if found[m].learned]
    ties = [(found[m].learned[0][1] / equal[m], m) for m in own]
    if not ties:
        return Story("Every client keeps to itself: nobody gives weight to anyone else.", ())
    times, m = max(ties)
    helper, share = found[m].learned[0]
    spread = max((abs(value / equal[k] - 1) for k in own for _, value in found[k].learned), default=0.0)
    flat = spread < FLAT
    if flat:
        line = "Influence is close to equal: no client is singled out as a helper."
    else:
        said = f"λ {share:.{digits(len(names))}f}, {times:.1f} times an equal share"
        line = f"{names[helper]} helps {names[m]} most: {said}."
    return Story(line, tuple(filter(None, _details(result, found, None if flat else (m, helper)))))


def _details(result: Result, found: Sequence[Insight], tie: tuple[int, int] | None) -> list[str]:
    """Sentences behind the headline, the first about the client and the helper it names, if it names any."""
    names = result.federation.names
    vector = last_influence(result, "influence_vector")
    places = digits(len(names))
    said = []
    if tie is not None:
        m, helper = tie
        one, back = found[m], vector[helper, m]
        first = f"{names[helper]} is its first helper in {one.steady} of {one.seeds} seeds. " if one.seeds > 1 else ""
        other = f"In the other direction, {names[m]} has λ {back:.{places}f} at {names[helper]}."
        said.append(first + other if np.isfinite(back) else first.strip())
    mass = Mass.of(vector, names)
    if np.isfinite(mass.itself):
        said.append(
            f"On average a client gives {_percent(mass.itself)} of λ to its own model; an equal share is "
            f"{_percent(mass.uniform_itself)}."
        )
    if len({domain_of(name) for name in names}) < len(names) and np.isfinite(mass.domain):
        said.append(
            f"{_percent(mass.domain)} of λ stays within a client's own domain, {mass.times:.1f} times what equal "
            "weights would leave there."
        )
    given = np.where(np.isfinite(vector), vector, np.nan)
    np.fill_diagonal(given, np.nan)
    taught = [float(np.nanmean(given[:, i])) if np.isfinite(given[:, i]).any() else np.nan for i in range(len(names))]
    if np.isfinite(taught).sum() > 2:
        most, least = int(np.nanargmax(taught)), int(np.nanargmin(taught))
        if taught[most] > (1 + FLAT) * taught[least]:
            said.append(
                f"The most useful to others is {names[most]} (they give it {taught[most]:.{places}f} on average), the "
                f"least {names[least]} ({taught[least]:.{places}f})."
            )
    different = [k for k, own in enumerate(found) if own.exceptions]
    if different:
        clearest = max(different, key=lambda k: found[k].exceptions[0].share - found[k].exceptions[0].usual)
        case = found[clearest].exceptions[0]
        leaning = f"{_count(len(different), 'client')} of {len(names)} lean{'s' * (len(different) == 1)}"
        said.append(
            f"{leaning} on another helper for some class than as a whole; clearest: {names[clearest]} on "
            f"{result.federation.classes[case.label]}, helped most by {names[case.helper]} (Λ {case.share:.{places}f}, "
            f"{case.share / case.equal:.1f} times an equal share)."
        )
    return said


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"


def _percent(share: float) -> str:
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"
