"""Independent jobs over a few processes, such as runs of many coalitions.

What all jobs share, such as the data, travels to each process once, inside the function. Processes for a GPU can be
started early: they import torch and open the GPU while the data is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

import cloudpickle

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.settings import cores
from fedc2i.runs.cuda_mps import PrivateMps
from fedc2i.runs.gpu_share import most_processes
from fedc2i.runs.job_process import JobProcess, Report, State

OnReport = Callable[[Any, Any], None]
GPU_FILES = "nvidia[0-9]*"
_PATIENCE = 2.0  # seconds that idle processes have to end
_OPENING = 60.0  # seconds to open a GPU


def side_by_side(
    function: Callable[[Any, Report], Any],
    jobs: Iterable[Any],
    workers: int,
    on_report: OnReport = lambda job, report: None,
    on_gpu: bool = False,
) -> Iterator[tuple[Any, Any]]:
    """Every job with its answer, ``function(job, report)``, in the order in which they finish.

    With one worker everything is computed here. ``on_report`` is given a job and what its function reports meanwhile.

    Raises:
        UserError: if a process ends unexpectedly; and whatever the function raises.
    """
    waiting = list(jobs)
    if workers <= 1 or len(waiting) <= 1 or os.name != "posix":
        for job in waiting:
            yield job, function(job, lambda report, own=job: on_report(own, report))  # type: ignore[misc]
        return
    with JobProcesses(min(workers, len(waiting)), on_gpu) as processes:
        yield from processes.work(function, waiting, on_report)


@contextmanager
def started_early(settings: Mapping[str, str]) -> Iterator[JobProcesses | None]:
    """Processes for the GPU that these settings will use; None where they surely use none, or one process does all.

    Nor are more processes than cores started early: the settings have not been validated yet. A device file says
    whether there is a GPU: torch, which knows better, takes seconds to import.
    """
    workers = settings.get("workers", "0")
    count = most_processes(int(workers)) if workers.isdecimal() else 1  # wrong ones are refused later
    if not 2 <= count <= cores() or settings.get("device", "auto") == "cpu" or not any(Path("/dev").glob(GPU_FILES)):
        yield None
        return
    with JobProcesses(count, on_gpu=True) as processes:
        yield processes


class JobProcesses:
    """A few processes that compute jobs, until the end of a ``with`` block."""

    def __init__(self, count: int, on_gpu: bool = False) -> None:
        """Starts them; those that share a GPU under a private CUDA MPS, if that is possible here."""
        self._on_gpu = on_gpu
        self._mps = PrivateMps.start() if on_gpu else None
        self._usable: list[JobProcess] = []
        self._ending: list[JobProcess] = []
        try:
            for _ in range(count):
                self._start(self._mps)
        except UserError:
            self.end()
            self.wait()
            raise

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes that take jobs."""
        return [process.pid for process in self._usable]

    def __enter__(self) -> JobProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.wait()

    def keep(self, count: int) -> None:
        """Ends all but ``count`` of them, those that opened the GPU first."""
        for process in sorted(self._usable, key=lambda own: own.state is State.OPENING)[count:]:
            self._remove(process)

    def end(self) -> None:
        """No more work comes: idle processes end by themselves soon, others are stopped in the middle of it."""
        for process in list(self._usable):
            self._remove(process)
        if self._mps is not None:
            self._mps.end()

    def wait(self) -> None:
        """Returns when all of them have ended, after `end`."""
        until = time.monotonic() + _PATIENCE
        while self._ending:
            self._ending.pop().wait(max(0.0, until - time.monotonic()))
        if self._mps is not None:
            self._mps.wait()

    def work(
        self,
        function: Callable[[Any, Report], Any],
        jobs: Iterable[Any],
        on_report: OnReport = lambda job, report: None,
    ) -> Iterator[tuple[Any, Any]]:
        """Every job with its answer, as `side_by_side`."""
        waiting, shared = list(jobs), cloudpickle.dumps(("function", function))
        try:
            while waiting or self._in_state(State.AT_WORK):
                for process in self._in_state(State.IDLE)[: len(waiting)]:
                    process.give(waiting.pop(0), shared)
                answers = self._received(on_report)
                for process in self._in_state(State.IDLE)[: len(waiting)]:  # before the caller reads what is answered
                    process.give(waiting.pop(0), shared)
                yield from answers
        finally:
            for process in self._in_state(State.AT_WORK):  # the caller has stopped, or a job failed
                self._remove(process)

    def _received(self, on_report: OnReport) -> list[tuple[Any, Any]]:
        """Waits up to a second for messages; returns the jobs that were answered."""
        answers = []
        busy = {own.connection: own for own in self._in_state(State.AT_WORK, State.OPENING)}
        for connection in wait(list(busy), 1.0):
            process = busy[connection]  # type: ignore[index]
            job = process.job
            kind, content = process.receive()
            if kind == "report":
                on_report(job, content)
            elif kind == "answer":
                answers.append((job, content))
            elif kind == "failed":
                self._replace(process, content)
        for process in self._in_state(State.OPENING):
            if process.seconds_opening > _OPENING:
                self._replace(process, f"no answer within {_OPENING:.0f} s")
        return answers

    def _replace(self, process: JobProcess, reason: object) -> None:
        """Starts another process, without MPS, in place of one that could not open the GPU; or does with fewer."""
        self._remove(process)
        if process.mps is not None:
            self._start(None)
        elif not self._usable:
            raise UserError(f"the GPU cannot be opened: {one_line(reason)}")

    def _start(self, mps: PrivateMps | None) -> None:
        try:
            self._usable.append(JobProcess(self._on_gpu, mps))
        except OSError as error:
            raise UserError(f"a process cannot be started ({one_line(error)}); try --workers 1") from None

    def _remove(self, process: JobProcess) -> None:
        process.end()
        self._usable.remove(process)
        self._ending.append(process)

    def _in_state(self, *states: State) -> list[JobProcess]:
        return [process for process in self._usable if process.state in states]
