"""The grid runner of all studies: runs are planned, computed once, and become tables and a verdict.

A study plans all its runs (data sets x methods x settings, each with every seed) before anything is computed, so
mistakes are found first. Runs are cached in ``OUT/runs``: the same command again computes only what is missing. Only
the last round is evaluated. A study with other rounds than the protocol's is a trial: its tables get their own folder.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.verdict import Verdict, counted
from fedc2i.core.errors import UserError
from fedc2i.methods.base import Method
from fedc2i.report.progress import ProgressView
from fedc2i.report.table import Table
from fedc2i.runs.cache import RunCache
from fedc2i.runs.gpu_share import processes_for
from fedc2i.runs.job_processes import JobProcesses
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Result
from fedc2i.runs.side_by_side_runs import compute_all

SEEDS_NOTE = "Seeds change initial models and batches, not the data: standard errors say nothing about other images."


def parser(name: str, about: str, seeds: str) -> argparse.ArgumentParser:
    """The options that all studies have."""
    found = argparse.ArgumentParser(prog=f"python -m experiments.{name}", description=about)
    found.add_argument("--data-dir", type=Path, help="folder of the data sets; or the variable FEDC2I_DATA")
    found.add_argument("--seeds", default=seeds, help="seeds that are reported, for example 0,1,2 or 0-9")
    found.add_argument("--rounds", help="a trial with other rounds than the protocol's, in its own folder")
    found.add_argument("--out", type=Path, default=Path("results"), help="folder of the tables; runs lie in runs/")
    found.add_argument("--device", default="auto", help="auto, cpu or cuda")
    found.add_argument("--workers", default="0", help="processes; on a GPU runs side by side, 1: one after the other")
    return found


def launch(study: Callable[[argparse.Namespace], None], options: argparse.ArgumentParser, typed: Sequence[str]) -> int:
    """Runs a study from the command line; returns the exit code. A mistake ends in one line."""
    try:
        study(options.parse_args(typed))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command resumes", file=sys.stderr)
        return 130
    return 0


class Grid:
    """The planned runs of a study.

    Attributes:
        folder: of the tables.
        notes: about the data, in the order of planning.
        warnings: a sentence for every data set with other rounds than the protocol's.
    """

    def __init__(self, given: argparse.Namespace, part: str = "") -> None:
        """From the options of `parser`; the tables of a part of the study have their own folder below ``OUT``."""
        named = ("seeds", "device", "data_dir", "rounds", "workers")
        self._settings = {
            name: str(value) for name, value in vars(given).items() if name in named and value is not None
        }
        trial = "" if given.rounds is None else f"trial-{given.rounds}-rounds"  # must not replace the real tables
        self.folder: Path = given.out / part / trial
        self.notes: list[str] = []
        self.warnings: list[str] = []
        self._cache = RunCache(given.out / "runs", models=False)
        self._progress: ProgressView | None = None
        self._processes: JobProcesses | None = None

    def plan(self, data: str, methods: Sequence[str | Method], **settings: Any) -> list[Plan]:
        """One plan for each method on a data set.

        Raises:
            UserError: for anything that is unknown or not allowed.
        """
        plans = prepare(methods, {"evaluate_every": 0, **self._settings, **settings}, data)
        federation, rounds = plans[0].federation, plans[0].config.rounds
        self.notes += [note for note in federation.notes if note not in self.notes]
        protocol = federation.preset.get("rounds", rounds)
        warning = f"A trial on {data} with {rounds} rounds, not the protocol's {protocol}: it proves nothing."
        if rounds != protocol and warning not in self.warnings:
            self.warnings.append(warning)
        return plans

    def missing(self, plans: Iterable[Plan]) -> list[Plan]:
        """The plans that are not complete, each with the seeds that are still to be run."""
        found = [(plan, tuple(self._cache.missing(plan))) for plan in plans]
        return [plan.with_seeds(seeds) for plan, seeds in found if seeds]

    @contextmanager
    def computing(self, plans: Iterable[Plan]) -> Iterator[None]:
        """Shows the progress of what is computed inside, of these plans; processes that share a GPU stay for all."""
        left = self.missing(plans)
        count = min(processes_for(left[0].config, left), len(left)) if left else 1
        with (
            JobProcesses(count, on_gpu=True) if count > 1 else nullcontext() as self._processes,
            ProgressView(Console(stderr=True), len(left)) as self._progress,
        ):
            runs = counted(sum(len(plan.config.seeds) for plan in left), "run")
            self._progress.say(f"Tables go to {self.folder}; {runs} to compute")
            yield
        self._progress = self._processes = None

    def compute(self, plans: Iterable[Plan]) -> list[Result]:
        """Each plan's result over all its seeds: cached runs are read, the others are run."""
        wanted = list(plans)
        compute_all(self._cache, wanted, self._progress, self._processes)
        return [self._cache.compute(plan, self._progress) for plan in wanted]

    def heading(self, line: str) -> None:
        """A line above the runs that follow."""
        if self._progress is not None:
            self._progress.heading(line)

    def finish(self, tables: Mapping[str, Table], verdict: Verdict) -> None:
        """Writes every table as Markdown, CSV and LaTeX; prints the files and the verdict."""
        for name, table in tables.items():
            for file in table.write(self.folder, name):
                print(self.folder / file)
        print("", *verdict.sentences, sep="\n")
