"""Independent jobs over processes, such as runs of many coalitions: one job after the other in each of a few processes.

What all jobs share, such as the data, travels to each process once, inside the function. Processes can be started ahead
of it: they import and, where they share a GPU, open it while the data is read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any

import cloudpickle

from fedc2i.core.errors import UserError, one_line
from fedc2i.runs.cuda_mps import PrivateMps
from fedc2i.runs.job_process import JobProcess, Report

OnReport = Callable[[Any, Any], None]
_PATIENCE = 2.0  # seconds that idle processes have to end
_OPENING = 60.0  # seconds to open a GPU under MPS


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
    with Processes(min(workers, len(waiting)), on_gpu) as processes:
        yield from processes.work(function, waiting, on_report)


class Processes:
    """A few processes that work off jobs, until the end of a ``with`` block."""

    def __init__(self, count: int, on_gpu: bool = False) -> None:
        """Starts them; those that share a GPU under a private CUDA MPS, if that is possible here."""
        self._on_gpu = on_gpu
        self._mps = PrivateMps.start() if on_gpu else None
        self._all: list[JobProcess] = []
        for _ in range(count):
            self._start(self._mps)

    @property
    def pids(self) -> list[int]:
        """The processes' numbers."""
        return [process.pid for process in self._all]

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dismiss()
        until = time.monotonic() + _PATIENCE
        for process in self._all:
            process.end(max(0.0, until - time.monotonic()))
        if self._mps is not None:
            self._mps.wait()

    def dismiss(self) -> None:
        """No more work comes: idle processes end by themselves soon, others are stopped in the middle of it."""
        for process in self._all:
            process.line.close()
            if process.is_at_work or not process.is_open:
                process.kill()
        if self._mps is not None:
            self._mps.end()

    def work(
        self,
        function: Callable[[Any, Report], Any],
        jobs: Iterable[Any],
        on_report: OnReport = lambda job, report: None,
        most: int | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Every job with its answer, as `side_by_side`; by ``most`` of the processes, if that is given."""
        waiting, shared = list(jobs), cloudpickle.dumps(("function", function))
        used = self._all[: most or len(self._all)]
        for process in used:
            process.has_function = False
        while waiting or any(process.is_at_work for process in used):
            for process in used:
                if process.is_open and not process.is_at_work and waiting:
                    process.give(waiting.pop(0), shared)
            listened = {process.line: process for process in used if process.is_at_work or not process.is_open}
            for line in wait(list(listened), 1.0):
                process = listened[line]  # type: ignore[index]
                kind, content = process.receive()
                if kind == "open":
                    process.is_open = True
                elif kind == "closed":
                    used = self._replaced(process, used, content)
                elif kind == "report":
                    on_report(process.job, content)
                else:
                    process.is_at_work = False
                    yield process.job, content
            for process in [own for own in used if own.mps is not None and own.seconds_closed > _OPENING]:
                process.kill()
                used = self._replaced(process, used, "it takes very long")

    def _replaced(self, process: JobProcess, used: list[JobProcess], reason: object) -> list[JobProcess]:
        """The processes with another one, without MPS, in place of one that could not open the GPU."""
        others = [own for own in used if own is not process]
        if process.mps is not None:
            return [*others, self._start(None)]
        if not others:
            raise UserError(f"the GPU cannot be opened: {one_line(reason)}")
        return others  # fewer do as well

    def _start(self, mps: PrivateMps | None) -> JobProcess:
        process = JobProcess(self._on_gpu, mps)
        self._all.append(process)
        return process
