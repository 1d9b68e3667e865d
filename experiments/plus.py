"""FedC²I⁺ on equal terms: tuned like its controls on validation data, then paired with every method over seeds.

Three rules keep it fair. A control has the same extras as FedC²I⁺ and its own grid. A setting is chosen by *validation*
accuracy with *other seeds* than those reported: the mean over the clients that have validation data, both points and
the tuning seeds; a tie goes to the preset, then to the first of the grid. What counts as a success is decided in
`plus_verdict`, whatever the numbers.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from experiments import plus_tables
from experiments.grid import Grid, launch, parser, with_seeds
from experiments.plus_verdict import BENCHMARKS, CONTROLS, OURS, PLAIN, PRESET, Found, verdict
from fedc2i.analysis.significance import DIGITS
from fedc2i.core.errors import UserError
from fedc2i.methods import registry
from fedc2i.methods.base import Method
from fedc2i.runs.plan import Plan
from fedc2i.runs.results import Result
from fedc2i.runs.settings import parse_seeds

UNTUNED = ("local", *PLAIN, "fedc2i")
ANCHORS = (0.03, 0.1, 0.3)
GRID: Mapping[str, Mapping[str, Sequence[Any]]] = {
    **{name: {"anchor": ANCHORS} for name in CONTROLS},
    OURS: {"anchor": ANCHORS, "gamma": (2.0, 5.0, 10.0)},
}
PARTS: Mapping[str, Any] = {"influence_samples": 32, "anchor": 0.0, "average": False, "gamma": 0.0}


class Study:
    """The study's runs.

    Attributes:
        chosen: the setting of each tuned method, by benchmark and name; the preset until `tune` has chosen.
        tuned: the results of its grid; empty without tuning.
    """

    def __init__(self, grid: Grid, benchmarks: Sequence[str], tuning_seeds: tuple[int, ...]) -> None:
        """Plans all that may be needed; without tuning seeds the presets are reported.

        Raises:
            UserError: for anything that is unknown or not allowed.
        """
        self.grid, self.benchmarks, self.tuning_seeds = grid, benchmarks, tuning_seeds
        self.chosen = {(data, name): registry.get(name)() for data in benchmarks for name in GRID}
        self.tuned: dict[tuple[str, str], list[Result]] = {}
        self._plans: dict[tuple[str, Method], Plan] = {}
        presets = [registry.get(name)() for name in (*UNTUNED, *GRID)]
        settings = [method for name in GRID for method in grid_of(name)]
        parts = [part for method in (registry.get(OURS)(), *grid_of(OURS)) for part in without(method).values()]
        wanted = list(dict.fromkeys([*presets, *settings, *parts]))
        for data in benchmarks:
            plans = grid.plan(data, wanted)
            self._plans |= {(data, method): plan for method, plan in zip(wanted, plans, strict=True)}
            federation, seeds = plans[0].federation, plans[0].config.seeds
            if both := sorted({*seeds} & {*tuning_seeds}):
                raise UserError(f"seed {both[0]} is in --seeds and in --tuning-seeds; reported seeds must not choose")
            if tuning_seeds and not any(len(client.validation.y) for client in federation.clients):
                raise UserError(f"{data}: no client has validation data to choose by; --no-tuning reports the presets")

    def tune(self) -> None:
        """Computes the grids with the tuning seeds and chooses the setting of every tuned method."""
        plans = {
            (data, name): [with_seeds(self._plans[data, method], self.tuning_seeds) for method in grid_of(name)]
            for data, name in self.chosen
        }
        with self.grid.computing(itertools.chain(*plans.values())):
            for key, own in plans.items():
                self.tuned[key] = [self.grid.compute(plan) for plan in own]
                self.chosen[key] = choose(self.tuned[key]).method

    def report(self) -> tuple[Found, Found]:
        """Computes and returns what is compared, and FedC²I⁺ with one option removed at a time."""
        wanted = self.rows()
        methods = [(data, method) for rows in wanted for data, own in rows.items() for method in own.values()]
        with self.grid.computing(self._plans[key] for key in dict.fromkeys(methods)):
            main, parts = (
                {
                    data: {name: self.grid.compute(self._plans[data, method]) for name, method in own.items()}
                    for data, own in rows.items()
                }
                for rows in wanted
            )
        return main, parts

    def rows(self) -> tuple[dict[str, dict[str, Method]], dict[str, dict[str, Method]]]:
        """The rows of both by benchmark; a preset has its own where the choice differs from it on any benchmark."""
        main: dict[str, dict[str, Method]] = {}
        for data in self.benchmarks:
            main[data] = {name: registry.get(name)() for name in UNTUNED}
            for name in GRID:
                preset = registry.get(name)()
                if any(self.chosen[other, name] != preset for other in self.benchmarks):
                    main[data][name + PRESET] = preset
                main[data][name] = self.chosen[data, name]
        ours = {data: self.chosen[data, OURS] for data in self.benchmarks}
        return main, {data: {OURS: method, **without(method)} for data, method in ours.items()}


def choose(results: Sequence[Result]) -> Result:
    """The setting with the best validation accuracy; of equal ones the preset, else the first."""
    means = [plus_tables.validation(result).mean() for result in results]
    means = [round(float(np.nan_to_num(mean, nan=-1.0)), DIGITS) for mean in means]
    best = [result for result, mean in zip(results, means, strict=True) if mean == max(means)]
    return min(best, key=lambda result: result.method != type(result.method)())


def grid_of(name: str) -> list[Method]:
    """A tuned method's settings, in order."""
    values = itertools.product(*GRID[name].values())
    return [registry.get(name)(**dict(zip(GRID[name], own, strict=True))) for own in values]


def without(method: Method) -> dict[str, Method]:
    """FedC²I⁺ with one option removed at a time, by what was done."""
    return {f"{name}={plus_tables.typed(value)}": replace(method, **{name: value}) for name, value in PARTS.items()}


def run(given: Namespace) -> None:
    """The whole study."""
    benchmarks = list(dict.fromkeys(given.benchmarks))
    part = "" if {*benchmarks} == {*BENCHMARKS} else f"only-{'-'.join(benchmarks)}"
    seeds = () if given.no_tuning else tuple(dict.fromkeys(parse_seeds(given.tuning_seeds)))
    study = Study(Grid(given, part), benchmarks, seeds)
    if seeds:
        study.tune()
    main, parts = study.report()
    said = verdict(main, study.grid.warnings)
    notes = [*plus_tables.tuning_notes(main, GRID, seeds), *study.grid.notes]
    tables = plus_tables.tables(main, parts, GRID, said, notes, study.grid.warnings)
    if study.tuned:
        tables["plus-tuning"] = plus_tables.tuning(study.tuned, study.chosen, GRID, seeds)
    study.grid.finish(tables, said)


def main(typed: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = parser("plus", "FedC²I⁺ against baselines and controls with the same extras.", seeds="0-9")
    options.add_argument("--tuning-seeds", default="100-102", help="seeds that choose settings, none of those reported")
    options.add_argument("--no-tuning", action="store_true", help="report the presets")
    options.add_argument("--benchmarks", nargs="+", choices=BENCHMARKS, default=BENCHMARKS)
    return launch(run, options, typed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
