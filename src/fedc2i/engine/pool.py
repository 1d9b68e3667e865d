"""Worker processes that stay: one per core, each with a single thread, started once and used by run after run."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from fedc2i.engine.arena import Arena
from fedc2i.errors import UserError

_START = "import sys; sys.path[:] = {path!r}; from fedc2i.engine.worker import serve; serve(*{descriptors!r})"


class Worker:
    """One process: a line to it, and the memory it answers into."""

    def __init__(self, shared: Sequence[Arena]) -> None:
        """Starts the process, which takes about a second to get ready."""
        self.answers = Arena()
        ours, theirs = socket.socketpair()
        descriptors = [theirs.fileno(), self.answers.descriptor, *(arena.descriptor for arena in shared)]
        code = _START.format(path=sys.path, descriptors=descriptors)
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}  # no others wait in the wings
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=descriptors, stdin=subprocess.DEVNULL, env={**os.environ, **one}
        )
        theirs.close()
        self.line = Connection(ours.detach())

    def send(self, message: tuple[Any, ...]) -> None:
        """A message; functions and classes defined anywhere travel with it."""
        try:
            self.line.send_bytes(cloudpickle.dumps(message))
        except OSError:
            raise self._dead() from None

    def receive(self) -> Any:
        """The next answer.

        Raises:
            UserError: if the process is gone.
            Exception: whatever went wrong in it.
        """
        try:
            kind, content = cloudpickle.loads(self.line.recv_bytes())
        except (EOFError, OSError):
            raise self._dead() from None
        if kind == "error":
            raise content
        return content

    def _dead(self) -> UserError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        code = self._process.returncode
        reason = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return UserError(
            f"a worker process ended unexpectedly ({reason}); if memory ran out, use fewer workers or executor=looped"
        )

    def close(self) -> None:
        """Ends the process."""
        self.line.close()
        try:
            self._process.wait(0.5)  # it ends by itself when the line is gone, unless it is at work
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Pool:
    """Workers, and the memory that all of them share: inputs of the present step, and the clients' data."""

    def __init__(self, count: int) -> None:
        self.inputs, self.data = Arena(), Arena()
        self.workers = [Worker((self.inputs, self.data)) for _ in range(count)]
        self.holds: Any = None  # what lies in `data`
        self._waiting = list(self.workers)
        self._pid = os.getpid()

    def is_ready(self, patient: bool = False) -> bool:
        """Whether all workers have reported; a ``patient`` caller waits until they have."""
        while self._waiting:
            heard = wait([worker.line for worker in self._waiting], None if patient else 0)
            if not heard:
                return False
            for worker in [worker for worker in self._waiting if worker.line in heard]:
                worker.receive()
                self._waiting.remove(worker)
        return True

    def tell(self, message: tuple[Any, ...]) -> None:
        """The same message to all."""
        for worker in self.workers:
            worker.send(message)

    def work(self, next_job: Callable[[], Any], on_answer: Callable[[Any, Any, Worker], None]) -> None:
        """Keeps all workers busy: ``next_job`` gives a job or None, ``on_answer`` takes it with its answer."""
        busy: dict[Connection, tuple[Worker, Any]] = {}
        free = list(self.workers)
        while True:
            while free and (job := next_job()) is not None:
                worker = free.pop()
                worker.send(("job", job))
                busy[worker.line] = (worker, job)
            if not busy:
                return
            heard = wait(list(busy))
            for worker, job in [own for line, own in busy.items() if line in heard]:
                del busy[worker.line]
                on_answer(job, worker.receive(), worker)
                free.append(worker)

    def close(self) -> None:
        """Ends all workers; a copy of this object in a forked process leaves them alone."""
        if os.getpid() == self._pid:
            for worker in self.workers:
                worker.close()


_pools: dict[int, Pool] = {}  # the one that is running, by its number of workers


def running(count: int) -> Pool | None:
    """The pool of so many workers, if it was started already in this process."""
    pool = _pools.get(count)
    return pool if pool is not None and pool._pid == os.getpid() else None


def start(count: int) -> Pool:
    """The pool of so many workers; one of another size is ended."""
    pool = running(count)
    if pool is None:
        stop()
        pool = _pools[count] = Pool(count)
    return pool


@atexit.register
def stop() -> None:
    """Ends every worker that this process started."""
    while _pools:
        _pools.popitem()[1].close()


def cores() -> int:
    """How many cores this process may use: of its affinity, and of its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, max(1, math.floor(int(quota) / int(period))))  # "max" is no number: no quota
    return count
