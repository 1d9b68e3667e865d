"""Independent jobs over processes, such as runs of many coalitions: one job after the other in each of a few processes.

What all jobs share, such as the data, travels to each process once, inside the function.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import cloudpickle
import torch

from fedc2i.core.errors import UserError
from fedc2i.engine.executors.workers.sent_error import sent_error

Report = Callable[[Any], None]
_START = (
    "import sys; sys.path[:] = {path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from fedc2i.runs.side_by_side_runs import serve; serve({line})"
)
_PATIENCE = 2.0  # seconds that an idle process has to end


def side_by_side(
    function: Callable[[Any, Report], Any],
    jobs: Iterable[Any],
    workers: int,
    on_report: Callable[[Any, Any], None] = lambda job, report: None,
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
    shared = cloudpickle.dumps(function)
    processes = [_Process(shared) for _ in range(min(workers, len(waiting)))]
    try:
        busy: dict[Connection, Any] = {}
        free = [process.line for process in processes]
        while waiting or busy:
            while free and waiting:
                job, line = waiting.pop(0), free.pop()
                _send(line, cloudpickle.dumps(job))
                busy[line] = job
            ready = wait(list(busy))
            for line in [own for own in busy if own in ready]:
                kind, content = _receive(line)
                if kind == "report":
                    on_report(busy[line], content)
                    continue
                free.append(line)
                yield busy.pop(line), content
    finally:
        for process in processes:
            process.end(at_work=process.line in busy)


class _Process:
    def __init__(self, shared: bytes) -> None:
        ours, theirs = socket.socketpair()
        self.line = Connection(ours.detach())
        code = _START.format(path=sys.path, line=theirs.fileno())
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **one},
            )
        _send(self.line, shared)

    def end(self, at_work: bool) -> None:
        """Ends the process; one that is at work is stopped in the middle of it."""
        self.line.close()
        if at_work:
            self._process.kill()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _send(line: Connection, content: bytes) -> None:
    try:
        line.send_bytes(content)
    except OSError:
        raise _ended() from None


def _receive(line: Connection) -> tuple[str, Any]:
    try:
        kind, content = cloudpickle.loads(line.recv_bytes())
    except (EOFError, OSError):
        raise _ended() from None
    if kind == "error":
        raise content
    return kind, content


def _ended() -> UserError:
    return UserError("a process ended unexpectedly; if memory ran out, use fewer workers (--set workers=1)")


def serve(line: int) -> None:
    """Works in a process until the other end of the line is closed."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection = Connection(line)
    with contextlib.suppress(EOFError, OSError):  # of the line: the other end is closed
        function = cloudpickle.loads(connection.recv_bytes())
        while True:
            connection.send_bytes(_answer(function, connection.recv_bytes(), connection))


def _answer(function: Callable[[Any, Report], Any], message: bytes, connection: Connection) -> bytes:
    def report(content: Any) -> None:
        connection.send_bytes(cloudpickle.dumps(("report", content)))

    try:
        return bytes(cloudpickle.dumps(("answer", function(cloudpickle.loads(message), report))))
    except Exception as error:
        return sent_error(error)
