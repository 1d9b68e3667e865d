"""Runs among coalitions of a federation's clients, each computed once, over the cores of the machine.

A coalition of one client is that client in a run of the method Local, which serves all of them. Random draws depend on
the seed and the client, not on who else takes part, so values of coalitions are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from fedc2i.analysis.contribution.shapley import Coalition
from fedc2i.analysis.contribution.uncertainty import coalition_scores
from fedc2i.core.errors import UserError
from fedc2i.core.files import writing
from fedc2i.core.settings import cores
from fedc2i.engine.records import Point, Predictions, Round
from fedc2i.methods.base import Method
from fedc2i.methods.local import Local
from fedc2i.runs.cache import RunCache
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import SUMMARY, RunFolder
from fedc2i.runs.gpu_share import processes_for
from fedc2i.runs.job_process import Report
from fedc2i.runs.job_processes import side_by_side
from fedc2i.runs.plan import Plan
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings

Array = np.ndarray[Any, Any]
RUNS = "coalitions"  # the folder of their runs
EVERYONE = "everyone"  # the folder of the run over all of them
REACHED = 0.1  # of its standard error: so close to everyone's log-loss, an order is not followed further


@dataclass(frozen=True)
class Work:
    """How far the runs of some coalitions are: finished ones, and the share of all work that is done."""

    runs: int
    of_runs: int
    share: float


class Game(Protocol):
    """Runs among coalitions, wherever they are computed, and what they are worth to each member."""

    @property
    def plan(self) -> Plan:
        """Of everyone's run."""

    @property
    def say(self) -> Callable[[str], None]:
        """Takes one line for a person."""

    @property
    def notes(self) -> Sequence[str]:
        """What a reader should know of such values."""

    @property
    def count(self) -> int:
        """Of the coalitions computed so far; all single clients are one."""

    def has(self, coalitions: Iterable[Coalition]) -> bool:
        """Whether all of these are computed."""

    def missing(self, coalitions: Iterable[Coalition]) -> list[Coalition]:
        """Those still to be computed, the largest first."""

    def compute(self, coalitions: Iterable[Coalition]) -> None:
        """Runs those that are missing, and reads all."""

    def values(self, coalition: Coalition, receiver: int, metric: str, point: Point, label: int | None) -> Array:
        """``(seeds, 1 + resamples)`` of a receiver's score, higher is better; of one class alone, if it is given."""

    def has_reached(self, coalition: Coalition, receiver: int) -> bool:
        """Whether the receiver's score is that of everyone's run, so that an order need not be followed further."""

    def class_sizes(self, receiver: int) -> list[int]:
        """A receiver's test samples of each class; empty if they are not known."""

    def results(self, coalition: Coalition) -> list[Result]:
        """The runs of all seeds."""


def require(plan: Plan) -> None:
    """Refuses what cannot be trained among some of the clients only.

    Raises:
        UserError: for one client, or settings that mean something else among fewer clients.
    """
    clients = len(plan.federation.names)
    if clients < 2:
        raise UserError(f"contribution needs at least 2 clients, {plan.federation.name} has {clients}")
    require_settings(type(plan.method), plan.config, clients)
    _attack(plan, frozenset(range(clients)))


def require_settings(method: type[Method], config: RunSettings, clients: int) -> None:
    """The part of it that needs no data, for at least this many clients."""
    if issubclass(method, Local):
        raise UserError("contribution: clients of the method local share nothing; name another method")
    if config.topology != "full" or config.participants(clients) < clients:
        raise UserError("contribution needs topology=full and clients_per_round=100%")


def restricted(plan: Plan, coalition: Coalition) -> Plan:
    """The same run among some of the clients; of a single one, Local training of every client."""
    config = plan.config
    config = replace(config, workers=1, evaluate_every=config.evaluate_every if config.patience else 0)
    if len(coalition) == 1:
        alone = Local()
        config = replace(config, method=alone.name, options=asdict(alone), attack="", clip=0.0, noise=0.0)
        return replace(plan, method=alone, config=config, label=alone.title, key=alone.name)
    names = [name for m, name in enumerate(plan.federation.names) if m in coalition]
    config = replace(config, attack=_attack(plan, coalition))
    return replace(plan, federation=plan.federation.select(names), config=config)


def _attack(plan: Plan, coalition: Coalition) -> str:
    """The attack by those of the attackers that are in the coalition.

    Raises:
        UserError: if each seed has other attackers.
    """
    if not plan.config.attack:
        return ""
    from fedc2i.engine import attacks

    names = plan.federation.names
    found = {attacks.resolved(plan.config.attack, names, seed) for seed in plan.config.seeds}
    if len(found) > 1:
        raise UserError(f"contribution: name the attackers in attack={plan.config.attack}; each seed draws others")
    inside = {names[m] for m in coalition}
    parts = [part for part in found.pop().split(";") if part.partition("@")[2].strip('"') in inside]
    return ";".join(parts)


@dataclass
class CoalitionRuns:
    """What every client predicts for its test samples after training among coalitions."""

    plan: Plan
    folder: Path
    on_work: Callable[[Work], None] = lambda work: None
    say: Callable[[str], None] = lambda line: None
    notes: Sequence[str] = ()
    _predictions: dict[Coalition, Predictions] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cache = RunCache(self.folder / RUNS, models=False, predictions=True)

    @property
    def count(self) -> int:
        """Of the coalitions computed so far; all single clients are one."""
        return len(self._predictions)

    def has(self, coalitions: Iterable[Coalition]) -> bool:
        """Whether all of these are computed."""
        return {*map(run_of, coalitions)} <= self._predictions.keys()

    def missing(self, coalitions: Iterable[Coalition]) -> list[Coalition]:
        """Those still to be computed, the largest first."""
        found = [own for own in {*map(run_of, coalitions)} if self._cache.missing(restricted(self.plan, own))]
        return sorted(found, key=lambda own: (-self._size(own), sorted(own)))

    def compute(self, coalitions: Iterable[Coalition]) -> None:
        """Runs those that are missing, and reads all."""
        wanted = [own for own in {*map(run_of, coalitions)} if own not in self._predictions]
        jobs = self.missing(wanted)
        plan, cache, sizes = self.plan, self._cache, {own: self._size(own) for own in jobs}
        rounds, seeds = plan.config.rounds, len(plan.config.seeds)
        done, work, finished = 0.0, float(sum(sizes.values()) * rounds * seeds), 0

        def run(job: Coalition, report: Report) -> None:
            cache.compute(restricted(plan, job), _Observer(report))

        def on_report(job: Coalition, _: Any) -> None:
            nonlocal done
            done += sizes[job]
            self.on_work(Work(finished, len(jobs), done / work))

        on_gpu = plan.config.torch_device().type == "cuda"
        for _ in side_by_side(run, jobs, self.workers(len(jobs)), on_report, on_gpu):
            finished += 1
            self.on_work(Work(finished, len(jobs), min(1.0, done / work)))
        for own in wanted:
            self._predictions[own] = self._read(own)

    def workers(self, jobs: int) -> int:
        """How many processes work side by side."""
        config = self.plan.config
        on_gpu = config.torch_device().type == "cuda"
        most = processes_for(config, [self.plan]) if on_gpu else config.workers or max(1, cores() // config.threads)
        return min(most, jobs)

    def scores(self, coalition: Coalition, receiver: int, point: Point) -> tuple[Array, Array]:
        """Log-probabilities ``(seeds, N, C)`` of the receiver's test samples after training there, and labels."""
        found = self._predictions[run_of(coalition)]
        rows = found.rows(receiver if len(coalition) == 1 else sorted(coalition).index(receiver))
        return np.stack([found.logs[seed, point][rows] for seed in self.plan.config.seeds]), found.labels[rows]

    def values(self, coalition: Coalition, receiver: int, metric: str, point: Point, label: int | None) -> Array:
        """``(seeds, 1 + resamples)`` of a receiver's score, by its predictions for test samples."""
        logs, labels = self.scores(coalition, receiver, point)
        rows = slice(None) if label is None else labels == label
        return coalition_scores(logs[:, rows], labels[rows], metric)

    def has_reached(self, coalition: Coalition, receiver: int) -> bool:
        """Whether the receiver's log-loss is that of everyone's federation, far within its standard error."""
        everyone = frozenset(range(len(self.plan.federation.names)))
        losses = []
        for own in (everyone, coalition):
            logs, labels = self.scores(own, receiver, self.plan.method.headline)
            losses.append(-logs.astype(np.float64)[:, np.arange(len(labels)), labels].mean(0))
        difference = losses[1] - losses[0]
        error = difference.std(ddof=1) / len(difference) ** 0.5 if len(difference) > 1 else 0.0
        return bool(abs(difference.mean()) <= REACHED * error)

    def class_sizes(self, receiver: int) -> list[int]:
        """A receiver's test samples of each class."""
        return [int(count) for count in self.plan.federation.clients[receiver].test.y.bincount()]

    def results(self, coalition: Coalition) -> list[Result]:
        """The runs of all seeds, as they were written."""
        plan = restricted(self.plan, run_of(coalition))
        return [read_run(self._cache.folder(plan, seed)) for seed in plan.config.seeds]

    def write_everyone(self) -> Path:
        """Writes the run of all clients with all seeds, as a run folder without models; returns the folder."""
        everyone = frozenset(range(len(self.plan.federation.names)))
        result = self._cache.compute(restricted(self.plan, everyone))
        result.predictions = self._predictions[everyone]
        files = RunFolder(self.folder / EVERYONE, self.plan.federation.names)
        with writing(files.path):
            files.path.mkdir(exist_ok=True)
            old = files.path / "config.toml"
            if (files.path / SUMMARY).is_file() and old.read_text(encoding="utf-8") == result.config.to_toml():
                return files.path
        files.begin(result.config)
        files.restart(result.rounds)
        files.finish(result)
        return files.path

    def _read(self, coalition: Coalition) -> Predictions:
        found = [own.predictions for own in self.results(coalition)]
        if any(own is None for own in found):
            raise UserError("contribution: the predictions for all test samples are too many to store")
        parts: Sequence[Predictions] = [own for own in found if own is not None]
        return replace(parts[0], logs={key: logs for own in parts for key, logs in own.logs.items()})

    def _size(self, coalition: Coalition) -> int:
        return len(self.plan.federation.names) if len(coalition) == 1 else len(coalition)


def run_of(coalition: Coalition) -> Coalition:
    """The coalition by which its run is known: all single clients are one run."""
    return coalition if len(coalition) > 1 else frozenset({0})


class _Observer:
    """Reports every round of every seed."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def begin(self, result: Result) -> None:
        """A run starts."""

    def client(self, done: int, of: int) -> None:
        """Some clients have finished."""

    def round(self, report: Round) -> None:
        """A round ended."""
        self._report(report.round)
