"""Worker processes that stay: one per core, each with a single thread, started once and used by run after run."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import cloudpickle

from fedc2i.core.errors import UserError
from fedc2i.engine.executors.workers.shared_memory import SharedMemory, inheritable

# A Ctrl-C reaches the main process, which closes the lines; a worker leaves it alone from its first moment on.
_START = (
    "import sys; sys.path[:] = {path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from fedc2i.engine.executors.workers.process import serve; serve(*{descriptors!r})"
)
_PATIENCE = 0.5  # seconds that workers have to end by themselves


class Worker:
    """One process: a connection to it, and the memory for its answers."""

    def __init__(self, shared: Sequence[SharedMemory]) -> None:
        """Starts the process, which takes about a second to get ready."""
        self.answers = SharedMemory()
        ours, theirs = (inheritable(end.detach()) for end in socket.socketpair())
        self.line = Connection(ours)
        descriptors = [theirs, self.answers.descriptor, *(memory.descriptor for memory in shared)]
        code = _START.format(path=sys.path, descriptors=descriptors)
        one = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], pass_fds=descriptors, stdin=subprocess.DEVNULL, env={**os.environ, **one}
            )
        except BaseException:
            self.answers.close()
            raise
        finally:
            os.close(theirs)

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

    def end(self, patience: float) -> None:
        """Ends the process, whose line is closed."""
        try:
            self._process.wait(patience)  # it ends by itself when the line is gone, unless it is at work
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.answers.close()


class Pool:
    """Workers, and the memory that all of them share: inputs of the present step, and the clients' data."""

    def __init__(self, count: int) -> None:
        self.inputs, self.data = SharedMemory(), SharedMemory()
        self.workers: list[Worker] = []
        self.pid = os.getpid()
        self.taken = False
        try:
            for _ in range(count):
                self.workers.append(Worker((self.inputs, self.data)))
        except BaseException:
            self.close()
            raise
        self._waiting = list(self.workers)

    def take(self) -> bool:
        """Whether the caller may use it from now on; a run in another thread, or around this one, may be at it."""
        with _lock:
            free, self.taken = not self.taken, True
            return free

    def give_back(self) -> None:
        """The caller needs it no longer; it stays, unless another one is idle already."""
        with _lock:
            self.taken = False
            if any(other is not self and not other.taken for other in _pools):
                self.discard()

    def discard(self) -> None:
        """Ends it for good, e.g. when workers may be in the middle of something; the next run starts others."""
        with _lock:
            if self in _pools:
                _pools.remove(self)
                self.close()

    def is_ready(self, patient: bool = False) -> bool:
        """Whether all workers have reported; a ``patient`` caller waits until they have."""
        while self._waiting:
            ready = wait([worker.line for worker in self._waiting], None if patient else 0)
            if not ready:
                return False
            for worker in [worker for worker in self._waiting if worker.line in ready]:
                worker.receive()
                self._waiting.remove(worker)
        return True

    def broadcast(self, message: tuple[Any, ...]) -> None:
        """Sends the same message to all workers."""
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
            ready = wait(list(busy))
            for worker, job in [own for line, own in busy.items() if line in ready]:
                del busy[worker.line]
                on_answer(job, worker.receive(), worker)
                free.append(worker)

    def close(self) -> None:
        """Ends all workers; a copy of this object in a forked process leaves them alone."""
        if os.getpid() != self.pid:
            return
        for worker in self.workers:
            worker.line.close()
        until = time.monotonic() + _PATIENCE
        for worker in self.workers:
            worker.end(max(0.0, until - time.monotonic()))
        self.inputs.close()
        self.data.close()


_pools: list[Pool] = []  # at most one of them idle
_lock = threading.RLock()


def running(count: int) -> Pool | None:
    """A pool of ``count`` workers that this process has started, preferably an idle one."""
    with _lock:
        fit = [pool for pool in _pools if len(pool.workers) == count and pool.pid == os.getpid()]
        return min(fit, key=lambda pool: pool.taken, default=None)


def start(count: int) -> Pool:
    """An idle pool of ``count`` workers; an idle pool of another size is ended."""
    with _lock:
        pool = running(count)
        if pool is None or pool.taken:
            for other in [other for other in _pools if not other.taken or other.pid != os.getpid()]:
                other.discard()
            pool = Pool(count)
            _pools.append(pool)
        return pool


def lease(count: int) -> Pool:
    """A pool of ``count`` workers for the caller alone, until it is given back."""
    with _lock:
        pool = start(count)
        pool.take()
        return pool


@atexit.register
def stop() -> None:
    """Ends every worker that this process started."""
    while _pools:
        _pools[0].discard()


def cores() -> int:
    """How many cores this process may use: of its affinity, and of its container's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, max(1, math.floor(int(quota) / int(period))))  # "max" is no number: no quota
    return count
