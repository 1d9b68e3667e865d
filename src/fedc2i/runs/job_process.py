"""A process that works off jobs one after the other, and what it does there.

It is given a function, with what all jobs share inside, and answers each job with what the function returns.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle

from fedc2i.core.errors import UserError
from fedc2i.engine.executors.workers.sent_error import sent_error
from fedc2i.runs import gpu_share
from fedc2i.runs.cuda_mps import PrivateMps

Report = Callable[[Any], None]
_START = (
    "import sys; sys.path[:] = {path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from fedc2i.runs.job_process import serve; serve({line}, {on_gpu})"
)


class JobProcess:
    """A process, from the start until `end`.

    Attributes:
        line: to the process.
        mps: under which it opens the GPU.
        is_open: whether it takes jobs; one on a GPU when it has opened that.
        is_at_work: whether it has a job.
        has_function: whether it has the present function.
        job: the one it has, or had last.
    """

    def __init__(self, on_gpu: bool, mps: PrivateMps | None) -> None:
        ours, theirs = socket.socketpair()
        self.line, self.mps = Connection(ours.detach()), mps
        self.is_open = not on_gpu
        self.is_at_work = self.has_function = False
        self.job: Any = None
        self._began = time.monotonic()
        code = _START.format(path=sys.path, line=theirs.fileno(), on_gpu=on_gpu)
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **one, **(mps.environment if mps else {})},
            )
        if on_gpu:
            self.line.send_bytes(cloudpickle.dumps(gpu_share.open_gpu))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def seconds_closed(self) -> float:
        """How long it has been about to open the GPU; 0 once that is done."""
        return 0.0 if self.is_open else time.monotonic() - self._began

    def give(self, job: Any, shared: bytes) -> None:
        """Sends a job, after the function ``shared`` if the process does not have it."""
        self.job, self.is_at_work = job, True
        try:
            if not self.has_function:
                self.line.send_bytes(shared)
                self.has_function = True
            self.line.send_bytes(cloudpickle.dumps(("job", job)))
        except OSError:
            raise _ended() from None

    def receive(self) -> tuple[str, Any]:
        """The next message; raises what went wrong with a job."""
        try:
            kind, content = cloudpickle.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            kind, content = "error", _ended()
        if kind == "error" and self.is_open:
            raise content
        return ("closed", content) if kind == "error" else (kind, content)

    def kill(self) -> None:
        """Stops it in the middle of its work."""
        self._process.kill()

    def end(self, patience: float) -> None:
        """Waits until it has ended; its line is closed."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _ended() -> UserError:
    return UserError("a process ended unexpectedly; if memory ran out, use fewer workers (workers=1)")


def serve(line: int, on_gpu: bool) -> None:
    """Works in a process until the other end of the line is closed."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection, function = Connection(line), None
    with contextlib.suppress(EOFError, OSError):  # of the line: the other end is closed
        if on_gpu:
            connection.send_bytes(_opened(connection.recv_bytes()))
        while True:
            kind, content = cloudpickle.loads(connection.recv_bytes())
            if kind == "function":
                function = content
            else:
                assert function is not None
                connection.send_bytes(_answer(function, content, connection))


def _opened(opening: bytes) -> bytes:
    try:
        cloudpickle.loads(opening)()
        return bytes(cloudpickle.dumps(("open", None)))
    except Exception as error:
        return sent_error(error)


def _answer(function: Callable[[Any, Report], Any], job: Any, connection: Connection) -> bytes:
    def report(content: Any) -> None:
        connection.send_bytes(cloudpickle.dumps(("report", content)))

    try:
        return bytes(cloudpickle.dumps(("answer", function(job, report))))
    except Exception as error:
        return sent_error(error)
