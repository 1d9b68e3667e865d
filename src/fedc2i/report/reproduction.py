"""Every table and figure of the paper as a recipe: which runs it needs, and what is made of them.

`ARTEFACTS` names them. Runs that several recipes share are computed once (`runs.cache.Store`). All go by the protocol's
presets; only seeds, rounds and the device are the user's. Only the last round is scored, as tables show no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedc2i.analysis import weights
from fedc2i.data.federation import Federation
from fedc2i.report import figures, paper_tables
from fedc2i.report.comparison import comparison_table
from fedc2i.runs.cache import Store
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.results import Result

BENCHMARKS = ("digit5", "office10")
METHODS = ("local", "fedavg", "fedprox", "fedrep", "fedrod", "fedproto", "fedcalm", "fedic", "fedc2i")
VARIANTS = (
    "local",
    "fedavg",
    "fedc2i-client",
    "fedc2i-class-local",
    "fedc2i-class-global",
    "fedc2i",
)
GAMMAS = ("fedc2i:gamma=0.5", "fedc2i:gamma=1.0", "fedc2i:gamma=2.0", "fedc2i", "fedc2i:gamma=10.0")


@dataclass(frozen=True)
class Artefact:
    """One thing of the paper.

    Attributes:
        about: what it is.
        needs: by benchmark the methods whose runs it is made of.
        make: writes its files into a folder; returns their names.
    """

    about: str
    needs: Mapping[str, Sequence[str]]
    make: Callable[[Reproduction, Path], list[str]]


class Reproduction:
    """What is to be made, planned and checked before anything is computed."""

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any], store: Store) -> None:
        """Plans every run that the artefacts called ``names`` need, with ``settings`` over the presets."""
        self._names = names
        self._store = store
        self._results: dict[tuple[str, str], Result] = {}
        self._plans: dict[tuple[str, str], Plan] = {}
        self._federations: dict[str, Federation] = {}
        for data in BENCHMARKS:
            concerned = [ARTEFACTS[name].needs[data] for name in names if data in ARTEFACTS[name].needs]
            wanted = list(dict.fromkeys(method for methods in concerned for method in methods))
            if concerned:
                plans = prepare(wanted or ["local"], {"evaluate_every": 0, **settings}, data)
                self._federations[data] = plans[0].federation
                self._plans |= {(data, method): plan for method, plan in zip(wanted, plans, strict=False)}

    def runs_left(self) -> int:
        """How many single-seed runs are still to be computed."""
        return sum(len(self._store.missing(plan)) for plan in self._plans.values())

    def plans_left(self) -> int:
        """How many methods on a benchmark these are."""
        return sum(bool(self._store.missing(plan)) for plan in self._plans.values())

    def make(self, folder: Path, observer: Observer | None = None) -> list[str]:
        """Computes what is missing and writes every table and figure; returns the files' names."""
        for key, plan in self._plans.items():
            self._results[key] = self._store.compute(plan, observer)
        return [file for name in self._names for file in ARTEFACTS[name].make(self, folder)]

    def federation(self, data: str) -> Federation:
        """A benchmark's data."""
        return self._federations[data]

    def results(self, data: str, methods: Sequence[str]) -> list[Result]:
        """Computed results, in that order."""
        return [self._results[data, method] for method in methods]


def _main_table(data: str, name: str) -> Callable[[Reproduction, Path], list[str]]:
    def make(all_of: Reproduction, folder: Path) -> list[str]:
        found = all_of.results(data, METHODS)
        main = comparison_table(found, against_paper=True)
        return [*main.write(folder, name), *paper_tables.costs(found).write(folder, f"{name}-cost")]

    return make


def _ablation(all_of: Reproduction, folder: Path) -> list[str]:
    found = [all_of.results(data, VARIANTS) for data in BENCHMARKS]
    return paper_tables.averages("Ablation: influence vector λ and influence matrix Λ", found).write(folder, "ablation")


def _gamma(all_of: Reproduction, folder: Path) -> list[str]:
    return paper_tables.gamma_study([all_of.results(data, GAMMAS) for data in BENCHMARKS]).write(folder, "gamma")


def _influence(all_of: Reproduction, folder: Path) -> list[str]:
    written = []
    for data in BENCHMARKS:
        (result,) = all_of.results(data, ["fedc2i"])
        vectors = weights.by_round(result, "influence_vector")
        if vectors.size:  # a run that diverged in every seed measured nothing
            written += figures.write(figures.influence_vectors(result, vectors), folder, f"influence-{data}")
    return written


def _samples(all_of: Reproduction, folder: Path) -> list[str]:
    return [
        file
        for data in BENCHMARKS
        for file in figures.write(figures.samples(all_of.federation(data)), folder, f"samples-{data}")
    ]


ARTEFACTS: Mapping[str, Artefact] = {
    "table1": Artefact("Table I: Digit-5", {"digit5": METHODS}, _main_table("digit5", "table1")),
    "table2": Artefact("Table II: Office-10", {"office10": METHODS}, _main_table("office10", "table2")),
    "ablation": Artefact("Table III: λ and Λ", dict.fromkeys(BENCHMARKS, VARIANTS), _ablation),
    "gamma": Artefact("Table IV: values of γ", dict.fromkeys(BENCHMARKS, GAMMAS), _gamma),
    "influence": Artefact("the influence vectors over rounds", dict.fromkeys(BENCHMARKS, ("fedc2i",)), _influence),
    "samples": Artefact("raw samples of every client", dict.fromkeys(BENCHMARKS, ()), _samples),
}
