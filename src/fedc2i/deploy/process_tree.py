"""Runs one program and ends its whole tree of processes, even if our own process is killed.

Flower's programs start others, some in their own sessions, so a process group does not contain them. This small process
is the program's parent: orphans below it become its children (sub-reaper, on Linux), it notices when our process has
ended, even by ``kill -9``, and it ends only when no process below it is left, with the program's exit code. It is
started as a script, and imports nothing from this package, so that it starts at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_ASKED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_BLOCKED = {*_ASKED, signal.SIGCHLD}
_TICK = 0.2  # seconds between checks that our process is still there
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # of prctl


def _control(option: int, value: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent() -> None:
    """The kernel ends this process when the one that started it ends (Linux)."""
    _control(_DEATH_SIGNAL, signal.SIGKILL)


def _start(command: list[str]) -> int:
    own = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent()
        if os.getppid() == own:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
            os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


def _reap(program: int) -> int | None:
    """Collects all processes that ended; returns the program's exit code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                status = os.waitstatus_to_exitcode(ended[1])
                code = status if status >= 0 else 128 - status
    return code


def below(root: int) -> list[int]:
    """All descendants of a process, nearest first."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (
                (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
            )
            if state != "Z":
                children.setdefault(int(parent), []).append(int(folder.name))
    found = list(children.get(root, []))
    for pid in found:
        found += children.get(pid, [])
    return found


def _clear(patience: float) -> None:
    """Ends what the program left: with SIGTERM first, then with SIGKILL."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 5.0)):
        until, signalled = time.monotonic() + seconds, set[int]()
        while (left := below(os.getpid())) and time.monotonic() < until:
            for pid in set(left) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            signalled.update(left)
            signal.sigtimedwait([signal.SIGCHLD], 0.05)
            _reap(0)


def guard(parent: int, patience: float, command: list[str]) -> int:
    """Runs the command until it ends, ``parent`` ends, or a signal arrives; returns its exit code."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    _control(_SUBREAPER, 1)
    program = _start(command)
    until = None
    while (code := _reap(program)) is None:
        heard = signal.sigtimedwait(_BLOCKED, _TICK)
        if until is None:
            if os.getppid() != parent or (heard and heard.si_signo in _ASKED):
                os.kill(program, signal.SIGTERM)
                until = time.monotonic() + patience
        elif time.monotonic() > until:
            os.kill(program, signal.SIGKILL)
    _clear(min(patience, 2.0))
    return code


if __name__ == "__main__":
    sys.exit(guard(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]))
