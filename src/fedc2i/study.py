"""What FedC²I⁺ is worth on equal terms: tuned alike on validation, then paired with every other method over seeds.

Three rules keep it fair. A control has the same extras as FedC²I⁺ and a grid of its own. A setting is chosen by
*validation* accuracy with *other seeds* than those reported: the mean over the clients that have validation data, over
both points and over the tuning seeds; a tie goes to the preset, then to the first of the grid. And what counts as a
success (`verdict`) is written down here, whatever the numbers. Runs are computed once (`store.Store`), and only their
last round is scored.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedc2i import methods
from fedc2i.config import parse_seeds
from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.methods.base import Method
from fedc2i.plans import Observer, Plan, prepare
from fedc2i.results import Array, Result
from fedc2i.store import Store

BENCHMARKS = ("digit5", "office10")
OURS = "fedc2i-plus"
PLAIN = ("fedavg", "fedprox", "fedrep")
CONTROLS = ("fedavg-plus", "fedprox-plus", "fedrep-plus")
UNTUNED = ("local", *PLAIN, "fedc2i")
ANCHORS = (0.03, 0.1, 0.3)
GRID: Mapping[str, Mapping[str, Sequence[Any]]] = {
    **{name: {"anchor": ANCHORS} for name in CONTROLS},
    OURS: {"anchor": ANCHORS, "gamma": (2.0, 5.0, 10.0)},
}
PARTS: Mapping[str, Any] = {"influence_samples": 32, "anchor": 0.0, "average": False, "gamma": 0.0}
SHARE = 0.8  # of the seeds that are to be won: 8 of 10
DIGITS = 6  # of an accuracy in percent; closer ones are equal
PRESET = " preset"  # behind the name of a row that shows a tuned method as it comes

Found = Mapping[str, Mapping[str, Result]]  # by benchmark, then by row


@dataclass(frozen=True)
class Paired:
    """FedC²I⁺ minus another method over the same seeds: mean, its standard error (none for one seed), and counts."""

    mean: float
    error: float | None
    wins: int
    losses: int
    ties: int

    @classmethod
    def of(cls, ours: Array, theirs: Array) -> Paired:
        """From one accuracy a seed of each."""
        differences = np.round(ours - theirs, DIGITS)
        count = len(differences)
        error = float(np.std(differences, ddof=1) / math.sqrt(count)) if count > 1 else None
        signs = [int((differences > 0).sum()), int((differences < 0).sum()), int((differences == 0).sum())]
        return cls(round(float(differences.mean()), DIGITS), error, *signs)

    def __str__(self) -> str:
        return f"{self.mean:+z.2f}" + ("" if self.error is None else f", s.e. {self.error:.2f}")

    def cells(self) -> list[str]:
        """Of a table: difference, standard error, wins / losses / ties."""
        error = "" if self.error is None else f"{self.error:.2f}"
        return [f"{self.mean:+z.2f}", error, f"{self.wins} / {self.losses} / {self.ties}"]


@dataclass(frozen=True)
class Verdict:
    """Whether each target was met, and sentences that say so."""

    targets: Mapping[str, bool]
    sentences: tuple[str, ...]


def validation(result: Result, points: Sequence[Point] = POINTS) -> Array:
    """``(seeds,)`` validation accuracy: the mean over points and over the clients that have validation data."""
    metrics = result.last(result.config.seeds[0]).metrics[points[0]]
    has = ["validation_accuracy" in own for own in metrics]
    return np.array(np.mean([result.accuracy(point, "validation_accuracy")[:, has] for point in points], axis=(0, 2)))


def choose(results: Sequence[Result]) -> Result:
    """The setting with the best validation accuracy; of equal ones the preset, else the first."""
    means = [round(float(np.nan_to_num(validation(result).mean(), nan=-1.0)), DIGITS) for result in results]
    best = [result for result, mean in zip(results, means, strict=True) if mean == max(means)]
    return min(best, key=lambda result: result.method != type(result.method)())


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
    """What the numbers say about the targets, met or missed.

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
    met = sum(targets.values())
    said.append(f"Overall the target is {_met(met == len(targets))}: {met} of its {len(targets)} parts are met.")
    return Verdict(targets, tuple(said))


def trial(found: Found) -> list[str]:
    """A warning for every benchmark with other rounds than the protocol's."""
    return [note for data, rows in found.items() for note in trial_of(data, rows[OURS])]


def trial_of(data: str, run: Result | Plan) -> list[str]:
    """A warning if it has other rounds than the protocol's."""
    own, protocol = run.config.rounds, run.federation.preset.get("rounds")
    if protocol in (None, own):
        return []
    return [f"A trial of {data}, rounds: {own} for the protocol's {protocol}. It proves nothing."]


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


class Study:
    """The study's runs, planned and checked before anything is computed.

    Attributes:
        seeds: those reported.
        tuning_seeds: those that settings are chosen with; none: the presets are reported.
        chosen: by benchmark and tuned method its setting; the preset until `tune` has chosen.
        tuned: by benchmark and tuned method the results of its grid; empty until then.
    """

    def __init__(self, settings: Mapping[str, Any], tuning_seeds: str | None, store: Store) -> None:
        """Plans all that may be needed, with ``settings``, among them ``seeds``, over the presets."""
        self.seeds = parse_seeds(settings["seeds"])
        self.tuning_seeds = () if tuning_seeds is None else _tuning_seeds(tuning_seeds, self.seeds)
        self.chosen = {(data, name): methods.get(name)() for data in BENCHMARKS for name in GRID}
        self.tuned: dict[tuple[str, str], list[Result]] = {}
        self._store = store
        self._plans: dict[tuple[str, Method], Plan] = {}
        presets = [methods.get(name)() for name in (*UNTUNED, *GRID)]
        settings_of_grid = [method for name in GRID for method in grid(name)]
        parts = [part for method in (methods.get(OURS)(), *grid(OURS)) for part in without(method).values()]
        wanted = list(dict.fromkeys([*presets, *settings_of_grid, *parts]))
        for data in BENCHMARKS:
            plans = prepare(wanted, {"evaluate_every": 0, **settings}, data)
            self._plans |= {(data, method): plan for method, plan in zip(wanted, plans, strict=True)}
            if self.tuning_seeds and not any(len(client.validation.y) for client in plans[0].federation.clients):
                raise UserError(f"{data}: no client has validation data to choose by; --no-tuning reports the presets")

    def tuning_left(self) -> list[Plan]:
        """What must be run before settings can be chosen, with the seeds that are missing."""
        wanted = [(data, method) for data, name in self.chosen for method in grid(name)] if self.tuning_seeds else []
        return self._missing(wanted, self.tuning_seeds)

    def left(self) -> list[Plan]:
        """All that is to be run as far as is known: until settings are chosen, the presets stand for them."""
        found = [(data, own) for part in self._wanted() for data, rows in part.items() for own in rows.values()]
        return self.tuning_left() + self._missing(found, self.seeds)

    def tune(self, observer: Observer | None = None) -> None:
        """Computes the grids with the tuning seeds and chooses every method's setting."""
        for data, name in self.chosen if self.tuning_seeds else ():
            results = [self._compute(data, method, self.tuning_seeds, observer) for method in grid(name)]
            self.tuned[data, name] = results
            self.chosen[data, name] = choose(results).method

    def report(self, observer: Observer | None = None) -> tuple[Found, Found]:
        """Computes and returns what is compared, and FedC²I⁺ with one option removed at a time."""
        main, parts = (
            {
                data: {name: self._compute(data, method, self.seeds, observer) for name, method in rows.items()}
                for data, rows in part.items()
            }
            for part in self._wanted()
        )
        return main, parts

    def _wanted(self) -> tuple[dict[str, dict[str, Method]], dict[str, dict[str, Method]]]:
        """The rows of both by benchmark; a preset has its own where the choice differs from it on any benchmark."""
        main: dict[str, dict[str, Method]] = {}
        for data in BENCHMARKS:
            main[data] = {name: methods.get(name)() for name in UNTUNED}
            for name in GRID:
                preset = methods.get(name)()
                differs = any(self.chosen[other, name] != preset for other in BENCHMARKS)
                main[data] |= {name + PRESET: preset} if differs else {}
                main[data][name] = self.chosen[data, name]
        parts = {data: {OURS: self.chosen[data, OURS], **without(self.chosen[data, OURS])} for data in BENCHMARKS}
        return main, parts

    def _missing(self, wanted: Sequence[tuple[str, Method]], seeds: tuple[int, ...]) -> list[Plan]:
        return unfinished([self._plan(data, method, seeds) for data, method in dict.fromkeys(wanted)], self._store)

    def _plan(self, data: str, method: Method, seeds: tuple[int, ...]) -> Plan:
        plan = self._plans[data, method]
        return replace(plan, config=replace(plan.config, seeds=seeds))

    def _compute(self, data: str, method: Method, seeds: tuple[int, ...], observer: Observer | None) -> Result:
        return self._store.compute(self._plan(data, method, seeds), observer)


def unfinished(plans: Sequence[Plan], store: Store) -> list[Plan]:
    """Those that are not complete, each with the seeds that are still to be run."""
    missing = [(plan, tuple(store.missing(plan))) for plan in plans]
    return [replace(plan, config=replace(plan.config, seeds=left)) for plan, left in missing if left]


def grid(name: str) -> list[Method]:
    """A tuned method's settings, in order."""
    return [methods.get(name)(**dict(zip(GRID[name], v, strict=True))) for v in itertools.product(*GRID[name].values())]


def without(method: Method) -> dict[str, Method]:
    """FedC²I⁺ with one option removed at a time, by what was done."""
    return {f"{name}={plain(value)}": replace(method, **{name: value}) for name, value in PARTS.items()}


def plain(value: Any) -> str:
    """An option's value as typed on a command line."""
    return f"{value:g}" if type(value) in (int, float) else str(value).lower()


def _tuning_seeds(text: str, reported: Sequence[int]) -> tuple[int, ...]:
    try:
        seeds = parse_seeds(text)
    except UserError as error:
        raise UserError(f"--tuning-seeds: {error}") from None
    if not seeds or len({*seeds}) < len(seeds):
        raise UserError(f"--tuning-seeds must be different whole numbers, at least one, got '{text}'")
    if both := sorted({*seeds} & {*reported}):
        raise UserError(f"seed {both[0]} is in --seeds and in --tuning-seeds; what is reported must not choose")
    return seeds
