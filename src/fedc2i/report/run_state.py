"""What a run that another process is writing has come to, read from its folder alone.

metrics.jsonl grows line by line, and its last line may be torn. With checkpoints every round has a report in rounds/,
with influence and refused uploads; without them, influence comes when the run has ended. `summary.json` ends it.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedc2i.analysis.seed_mean import mean_weights
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_locked
from fedc2i.core.plugins import is_plugin
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs import journal
from fedc2i.runs.read import read_run
from fedc2i.runs.results import Array
from fedc2i.runs.settings import make, read_toml
from fedc2i.runs.specs import key_of, parse

RECENT = 10  # rounds that tell how long one takes


@dataclass
class State:
    """A run as far as it has come.

    Attributes:
        title: the method and its data.
        seeds: of the run.
        rounds: how many there will be; None if the settings do not say.
        clients: names, in table order, as far as they are known.
        accuracy: by point, round and client the value of each seed.
        done: by seed the last round that has been written.
        influence: the latest round that measured any, and ``(M, M)`` its vectors, mean over the seeds that are there.
        refused: uploads that were left out, by client.
        seconds_left: None while nothing tells.
        silent_for: seconds since the run last wrote something.
        finished: whether it has ended.
        cut_off: whether it has not, and nobody is working on it.
    """

    title: str
    seeds: tuple[int, ...]
    rounds: int | None
    clients: list[str] = field(default_factory=list)
    accuracy: dict[Point, dict[int, dict[str, dict[int, float]]]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    influence: tuple[int, Array] | None = None
    refused: Counter[str] = field(default_factory=Counter)
    seconds_left: float | None = None
    silent_for: float = 0.0
    finished: bool = False
    cut_off: bool = False

    @property
    def round(self) -> int:
        """The last round that all seeds have behind them."""
        return min((self.done.get(seed, 0) for seed in self.seeds), default=0)

    def curve(self, point: Point, client: str | None = None, most: int | None = None) -> list[float]:
        """A client's accuracy over the rounds that were scored, mean over seeds; of all clients if none is named.

        Args:
            point: one of the two.
            client: a name.
            most: of more rounds than these every so manieth, the first and the last always.
        """
        scored = self.accuracy.get(point, {})
        numbers = sorted(scored)
        if most is not None and len(numbers) > most > 1:
            numbers = [numbers[round(k * (len(numbers) - 1) / (most - 1))] for k in range(most)]
        rows = [scored[number] for number in numbers]
        wanted = self.clients if client is None else [client]
        found = [[_mean(list(row[name].values())) for name in wanted if name in row] for row in rows]
        return [_mean(own) for own in found if own]


class Follower:
    """Reads a run folder again and again, each time only what is new."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, comparison: Path | None = None) -> None:
        """Of a run that has begun.

        Args:
            folder: the run's.
            clock: seconds, as files' times are counted.
            comparison: the folder of the comparison it is part of.

        Raises:
            UserError: if it is not a run folder.
        """
        if not (folder / "config.toml").is_file():
            raise UserError(f"{folder}: has no config.toml, so it is not a run folder, or the run has not begun")
        self._folder, self._clock, self._whole = folder, clock, comparison or folder
        settings = read_toml(folder / "config.toml")
        rounds, seeds = settings.get("rounds"), settings.get("seeds", [0])
        said = one_line(f"{_label(settings)} on {settings.get('data', 'data')}")
        self._keeps_lock = settings.get("engine", "inprocess") == "inprocess"  # others are resumed by other commands
        self._is_named = False
        self._state = State(said, tuple(seeds), rounds if isinstance(rounds, int) else None)
        self._offset, self._inode = 0, 0
        self._known: set[str] = set()  # clients
        self._seen: dict[Path, float] = {}  # reports that were read, and when they were written
        self._latest: dict[int, tuple[int, Array]] = {}  # by seed the round and its influence vectors

    def read(self) -> State:
        """The run as it is now."""
        state = self._state
        nobody = self._keeps_lock and not is_locked(self._folder) and not is_locked(self._whole)
        if (self._folder / "summary.json").is_file():
            self._read_finished()
            return state
        state.cut_off = nobody and (self._folder / "checkpoints" / "begun.json").is_file()  # gone: it ended just now
        self._is_named = True
        self._read_metrics()
        self._read_reports()
        now = self._clock()
        last = max([_written(self._folder / "config.toml"), _written(self._folder / "metrics.jsonl"), *self._times()])
        state.silent_for = max(0.0, now - last)
        state.seconds_left = None if state.cut_off else self._left(now, last)
        return state

    def _read_metrics(self) -> None:
        path = self._folder / "metrics.jsonl"
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())  # of this very file: `resume` may put another in its place
                if status.st_ino != self._inode or status.st_size < self._offset:  # begun anew by `resume`
                    self._state.accuracy, self._state.done = {}, {}
                    self._offset, self._inode = 0, status.st_ino
                file.seek(self._offset)
                content = file.read()
        except OSError:
            return  # not there yet
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            seed, number, client = int(entry["seed"]), int(entry["round"]), one_line(entry["client"])
            if entry["point"] not in POINTS or entry["metric"] != "accuracy":
                return
            value = float("nan") if entry["value"] is None else float(entry["value"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return  # a line that somebody else wrote
        self._put(entry["point"], number, client, seed, value)

    def _put(self, point: Point, number: int, client: str, seed: int, value: float) -> None:
        state = self._state
        if client not in self._known:
            self._known.add(client)
            state.clients.append(client)
        state.accuracy.setdefault(point, {}).setdefault(number, {}).setdefault(client, {})[seed] = value
        if point == POINTS[-1]:
            state.done[seed] = max(number, state.done.get(seed, 0))

    def _read_reports(self) -> None:
        latest = self._latest
        for path in sorted((self._folder / "rounds").glob("seed*/round*.npz")):
            written = _written(path)
            if self._seen.get(path) == written:
                continue
            try:
                report = journal.read_report(path)
            except UserError:
                continue  # removed this moment, at the end of the run
            if path not in self._seen:
                self._state.refused.update(map(one_line, report.refused))
            self._seen[path] = written
            self._state.done[report.seed] = max(report.round, self._state.done.get(report.seed, 0))
            if "influence_vector" in report.influence:
                latest[report.seed] = report.round, report.influence["influence_vector"]
        if latest:
            number = max(number for number, _ in latest.values())
            self._state.influence = (
                number,
                mean_weights([own for at, own in latest.values() if at == number], helpers=2),
            )

    def _read_finished(self) -> None:
        result, state = read_run(self._folder), self._state
        if not self._is_named:  # else it keeps the name it was shown by
            state.title = one_line(f"{result.label} on {result.config.data}")
        names = [one_line(name) for name in result.federation.names]
        state.clients, state.cut_off, self._known = names, False, set(names)
        state.accuracy, state.done = {}, {}
        for report in result.rounds:
            state.done[report.seed] = report.round
            for point, metrics in report.metrics.items():
                for client, own in zip(names, metrics, strict=True):
                    if "accuracy" in own:
                        self._put(point, report.round, client, report.seed, own["accuracy"])
        measured = [report for report in result.rounds if "influence_vector" in report.influence]
        if measured:
            number = max(report.round for report in measured)
            latest = [report.influence["influence_vector"] for report in measured if report.round == number]
            state.influence = number, mean_weights(latest, helpers=2)
        refused = result.summary()["refused_uploads"].items()
        state.refused = Counter({one_line(name): int(count) for name, count in refused})
        state.finished, state.seconds_left, state.silent_for = True, 0.0, 0.0

    def _times(self) -> list[float]:
        """When the latest rounds of one seed were written; all seeds go side by side."""
        by_seed: dict[Path, list[float]] = {}
        for path, written in self._seen.items():
            by_seed.setdefault(path.parent, []).append(written)
        return sorted(max(by_seed.values(), key=max))[-RECENT - 1 :] if by_seed else []

    def _left(self, now: float, last: float) -> float | None:
        """From the time between the latest reports; without them, from the time since the run began."""
        state, times = self._state, self._times()
        if state.rounds is None or not state.round:
            return None
        gaps = [after - before for before, after in itertools.pairwise(times)]
        began = _written(self._folder / "config.toml")
        each = statistics.median(gaps) if gaps else (last - began) / state.round
        return max(0.0, each * (state.rounds - state.round) - (now - last))


def _label(settings: dict[str, Any]) -> str:
    """The method as tables call it; one of the user's own as it was typed, for nothing of it is imported here."""
    typed = str(settings.get("method", "a run"))
    try:
        if is_plugin(typed):
            return typed
        kind, name, _ = parse(typed)
        method = kind(**make(kind, {**settings, "method": name}).options)
    except (UserError, TypeError, ValueError):
        return typed
    said = key_of(method).removeprefix(kind.name).removeprefix(":")
    return f"{kind.title} ({said.replace(',', ', ')})" if said else kind.title


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mean(values: list[float]) -> float:
    finite = [value for value in values if value == value]
    return statistics.fmean(finite) if finite else float("nan")
