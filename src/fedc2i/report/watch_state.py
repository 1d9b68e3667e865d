"""The state of a run that another process is writing, read from its folder alone, for ``fedc2i watch``.

metrics.jsonl grows line by line, and its last line may be incomplete. With checkpoints every round has a report in
rounds/, with influence and rejected uploads; without them, influence comes when the run has ended. `summary.json` is
written last.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedc2i.analysis.weights import mean_weights
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_locked, is_plugin
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import read_report
from fedc2i.runs.plan import key_of, parse_method
from fedc2i.runs.results import Array, summary
from fedc2i.runs.settings import make, read_toml
from fedc2i.training.metrics import HIGHER_IS_BETTER

Scores = dict[int, dict[str, dict[int, float]]]  # by round, client and seed
RECENT = 10  # rounds that the estimate of a round's time is based on


@dataclass
class WatchedRun:
    """A run up to its latest round."""

    title: str  # the method and its data
    seeds: tuple[int, ...]
    rounds: int | None  # how many there will be, if the settings have a number
    clients: list[str] = field(default_factory=list)  # the names known so far, in table order
    metric: str = "accuracy"
    scores: dict[Point, Scores] = field(default_factory=dict)  # of that metric
    done: dict[int, int] = field(default_factory=dict)  # by seed the last round that has been written
    influence: tuple[int, Array] | None = None  # the latest round with any, and its vectors (M, M), mean over seeds
    rejected: Counter[str] = field(default_factory=Counter)  # uploads, by client
    seconds_left: float | None = None  # an estimate, if there is one
    silent_for: float = 0.0  # seconds since the run last wrote something
    finished: bool = False
    interrupted: bool = False  # it is not finished, and no process is working on it

    @property
    def round(self) -> int:
        """The last round that all seeds have finished."""
        return min((self.done.get(seed, 0) for seed in self.seeds), default=0)

    def curve(self, point: Point, client: str | None = None, most: int | None = None) -> list[float]:
        """The metric over the scored rounds, mean over seeds, of one client or the mean over all.

        Of more than ``most`` rounds, that many are returned, spread evenly from the first to the last.
        """
        scored = self.scores.get(point, {})
        numbers = sorted(scored)
        if most is not None and len(numbers) > most > 1:
            numbers = [numbers[round(k * (len(numbers) - 1) / (most - 1))] for k in range(most)]
        wanted = self.clients if client is None else [client]
        rows = [scored[number] for number in numbers]
        found = [[_mean(row[name].values()) for name in wanted if name in row] for row in rows]
        return [_mean(own) for own in found if own]


class RunWatcher:
    """Reads a run folder again and again, each time only what is new."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, comparison: Path | None = None) -> None:
        """For the folder of a run, and of the comparison it is part of, if any; ``clock`` counts as files' times do.

        Raises:
            UserError: if it is not a run folder.
        """
        if not (folder / "config.toml").is_file():
            raise UserError(f"{folder}: has no config.toml: not a run folder, or the run has not started yet")
        self._folder, self._clock, self._whole = folder, clock, comparison or folder
        settings = read_toml(folder / "config.toml")
        rounds, seeds = settings.get("rounds"), settings.get("seeds", [0])
        title = one_line(f"{_label(settings)} on {settings.get('data', 'data')}")
        self._has_lock = settings.get("engine", "inprocess") == "inprocess"  # other engines do not lock the folder
        self._is_named = False
        self._run = WatchedRun(title, tuple(seeds), rounds if isinstance(rounds, int) else None)
        if settings.get("metric") in HIGHER_IS_BETTER:
            self._run.metric = settings["metric"]
        self._offset, self._inode = 0, 0
        self._known: set[str] = set()  # clients
        self._seen: dict[Path, float] = {}  # reports that were read, and when they were written
        self._latest: dict[int, tuple[int, Array]] = {}  # by seed the round and its influence vectors

    def read(self) -> WatchedRun:
        """The run now."""
        run = self._run
        nobody = self._has_lock and not is_locked(self._folder) and not is_locked(self._whole)
        if (self._folder / "summary.json").is_file():
            self._read_finished()
        else:
            started = (self._folder / "checkpoints" / "fingerprint.json").is_file()  # if not, the run ended just now
            run.interrupted = nobody and started
            self._is_named = True
            self._read_metrics()
            self._read_reports()
            self._estimate_time()
        if self._latest:
            number = max(number for number, _ in self._latest.values())
            own = [vectors for at, vectors in self._latest.values() if at == number]
            run.influence = number, mean_weights(own, helpers=2)
        return run

    def _read_metrics(self) -> None:
        path = self._folder / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())  # of this very file: `resume` may put another in its place
                if status.st_ino != self._inode or status.st_size < self._offset:  # written again by `resume`
                    self._run.scores, self._run.done = {}, {}
                    self._offset, self._inode = 0, status.st_ino
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return  # not there yet
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                entry = json.loads(line)
                if entry["point"] in POINTS and entry["metric"] == self._run.metric:
                    value = math.nan if entry["value"] is None else float(entry["value"])
                    client = one_line(entry["client"])
                    self._put(entry["point"], int(entry["round"]), client, int(entry["seed"]), value)
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue  # not a line of ours

    def _put(self, point: Point, number: int, client: str, seed: int, value: float) -> None:
        run = self._run
        if client not in self._known:
            self._known.add(client)
            run.clients.append(client)
        run.scores.setdefault(point, {}).setdefault(number, {}).setdefault(client, {})[seed] = value
        if point == POINTS[-1]:
            run.done[seed] = max(number, run.done.get(seed, 0))

    def _read_reports(self) -> None:
        for path in sorted((self._folder / "rounds").glob("seed*/round*.npz")):
            written = _written(path)
            if self._seen.get(path) == written:
                continue
            try:
                report = read_report(path)
            except UserError:
                continue  # removed this moment, at the end of the run
            if path not in self._seen:
                self._run.rejected.update(map(one_line, report.refused))
            self._seen[path] = written
            self._run.done[report.seed] = max(report.round, self._run.done.get(report.seed, 0))
            if "influence_vector" in report.influence:
                self._latest[report.seed] = report.round, report.influence["influence_vector"]

    def _read_finished(self) -> None:
        result, run = read_run(self._folder), self._run
        if not self._is_named:  # otherwise the title shown so far stays
            run.title = one_line(f"{result.label} on {result.config.data}")
        names = [one_line(name) for name in result.federation.names]
        run.clients, self._known = names, set(names)
        run.scores, run.done, self._latest = {}, {}, {}
        for report in result.rounds:
            run.done[report.seed] = report.round
            for point, metrics in report.metrics.items():
                for client, own in zip(names, metrics, strict=True):
                    if run.metric in own:
                        self._put(point, report.round, client, report.seed, own[run.metric])
            if "influence_vector" in report.influence:
                self._latest[report.seed] = report.round, report.influence["influence_vector"]
        rejected = summary(result)["refused_uploads"].items()
        run.rejected = Counter({one_line(name): int(count) for name, count in rejected})
        run.finished, run.interrupted, run.seconds_left, run.silent_for = True, False, 0.0, 0.0

    def _estimate_time(self) -> None:
        """Of the rounds left, from the time between the latest reports; without them, since the run began."""
        by_seed: dict[Path, list[float]] = {}  # which run side by side
        for path, written in self._seen.items():
            by_seed.setdefault(path.parent, []).append(written)
        times = sorted(max(by_seed.values(), key=max))[-RECENT - 1 :] if by_seed else []
        run, began = self._run, _written(self._folder / "config.toml")
        last = max([began, _written(self._folder / "metrics.jsonl"), *times])
        run.silent_for = max(0.0, self._clock() - last)
        run.seconds_left = None
        if run.rounds is not None and run.round and not run.interrupted:
            gaps = [after - before for before, after in itertools.pairwise(times)]
            each = statistics.median(gaps) if gaps else (last - began) / run.round
            run.seconds_left = max(0.0, each * (run.rounds - run.round) - run.silent_for)


def _label(settings: dict[str, Any]) -> str:
    """The method's label in tables; a user's own method as typed, as its code is not imported here."""
    typed = str(settings.get("method", "a run"))
    try:
        if is_plugin(typed):
            return typed
        kind, name, _ = parse_method(typed)
        method = kind(**make(kind, {**settings, "method": name}).options)
    except (UserError, TypeError, ValueError):
        return typed
    options = key_of(method).removeprefix(kind.name).removeprefix(":")
    return f"{kind.title} ({options.replace(',', ', ')})" if options else kind.title


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mean(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else math.nan
