"""Runs that are computed once: a folder for each method, setting, seed and data, found again by what decided it."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import locked, writing
from fedc2i.runs import writer
from fedc2i.runs.driver import advance, latest, test_predictions
from fedc2i.runs.fingerprint import Fingerprint, cache_key
from fedc2i.runs.folder import SUMMARY, RunFolder, slug
from fedc2i.runs.plan import Observer, Plan, sayer
from fedc2i.runs.results import Result
from fedc2i.runs.stored_rounds import Extent, read_rounds


class RunCache:
    """A folder of single-seed runs, with every client's last models, their predictions, or neither."""

    def __init__(self, root: Path, models: bool = True, predictions: bool = False) -> None:
        self.root = root
        self._models, self._predictions = models, predictions

    def folder(self, plan: Plan, seed: int) -> Path:
        """Where a plan's run with this seed lies, or will."""
        key = cache_key(plan.config, plan.federation)
        return self.root / f"{slug(plan.config.data)}-{slug(plan.key)}-seed{seed}-{key}"

    def missing(self, plan: Plan) -> list[int]:
        """The seeds that are still to be computed."""
        return [seed for seed in plan.config.seeds if not (self.folder(plan, seed) / SUMMARY).is_file()]

    def compute(self, plan: Plan, observer: Observer | None = None) -> Result:
        """The plan's result over all its seeds: cached seeds are read, missing ones are computed first.

        An interrupted computation resumes after its last checkpoint.
        """
        self.complete(plan, observer)
        result = plan.empty_result()
        extent = Extent(plan.federation.names, len(plan.federation.classes), plan.config.rounds)
        for seed in plan.config.seeds:
            result.rounds += read_rounds(self.folder(plan, seed), extent, [seed])[seed]
        return result

    def complete(self, plan: Plan, observer: Observer | None = None) -> None:
        """Computes the seeds that are missing, and reads nothing."""
        missing = self.missing(plan)
        for seed in set(plan.config.seeds) - set(missing):
            writer.remove(self.folder(plan, seed))  # checkpoints, if a process was killed between its last two steps
        if missing:
            self._run(plan.with_seeds(missing), observer)

    def _run(self, plan: Plan, observer: Observer | None) -> None:
        """All seeds of the plan side by side; those of other processes are awaited.

        The folder of the smallest missing seed is the working folder. It has the checkpoints of all seeds and is
        finished last: as long as a seed is missing, the same folder is found again.
        """
        say = sayer(observer)
        with ExitStack() as held:
            for seed in sorted(plan.config.seeds):  # everyone in the same order: no two wait for each other
                folder = self.folder(plan, seed)
                with writing(folder):
                    folder.mkdir(parents=True, exist_ok=True)
                line = f"waiting for another process that computes {folder}"
                held.enter_context(locked(folder, partial(say, line)))
            missing = self.missing(plan)
            if not missing:  # another process computed them
                return
            plan, working = plan.with_seeds(missing), self.folder(plan, min(missing))
            can_resume = _can_resume(plan, working)
            for seed in missing:
                folder = self.folder(plan, seed)
                _remove(folder, list(folder.rglob(".*.part") if can_resume else folder.iterdir()))
            result = advance(plan, working, observer)
            if self._predictions:
                result.predictions = test_predictions(plan, result.outcomes)
            for seed in sorted(missing, reverse=True):
                own, files = result.only(seed), RunFolder(self.folder(plan, seed), plan.federation.names)
                files.begin(own.config)
                files.restart(own.rounds)
                files.finish(own if self._models else replace(own, outcomes={}))
            writer.remove(working)


def _can_resume(plan: Plan, working: Path) -> bool:
    """Whether the working folder has sound checkpoints of the same run, with these seeds or with more of them."""
    try:
        was = Fingerprint.read(working)
        seeds = [] if was is None else [int(seed) for seed in json.loads(was.settings)["seeds"]]
        if not set(plan.config.seeds) <= set(seeds) or plan.with_seeds(seeds).fingerprint != was:
            return False
        latest(plan, working)
    except (UserError, ValueError, KeyError, TypeError):
        return False
    return True


def _remove(folder: Path, entries: list[Path]) -> None:
    """Removes what another process, which was killed, left in a folder."""
    with writing(folder):
        for entry in entries:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
