"""What a run writes while it computes, from one separate thread: reports, metrics and checkpoints.

The round loop hands over reports and, when a checkpoint is due, a copy of its state in host memory, and continues. The
thread writes everything in the order in which it came, so a checkpoint's reports are on the disk before it. What waits
to be written when the process is killed is computed again. If something cannot be written, the round loop stops.
"""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.core.files import sync, to_json, write_atomically, writing
from fedc2i.core.params import size_in_bytes
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import ResumePoint, State, last_rounds, snapshot
from fedc2i.engine.records import Round
from fedc2i.runs.fingerprint import FINGERPRINT, Fingerprint
from fedc2i.runs.folder import RunFolder, read_reports, reports_folder, write_report

MUCH = 10**9  # bytes of a checkpoint that a user should know of
COPIED = 0.25  # of the free memory for a copy of the state; a larger one is written before the next round
SHARE = 0.05  # of the time that checkpoints may take; longer ones are written less often


class _Snapshot(NamedTuple):
    round: int
    state: State
    wait: Callable[[], None]
    took: float  # seconds of the round loop


class RunWriter:
    """A context in which a run's reports and checkpoints are written; everything is when it ends without an error."""

    def __init__(self, files: RunFolder, seconds: float | None) -> None:
        """A checkpoint ``seconds`` after the last one, 0: after every round; None: no reports and checkpoints."""
        self._files, self._seconds = files, seconds
        self._jobs: queue.SimpleQueue[Round | _Snapshot | None] = queue.SimpleQueue()
        self._unsynced: list[Path] = []
        self._idle = threading.Event()  # no checkpoint is being written
        self._idle.set()
        self._due = time.monotonic() + (seconds or 0.0)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="run-writer", daemon=True)

    def __enter__(self) -> RunWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._jobs.put(None)
        self._thread.join()
        if error is None:
            self._raise()

    def record(self, report: Round) -> None:
        """Takes a round's report."""
        self._raise()
        self._jobs.put(report)

    def save(self, number: int, state: Callable[[], State]) -> None:
        """Takes the state after a round, if a checkpoint is due."""
        if self._seconds is None or (self._seconds and (time.monotonic() < self._due or not self._idle.is_set())):
            return
        self._idle.wait()
        self._raise()
        self._idle.clear()
        began = time.monotonic()
        now = state()
        fits = size_in_bytes(now[0]) <= COPIED * memory.available()
        copy, wait = snapshot(now) if fits else (now, lambda: None)
        self._due = time.monotonic() + self._seconds
        self._jobs.put(_Snapshot(number, copy, wait, time.monotonic() - began))
        if not fits:  # the next round changes what is being written
            self._idle.wait()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:
                    self._write(job)
            except BaseException as error:  # the round loop raises it
                self._error = error
            if isinstance(job, _Snapshot):
                self._idle.set()

    def _write(self, job: Round | _Snapshot) -> None:
        if isinstance(job, _Snapshot):
            self._write_checkpoint(job)
            return
        if self._seconds is not None:
            self._unsynced.append(write_report(reports_folder(self._files.path, job.seed), job, durable=False))
        self._files.record(job)

    def _write_checkpoint(self, job: _Snapshot) -> None:
        began = time.thread_time()
        with writing(self._files.path):
            for path in (*self._unsynced, *{path.parent for path in self._unsynced}):
                sync(path)
        self._unsynced.clear()
        job.wait()
        checkpoint.save(states_folder(self._files.path), job.round, *job.state)
        took = job.took + time.thread_time() - began
        if self._seconds:
            self._due = max(self._due, time.monotonic() + took / SHARE)


def begin(folder: Path, fingerprint: Fingerprint, size: int, seconds: float | None, say: Callable[[str], None]) -> None:
    """Removes what an interruption left half-written, and writes down what the run is started with.

    If checkpoints of ``size`` bytes are large, a line says so.
    """
    with writing(folder):
        for rest in folder.rglob(".*.part"):
            rest.unlink(missing_ok=True)
    write_atomically(folder / FINGERPRINT, to_json(asdict(fingerprint)).encode(), durable=True)
    if seconds is not None and size >= MUCH:
        often = f"every {seconds:g} s or more" if seconds else "after every round"
        say(
            f"checkpoints of about {size / 1e9:.1f} GB are written into {states_folder(folder)} {often}; "
            "checkpoint_seconds=S (--set) changes that"
        )


def latest(
    folder: Path, seeds: Sequence[int], require_fit: Callable[[State, int], None]
) -> tuple[ResumePoint, list[Round]] | None:
    """The state to resume from, with all reports up to there in order; none if the run has to start.

    Args:
        folder: of the run.
        seeds: of the run; the checkpoint may be of more.
        require_fit: raises a `UserError` for a state, and the round it is of, that the run cannot resume from.

    Raises:
        UserError: if there are checkpoints, and none can be used.
    """
    states = states_folder(folder)
    if not any(states.glob("round*.json")):
        return None
    damaged: list[str] = []
    for saved in checkpoint.sound(states):
        try:
            require_fit((saved.tensors, saved.values), saved.round)
            ends = last_rounds(saved.values, saved.round)
            by_seed = {seed: read_reports(reports_folder(folder, seed), ends[seed] + 1) for seed in seeds}
        except (UserError, KeyError, AttributeError, ValueError, TypeError) as error:
            damaged.append(f"round {saved.round}: {error}")
            continue
        reports = [own[number] for number in range(saved.round) for own in by_seed.values() if number < len(own)]
        return ResumePoint(*saved, {seed: own[-1] for seed, own in by_seed.items()}), reports
    why = "; ".join(damaged) or "all are damaged"
    raise UserError(
        f"{states}: no checkpoint can be used ({why}); remove the files round* there, and the run starts again"
    )


def remove(folder: Path) -> None:
    """Removes what only an unfinished run needs."""
    for name in ("checkpoints", "rounds"):
        shutil.rmtree(folder / name, ignore_errors=True)


def states_folder(folder: Path) -> Path:
    """Where an unfinished run has its checkpoints."""
    return folder / "checkpoints"
