"""Worker processes that stay: one per core, each with a single thread, started once and used by run after run.

Tensors lie in memory that all processes share, without copies through pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params

# A Ctrl-C reaches the main process, which closes the lines; a worker leaves it alone from its first moment on. At its
# end only its output is written out: taking torch apart piece by piece takes 0.4 s.
_START = (
    "import sys; sys.path[:] = {path!r}; import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "from fedc2i.engine.executors.workers.executor import serve; serve(*{descriptors!r}); "
    "print(end='', flush=True); print(end='', file=sys.stderr, flush=True); import os; os._exit(0)"
)
_PATIENCE = 0.5  # seconds that workers have to end by themselves
_ALIGNED = 64  # bytes; libraries may add up in another order where memory is not aligned


class Entry(NamedTuple):
    """Where a tensor lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = dict[str, Entry]


class SharedMemory:
    """A file in memory that grows as needed, known to other processes by its descriptor.

    It is not one of the files in ``/dev/shm``, whose sum is limited to 64 MB in many containers.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """A new one, or the one of an inherited ``descriptor``."""
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._size = 0
        self._memory: mmap.mmap | None = None

    def close(self) -> None:
        """Gives the file back; its memory is free when no view of it is left."""
        os.close(self.descriptor)
        self._memory = None

    def place(self, tensors: Mapping[str, Tensor], start: int = 0) -> tuple[Layout, int]:
        """Room for tensors like these from ``start`` on, and where it ends; nothing is written."""
        layout: Layout = {}
        for name, tensor in tensors.items():
            layout[name] = Entry(start, tuple(tensor.shape), tensor.dtype)
            start += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        if start > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, max(start, 2 * self._size, mmap.PAGESIZE))
        return layout, start

    def write(self, tensors: Mapping[str, Tensor], start: int = 0) -> tuple[Layout, int]:
        """Copies tensors in from ``start`` on; where they are, and where they end."""
        layout, end = self.place(tensors, start)
        for name, view in self.read(layout).items():
            view.copy_(tensors[name])
        return layout, end

    def read(self, layout: Layout) -> Params:
        """The tensors themselves: what one process writes into them, the others see."""
        return {name: self._view(entry) for name, entry in layout.items()}

    def _view(self, entry: Entry) -> Tensor:
        count = torch.Size(entry.shape).numel()
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._memory is None or entry.offset + count * entry.dtype.itemsize > self._size:
            self._size = os.fstat(self.descriptor).st_size
            self._memory = mmap.mmap(self.descriptor, self._size)  # views of the old map keep that one alive
        flat = torch.frombuffer(self._memory, dtype=entry.dtype, count=count, offset=entry.offset)
        return flat.reshape(entry.shape)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return inheritable(os.memfd_create("fedc2i"))
    with tempfile.TemporaryFile() as file:
        return inheritable(os.dup(file.fileno()))


def inheritable(descriptor: int) -> int:
    """The descriptor, moved if it has the number of a standard stream, as it may where one of those is closed."""
    if descriptor > 2:
        return descriptor
    import fcntl  # not on Windows

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved


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
        """The next answer; raises whatever went wrong in the process, or `UserError` if it is gone."""
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
