"""What the study of FedC²I⁺ says: paired differences, and whether each target was met, whatever the numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from fedc2i.analysis.significance import DIGITS
from fedc2i.analysis.verdicts import Paired, Verdict
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.study_plus import BENCHMARKS, CONTROLS, OURS, PLAIN, PRESET, Found, trial_of
from fedc2i.runs.results import Array, Result

SHARE = 0.8  # of the seeds that are to be won: 8 of 10


def last_average(result: Result, point: Point) -> Array:
    """``(seeds,)`` test accuracy by the data set's last average: Avg-4 of Digit-5, Avg of Office-10."""
    return list(result.averages(point).values())[-1]


def compare(found: Found) -> dict[tuple[str, str, Point], Paired]:
    """FedC²I⁺ minus every other row, by benchmark, row and point."""
    return {
        (data, name, point): Paired.of(last_average(rows[OURS], point), last_average(result, point))
        for data, rows in found.items()
        for name, result in rows.items()
        for point in POINTS
        if name != OURS
    }


def verdict(found: Found) -> Verdict:
    """What the numbers say about the targets, met or missed; of one benchmark alone neither.

    Best mean: above every other method's row, preset rows of the controls included, at both points on all benchmarks.
    Wins: at least 80 % of the seeds, rounded up, on each benchmark against each of those named.
    """
    pairs, first = compare(found), next(iter(found.values()))
    titles = {name: result.method.title + PRESET * name.endswith(PRESET) for name, result in first.items()}
    count = len(first[OURS].config.seeds)
    enough = math.ceil(round(SHARE * count, DIGITS))
    places = " and ".join(found)
    said = trial(found)
    best = True
    for data, point in itertools.product(found, POINTS):
        own = {name: pairs[data, name, point] for name in found[data] if name not in (OURS, OURS + PRESET)}
        rival = min(own, key=lambda name: own[name].mean)
        best &= all(pair.mean > 0 for pair in own.values())
        stands = "has the best mean; the next is" if own[rival].mean > 0 else "does not have the best mean; above it is"
        stands = stands if own[rival].mean else "shares the best mean, which is not enough, with"
        said.append(f"On {data} at {point} {titles[OURS]} {stands} {titles[rival]} (difference {own[rival]}).")
    said.append(f"Target 1, the best mean at both points on {places}: {_met(best)}.")
    targets = {"best mean": best}
    contests: list[tuple[Point, Sequence[str]]] = [("received", (*PLAIN, *CONTROLS)), ("trained", PLAIN)]
    for number, (point, others) in enumerate(contests, 2):
        few = []
        for data in found:
            wins = {name: pairs[data, name, point].wins for name in others}
            few += [f"{titles[name]} on {data}" for name in others if wins[name] < enough]
            listed = ", ".join(f"{wins[name]} against {titles[name]}" for name in others)
            said.append(f"On {data} at {point} it wins, of {_seeds(count)}, {listed}.")
        short = f" (too few against {', '.join(few)})" if few else ""
        whom = "each of these six" if len(others) > len(PLAIN) else "each plain baseline"
        target = f"at least {enough} of {_seeds(count)} at {point} against {whom} on {places}"
        said.append(f"Target {number}, {target}: {_met(not few)}{short}.")
        targets[f"wins at {point}"] = not few
    for data in found:
        stand = ", ".join(_standing(pairs[data, name, "trained"], titles[name]) for name in CONTROLS)
        said.append(f"Against the controls, which have the same extras, on {data} at trained it is {stand}.")
    if set(found) < set(BENCHMARKS):
        return Verdict({}, tuple(line for line in said if not line.startswith("Target")))
    met = sum(targets.values())
    said.append(f"Overall the target is {_met(met == len(targets))}: {met} of its {len(targets)} parts are met.")
    return Verdict(targets, tuple(said))


def trial(found: Found) -> list[str]:
    """A warning for every benchmark with other rounds than the protocol's, and where one is missing."""
    both = " and ".join(BENCHMARKS)
    missing = [
        f"Without {data}: the targets are for {both}, so none is decided." for data in BENCHMARKS if data not in found
    ]
    return missing + [note for data, rows in found.items() for note in trial_of(data, rows[OURS])]


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def _seeds(count: int) -> str:
    return "1 seed" if count == 1 else f"{count} seeds"


def _standing(pair: Paired, title: str) -> str:
    counts = f"{pair.wins} wins, {pair.losses} losses, {pair.ties} ties"
    if pair.mean == 0:
        return f"level with {title} ({counts})"
    side = "above" if pair.mean > 0 else "below"
    if pair.error is None:
        return f"{side} {title} in a single seed ({pair})"
    unsure = " but within two standard errors" if abs(pair.mean) <= 2 * pair.error else ""
    return f"{side} {title}{unsure} ({pair}; {counts})"
