"""A process that computes one job after the other, and what happens inside it.

It is given a function, with what all jobs share inside, and answers each job with what the function returns.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from enum import Enum, auto
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
    "from fedc2i.runs.job_process import serve; serve({descriptor}, {parent}, {on_gpu})"
)
_DEATH_SIGNAL = 1  # of prctl
_STDERR = 2


class State(Enum):
    """What a process does."""

    OPENING = auto()  # it opens the GPU
    IDLE = auto()
    AT_WORK = auto()
    FAILED = auto()  # it could not open the GPU


class JobProcess:
    """A process, from its start until `wait`.

    Attributes:
        connection: to the process.
        mps: under which it opens the GPU.
        state: what it does, as far as its messages were received.
        job: the one it has, or had last.
    """

    def __init__(self, on_gpu: bool, mps: PrivateMps | None) -> None:
        """Starts it; raises OSError where the system has no room for one more."""
        ours, theirs = socket.socketpair()
        self.connection, self.mps = Connection(ours.detach()), mps
        self.state = State.OPENING if on_gpu else State.IDLE
        self.job: Any = None
        self._shared: bytes | None = None  # the function that it has
        self._started = time.monotonic()
        code = _START.format(path=sys.path, descriptor=theirs.fileno(), parent=os.getpid(), on_gpu=on_gpu)
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,  # ours is for results
                env={**os.environ, **one, **(mps.environment if mps else {})},
            )
        if on_gpu:
            self.connection.send_bytes(cloudpickle.dumps(gpu_share.open_gpu))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def seconds_opening(self) -> float:
        """For how long it has been opening the GPU; 0 if it does not."""
        return time.monotonic() - self._started if self.state is State.OPENING else 0.0

    def give(self, job: Any, shared: bytes) -> None:
        """Sends a job, after the function ``shared`` if the process does not have it."""
        self.job, self.state = job, State.AT_WORK
        try:
            if self._shared is not shared:
                self.connection.send_bytes(shared)
                self._shared = shared
            self.connection.send_bytes(cloudpickle.dumps(("job", job)))
        except OSError:
            raise self._ended() from None

    def receive(self) -> tuple[str, Any]:
        """The next message: ``open``, ``failed``, ``report`` or ``answer``, and its content.

        Raises:
            Exception: what went wrong with a job.
        """
        try:
            kind, content = cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            kind, content = "error", self._ended()
        if kind == "error":
            if self.state is not State.OPENING:
                raise content
            kind, self.state = "failed", State.FAILED
        elif kind != "report":
            self.state = State.IDLE
        return kind, content

    def end(self) -> None:
        """It ends: by itself if it is idle, else in the middle of its work."""
        self.connection.close()
        if self.state is not State.IDLE:
            self._process.kill()

    def wait(self, patience: float) -> None:
        """Returns when it has ended, at the latest soon after ``patience`` seconds."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ended(self) -> UserError:
        try:
            code = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return UserError("a process closed its connection, though it is still running; try --workers 1")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return UserError(f"a process ended unexpectedly, {how}; if memory ran out, try --workers 1")


def serve(descriptor: int, parent: int, on_gpu: bool) -> None:
    """Works in a process until the other end of the connection is closed."""
    _end_with(parent)
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    connection, function = Connection(descriptor), None
    with contextlib.suppress(EOFError, OSError):  # of the connection: the other end is closed
        if on_gpu:
            connection.send_bytes(_opened(connection.recv_bytes()))
        while True:
            kind, content = cloudpickle.loads(connection.recv_bytes())
            if kind == "function":
                function = content
            else:
                assert function is not None
                connection.send_bytes(_answer(function, content, connection))


def _end_with(parent: int) -> None:
    """Lets the system end this process when the one that started it ends, in whatever way; on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)


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
    except SystemExit as error:  # a user's own code
        return sent_error(UserError(f"sys.exit was called, with {error.code!r}"))
    except Exception as error:
        return sent_error(error)
