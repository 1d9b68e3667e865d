"""What the study of FedC²I⁺ says: paired differences, and whether each target was met, whatever the numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from experiments.verdict import Verdict, counted, met
from fedc2i.analysis.significance import DIGITS, Paired
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.table import WHEN
from fedc2i.runs.results import Array, Result

BENCHMARKS = ("digit5", "office10")
OURS = "fedc2i-plus"
PLAIN = ("fedavg", "fedprox", "fedrep")
CONTROLS = ("fedavg-plus", "fedprox-plus", "fedrep-plus")
PRESET = " preset"  # after the name of a row that shows a tuned method with its preset
SHARE = 0.8  # of the seeds that must be won: 8 of 10

Found = Mapping[str, Mapping[str, Result]]  # by benchmark, then by row


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


def verdict(found: Found, warnings: Sequence[str] = ()) -> Verdict:
    """What the numbers say about the targets, met or missed; one benchmark alone decides none.

    Best mean: above every other method's row, preset rows of the controls included, at both points on all benchmarks.
    Wins: at least 80 % of the seeds, rounded up, on each benchmark against each of those named.
    """
    pairs, first = compare(found), next(iter(found.values()))
    titles = {name: result.method.title + PRESET * name.endswith(PRESET) for name, result in first.items()}
    seeds = len(first[OURS].config.seeds)
    enough = math.ceil(round(SHARE * seeds, DIGITS))
    places, missing = " and ".join(found), [data for data in BENCHMARKS if data not in found]
    said = [f"Without {data} no target is decided: all need {' and '.join(BENCHMARKS)}." for data in missing]
    said += warnings
    best = True
    for data, point in itertools.product(found, POINTS):
        own = {name: pairs[data, name, point] for name in found[data] if name not in (OURS, OURS + PRESET)}
        rival = min(own, key=lambda name: own[name].mean)
        best &= all(pair.mean > 0 for pair in own.values())
        said.append(f"On {data} {WHEN[point]}, {titles[OURS]} {_rank(own[rival], titles[rival])}.")
    targets = {"best mean": best}
    if not missing:
        said.append(f"Target 1, the best mean at both points on {places}: {met(best)}.")
    contests: list[tuple[Point, Sequence[str]]] = [("received", (*PLAIN, *CONTROLS)), ("trained", PLAIN)]
    for number, (point, others) in enumerate(contests, 2):
        few = []
        for data in found:
            wins = {name: pairs[data, name, point].wins for name in others}
            few += [f"{titles[name]} on {data}" for name in others if wins[name] < enough]
            listed = ", ".join(f"{wins[name]} against {titles[name]}" for name in others)
            said.append(f"On {data} {WHEN[point]}, it wins in {counted(seeds, 'seed')}: {listed}.")
        targets[f"wins {WHEN[point]}"] = not few
        short = f" (too few against {', '.join(few)})" if few else ""
        whom = "each of these six" if len(others) > len(PLAIN) else "each plain baseline"
        target = f"at least {enough} wins in {counted(seeds, 'seed')} {WHEN[point]} against {whom} on {places}"
        if not missing:
            said.append(f"Target {number}, {target}: {met(not few)}{short}.")
    for data in found:
        listed = ", ".join(_standing(pairs[data, name, "trained"], titles[name]) for name in CONTROLS)
        said.append(f"Against the controls with the same extras, on {data} {WHEN['trained']}, it is {listed}.")
    if missing:
        return Verdict({}, tuple(said))
    count = sum(targets.values())
    said.append(f"Overall the target is {met(count == len(targets))}: {count} of its {len(targets)} parts are met.")
    return Verdict(targets, tuple(said))


def _rank(rival: Paired, title: str) -> str:
    if rival.mean == 0:
        return f"shares the best mean, which is not enough, with {title} (difference {rival})"
    stands = "has the best mean; the next is" if rival.mean > 0 else "does not have the best mean; above it is"
    return f"{stands} {title} (difference {rival})"


def _standing(pair: Paired, title: str) -> str:
    counts = f"{pair.wins} wins, {pair.losses} losses, {pair.ties} ties"
    if pair.mean == 0:
        return f"level with {title} ({counts})"
    side = "above" if pair.mean > 0 else "below"
    if pair.error is None:
        return f"{side} {title} in a single seed ({pair})"
    unsure = " but within two standard errors" if abs(pair.mean) <= 2 * pair.error else ""
    return f"{side} {title}{unsure} ({pair}; {counts})"
