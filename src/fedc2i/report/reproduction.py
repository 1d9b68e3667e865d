"""Every table and figure of the paper as a recipe: which runs it needs, and what is made of them.

`ARTEFACTS` names them. Runs that several recipes share are computed once (`runs.cache`). All go by the protocol's
presets; only seeds, rounds, device and workers are the user's. Only the last round is scored, as tables show no other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.analysis import weights
from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS, Point
from fedc2i.report import figures
from fedc2i.report.comparison import (
    BEST,
    DIFFERENCE_NOTE,
    comparison_table,
    difference,
    other_protocol,
    published_row,
    reconstructions,
    seeds_label,
    tie_notes,
    ties,
)
from fedc2i.report.progress import ProgressView
from fedc2i.report.table import POINT_COLUMN, POINT_NOTE, Row, Table, starred
from fedc2i.runs.cache import RunCache
from fedc2i.runs.gpu_share import processes_for
from fedc2i.runs.job_processes import JobProcesses
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Result, Score
from fedc2i.runs.side_by_side_runs import compute_all

BENCHMARKS = ("digit5", "office10")
METHODS = ("local", "fedavg", "fedprox", "fedrep", "fedrod", "fedproto", "fedcalm", "fedic", "fedc2i")
VARIANTS = ("local", "fedavg", "fedc2i-client", "fedc2i-class-local", "fedc2i-class-global", "fedc2i")
GAMMAS = ("fedc2i:gamma=0.5", "fedc2i:gamma=1.0", "fedc2i:gamma=2.0", "fedc2i", "fedc2i:gamma=10.0")
CHOSEN = "the γ that validation accuracy chooses at that point, and its test accuracy"
VALIDATION_NOTE = "Validation accuracy is averaged over the clients that have validation data."
SHARED = "shared"
SHARED_NOTE = (
    f"{SHARED}: several runs shared the GPU, so their seconds say nothing; `--workers 1` in a new folder measures them."
)
PUBLISHED_NOTE = "The published Avg is over all clients of the published data, at a point the paper does not name."


@dataclass(frozen=True)
class Artefact:
    """A table or figure of the paper.

    Attributes:
        needs: by benchmark the methods whose runs it is made of.
        make: from the work and the artefact's name, writes its files into a folder; returns their names.
    """

    needs: Mapping[str, Sequence[str]]
    make: Callable[[Reproduction, str, Path], list[str]]


class Reproduction:
    """What is to be made, planned and checked before anything is computed.

    Attributes:
        federations: the data of the benchmarks that are needed.
    """

    def __init__(self, names: Sequence[str], settings: Mapping[str, Any], store: RunCache) -> None:
        """Plans every run that the artefacts called ``names`` need, with ``settings`` over the presets."""
        self._names = names
        self._store = store
        self._results: dict[tuple[str, str], Result] = {}
        self._plans: dict[tuple[str, str], Plan] = {}
        self.federations: dict[str, Federation] = {}
        for data in BENCHMARKS:
            concerned = [ARTEFACTS[name].needs[data] for name in names if data in ARTEFACTS[name].needs]
            wanted = list(dict.fromkeys(method for methods in concerned for method in methods))
            if concerned:
                plans = prepare(wanted or ["local"], {"evaluate_every": 0, **settings}, data)
                self.federations[data] = plans[0].federation
                self._plans |= {(data, method): plan for method, plan in zip(wanted, plans, strict=False)}

    def runs_left(self) -> int:
        """How many single-seed runs are still to be computed."""
        return sum(len(self._store.missing(plan)) for plan in self._plans.values())

    def plans_left(self) -> int:
        """How many methods on a benchmark these are."""
        return sum(bool(self._store.missing(plan)) for plan in self._plans.values())

    def make(self, folder: Path, view: ProgressView | None = None, processes: JobProcesses | None = None) -> list[str]:
        """Computes what is missing and writes every table and figure; returns the files' names.

        On a GPU runs are computed side by side, by ``processes`` if they were started early, and a thread writes each
        table or figure when the last of its runs ends.
        """
        made: dict[str, Future[list[str]]] = {}
        drawing = ThreadPoolExecutor(1)

        def read(key: tuple[str, str]) -> None:
            self._results[key] = self._store.compute(self._plans[key], view)

        def draw_complete() -> None:
            for name in self._names:
                if name not in made and self._results.keys() >= set(self._needed(name)):
                    made[name] = drawing.submit(ARTEFACTS[name].make, self, name, folder)

        def on_computed(plan: Plan) -> None:
            read(next(key for key, own in self._plans.items() if own is plan))
            draw_complete()

        try:
            compute_all(self._store, list(self._plans.values()), view, processes, on_computed)
            left = [key for key in self._plans if key not in self._results]
            if processes is not None:
                processes.end()  # they do so while the last tables are written
                if any(self._store.missing(self._plans[key]) for key in left):
                    processes.wait()  # we need the GPU's memory
            for key in left:
                read(key)
            draw_complete()
            return [file for name in self._names for file in made[name].result()]
        finally:
            drawing.shutdown(cancel_futures=True)

    def results(self, name: str) -> list[list[Result]]:
        """What an artefact needs: by benchmark the results of its methods, in their order."""
        needs = ARTEFACTS[name].needs
        return [[self._results[data, method] for method in methods] for data, methods in needs.items()]

    def _needed(self, name: str) -> list[tuple[str, str]]:
        return [(data, method) for data, methods in ARTEFACTS[name].needs.items() for method in methods]


# What the recipes make.


def _main_table(work: Reproduction, name: str, folder: Path) -> list[str]:
    (found,) = work.results(name)
    table = comparison_table(found, against_paper=True)
    return [*table.write(folder, name), *cost_table(found).write(folder, f"{name}-cost")]


def _ablation(work: Reproduction, name: str, folder: Path) -> list[str]:
    title = "Ablation: influence vector λ and influence matrix Λ"
    return averages_table(title, work.results(name)).write(folder, name)


def _gamma(work: Reproduction, name: str, folder: Path) -> list[str]:
    return gamma_table(work.results(name)).write(folder, name)


def _influence(work: Reproduction, name: str, folder: Path) -> list[str]:
    written = []
    for (result,) in work.results(name):
        vectors = weights.by_round(result, "influence_vector")
        if vectors.size:  # a run that diverged in every seed measured nothing
            figure = figures.influence_vectors(result, vectors)
            written += figures.write(figure, folder, f"{name}-{result.config.data}")
    return written


def _samples(work: Reproduction, name: str, folder: Path) -> list[str]:
    drawn = {data: figures.samples(federation) for data, federation in work.federations.items()}
    return [file for data, figure in drawn.items() for file in figures.write(figure, folder, f"{name}-{data}")]


ARTEFACTS: Mapping[str, Artefact] = {
    "table1": Artefact({"digit5": METHODS}, _main_table),
    "table2": Artefact({"office10": METHODS}, _main_table),
    "ablation": Artefact(dict.fromkeys(BENCHMARKS, VARIANTS), _ablation),  # Table III
    "gamma": Artefact(dict.fromkeys(BENCHMARKS, GAMMAS), _gamma),  # Table IV
    "influence": Artefact(dict.fromkeys(BENCHMARKS, ("fedc2i",)), _influence),
    "samples": Artefact(dict.fromkeys(BENCHMARKS, ()), _samples),
}


# Tables over several data sets.


def averages_table(title: str, found: Sequence[Sequence[Result]]) -> Table:
    """The averages of every method on several data sets, at both points, beside the published ones.

    ``found`` holds for each data set the same methods in the same order.
    """
    header = [name for results in found for name in _columns(results[0])]
    table = Table(f"{title}; {seeds_label(found[0][0].config.seeds)}", ("Method", POINT_COLUMN, *header), bold=BEST)
    all_ties = [ties(results) for results in found]
    for rows in zip(*found, strict=True):
        for point in POINTS:
            cells: list[str] = []
            marks: set[int] = set()
            for result, results, tied in zip(rows, found, all_ties, strict=True):
                own = _cells(result, point)
                best = [max(printed) for printed in zip(*(_means(other, point) for other in results), strict=True)]
                marks |= {2 + len(cells) + k for k, mean in enumerate(_means(result, point)) if mean == best[k]}
                own[len(best) - 1] += " ~" if (result.key, point) in tied else ""
                cells += own
            table.rows.append(_row(rows[0].label, rows[0], point, cells, marks))
    tied_notes = tie_notes("a data set's last average", found[0])
    table.notes = [POINT_NOTE, *tied_notes, PUBLISHED_NOTE, DIFFERENCE_NOTE, *_notes(found)]
    return table


def gamma_table(found: Sequence[Sequence[Result]]) -> Table:
    """Validation and test averages for every γ on several data sets; the choice falls on validation alone."""
    header: list[str] = []
    for results in found:
        header += [f"{results[0].config.data} validation", *_columns(results[0])]
    table = Table(f"Effect of γ; {seeds_label(found[0][0].config.seeds)}", ("γ", POINT_COLUMN, *header), bold=CHOSEN)
    for rows in zip(*found, strict=True):
        for point in POINTS:
            cells: list[str] = []
            marks: set[int] = set()
            for result, results in zip(rows, found, strict=True):
                if result is max(results, key=lambda other: _validation(other, point).mean):
                    marks |= {2 + len(cells) + k for k in range(1 + len(_means(result, point)))}
                cells += [str(_validation(result, point)), *_cells(result, point)]
            gamma = f"{rows[0].config.options['gamma']:g}"
            table.rows.append(_row(gamma, rows[0], point, cells, marks))
    table.notes = [POINT_NOTE, VALIDATION_NOTE, PUBLISHED_NOTE, DIFFERENCE_NOTE, *_notes(found)]
    return table


def cost_table(results: Sequence[Result]) -> Table:
    """Measured cost of every method: traffic of one client in one round, and seconds of a whole round."""
    config = results[0].config
    table = Table(
        f"Cost on {config.data}, {config.model}, {len(results[0].federation.names)} clients",
        ("Method", "Device", "up (kB)", "down (kB)", "seconds a round"),
    )
    is_shared = processes_for(config) > 1
    for result in results:
        sizes = (f"{result.bytes_up / 1000:.1f}", f"{result.bytes_down / 1000:.1f}")
        seconds = SHARED if is_shared else f"{result.seconds / len(result.rounds):.3f}"
        table.rows.append(Row((result.label, config.torch_device().type, *sizes, seconds)))
    table.notes = [
        "up and down: bytes of the tensors that one client sends and receives in a round, on average; seconds: local "
        "training of all clients, exchange, and evaluation in rounds that are scored. Seeds are computed side by "
        "side; this is the share of one.",
        *([SHARED_NOTE] if is_shared else []),
        *reconstructions(results),
    ]
    return table


def _row(name: str, result: Result, point: Point, cells: Sequence[str], marks: set[int]) -> Row:
    where = starred(point, result.method.headline)
    return Row((name, where, *cells), best=frozenset(marks), ends_section=point == "trained")


def _columns(result: Result) -> list[str]:
    """Our averages on a data set, the published one, and the difference from it."""
    data = result.config.data
    return [*(f"{data} {title}" for title in result.averages("trained")), f"{data} published Avg", "difference"]


def _cells(result: Result, point: Point) -> list[str]:
    """As `_columns`; the published average stands only beside the trained point."""
    printed = published_row(result).get("Avg")
    shown = str(printed) if printed is not None and point == "trained" else ""
    away = difference(result.scores(point)["Avg"], printed, "Avg", result)
    return [*(str(Score.of(values)) for values in result.averages(point).values()), shown, away]


def _means(result: Result, point: Point) -> list[float]:
    """The averages as printed."""
    return [round(float(values.mean()), 2) for values in result.averages(point).values()]


def _notes(found: Sequence[Sequence[Result]]) -> list[str]:
    return [note for results in found for note in (*other_protocol(results[0]), *results[0].federation.notes)]


def _validation(result: Result, point: Point) -> Score:
    return Score.of(np.nanmean(result.accuracy(point, "validation_accuracy"), axis=1))
