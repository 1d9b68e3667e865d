"""What FedC²I⁺ is worth on equal terms: tuned alike on validation, then paired with every other method over seeds.

Three rules keep it fair. A control has the same extras as FedC²I⁺ and a grid of its own. A setting is chosen by
*validation* accuracy with *other seeds* than those reported: the mean over the clients that have validation data, over
both points and over the tuning seeds; a tie goes to the preset, then to the first of the grid. And what counts as a
success is written down beforehand (`study_verdict`), whatever the numbers. Runs are computed once (`store.Store`), and
only their last round is scored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedc2i.analysis.significance import DIGITS
from fedc2i.core.errors import UserError
from fedc2i.engine.records import POINTS, Point
from fedc2i.methods import registry
from fedc2i.methods.base import Method
from fedc2i.runs.cache import Store
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.results import Array, Result
from fedc2i.runs.settings import parse_seeds

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
PRESET = " preset"  # behind the name of a row that shows a tuned method as it comes

_Part = TypeVar("_Part")

Found = Mapping[str, Mapping[str, Result]]  # by benchmark, then by row


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


def trial_of(data: str, run: Result | Plan) -> list[str]:
    """A warning if it has other rounds than the protocol's."""
    own, protocol = run.config.rounds, run.federation.preset.get("rounds")
    if protocol in (None, own):
        return []
    return [f"A trial of {data}, rounds: {own} for the protocol's {protocol}. It proves nothing."]


class Study:
    """The study's runs, planned and checked before anything is computed.

    Attributes:
        benchmarks: the data sets.
        seeds: those reported.
        tuning_seeds: those that settings are chosen with; none: the presets are reported.
        chosen: by benchmark and tuned method its setting; the preset until `tune` has chosen.
        tuned: by benchmark and tuned method the results of its grid; empty until then.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        tuning_seeds: str | None,
        store: Store,
        benchmarks: str = ",".join(BENCHMARKS),
    ) -> None:
        """Plans all that may be needed, with ``settings``, among them ``seeds``, over the presets.

        Raises:
            UserError: for anything that is unknown or does not fit.
        """
        self.benchmarks = listed("--benchmarks", benchmarks, BENCHMARKS)
        self.seeds = parse_seeds(settings["seeds"])
        self.tuning_seeds = () if tuning_seeds is None else _tuning_seeds(tuning_seeds, self.seeds)
        self.chosen = {(data, name): registry.get(name)() for data in self.benchmarks for name in GRID}
        self.tuned: dict[tuple[str, str], list[Result]] = {}
        self._store = store
        self._plans: dict[tuple[str, Method], Plan] = {}
        presets = [registry.get(name)() for name in (*UNTUNED, *GRID)]
        settings_of_grid = [method for name in GRID for method in grid(name)]
        parts = [part for method in (registry.get(OURS)(), *grid(OURS)) for part in without(method).values()]
        wanted = list(dict.fromkeys([*presets, *settings_of_grid, *parts]))
        for data in self.benchmarks:
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
        for data in self.benchmarks:
            main[data] = {name: registry.get(name)() for name in UNTUNED}
            for name in GRID:
                preset = registry.get(name)()
                differs = any(self.chosen[other, name] != preset for other in self.benchmarks)
                main[data] |= {name + PRESET: preset} if differs else {}
                main[data][name] = self.chosen[data, name]
        ours = {data: self.chosen[data, OURS] for data in self.benchmarks}
        return main, {data: {OURS: method, **without(method)} for data, method in ours.items()}

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
    values = itertools.product(*GRID[name].values())
    return [registry.get(name)(**dict(zip(GRID[name], own, strict=True))) for own in values]


def without(method: Method) -> dict[str, Method]:
    """FedC²I⁺ with one option removed at a time, by what was done."""
    return {f"{name}={plain(value)}": replace(method, **{name: value}) for name, value in PARTS.items()}


def plain(value: Any) -> str:
    """An option's value as typed on a command line."""
    return f"{value:g}" if type(value) in (int, float) else str(value).lower()


def listed(option: str, text: str, allowed: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """The parts of a list with commas, all of them among those allowed and different.

    Raises:
        UserError: if not.
    """
    return several(option, text, f"of {', '.join(allowed)}", lambda part: part if part in allowed else None)


def several(option: str, text: str, what: str, read: Callable[[str], _Part | None]) -> list[_Part]:
    """The parts of a list with commas, all different; ``read`` gives None for what is not allowed.

    Raises:
        UserError: if it does, or some are equal.
    """
    parts = [read(part.strip()) for part in text.split(",")]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({*found}) < len(found):
        raise UserError(f"{option} must be one or more, all different, {what}, got '{text}'")
    return found


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
