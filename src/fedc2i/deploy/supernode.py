"""Flower's SuperNode with quicker hands: it asks for work more often, and its app processes need no imports.

Flower starts a new Python for every message, which imports Flower, torch and the app: three seconds and more. Here
an executor process imports them once and forks for each message. Every message still has a process of its own.
The executor proves to the SuperNode that it belongs to it, by a secret that never leaves the two processes.

Started as a script, with the arguments of ``flower-supernode`` and two of its own; it imports nothing of ours, since
that would bring torch into the SuperNode, which has no use for it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

_DEATH_SIGNAL = 1  # of prctl


def _die_with_parent() -> None:
    """The kernel ends this process when the one that started it ends (Linux)."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


class _Clock:
    """Stands in for the module ``time`` where Flower sleeps between two questions."""

    def __init__(self, poll: float) -> None:
        self._poll = poll

    def sleep(self, seconds: float) -> None:
        """Three seconds are those between two questions to the SuperLink, the shorter ones wait for the app."""
        time.sleep(self._poll if seconds >= 1 else 0.05)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class _Forks:
    """Flower's executor protocol: a copy of this process, with all its imports, for each message."""

    def get_eligible_capacity(self, supported_task_types: set[Any], **_: Any) -> tuple[set[Any], set[str]]:
        """It takes what the SuperNode has for an app of ours."""
        return {kind for kind in supported_task_types if kind.value == "flwr-clientapp"}, set()

    def wait_for_capacity(self, *_: Any, **__: Any) -> None:
        """There is always room: the SuperNode handles one message at a time."""

    def launch(self, spec: Any) -> Any:
        """Starts the process for a message."""
        from flwr.supercore.superexec.executor import LaunchResult

        if os.fork() == 0:
            _answer(spec)
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Takes note of processes that have ended."""
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    def close(self) -> None:
        """Nothing to give back: the processes end with this one."""


def _answer(spec: Any) -> NoReturn:
    """The life of a message's process."""
    from flwr.supercore.exit import exit_handler
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    code = 1
    try:
        _die_with_parent()
        exit_handler.registered_exit_handlers.clear()  # those of the executor
        run_clientapp(spec.runtime_api_address, spec.token, spec.insecure)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _execute(address: str, secret: bytes, preload: Sequence[str]) -> None:
    """The life of the executor: imports once, then a fork per message."""
    _die_with_parent()
    loop = importlib.import_module("flwr.supercore.superexec.run_superexec")
    for name in ("flwr.supernode.runtime.run_clientapp", *preload):
        importlib.import_module(name)
    loop.get_executor = lambda *_, **__: _Forks()  # type: ignore[attr-defined]
    loop.run_superexec(address, insecure=True, superexec_auth_secret=secret)


def main(words: Sequence[str]) -> None:
    """Starts the executor and becomes the SuperNode; ends when either ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--poll", type=float, default=1.0, help="seconds between two questions for work")
    parser.add_argument("--preload", default="", help="modules, with commas between them")
    parser.add_argument("--port", required=True)
    own, others = parser.parse_known_args(words)
    secret = secrets.token_bytes(32)
    executor = os.fork()
    if executor == 0:
        try:
            _execute(f"127.0.0.1:{own.port}", secret, list(filter(None, own.preload.split(","))))
        finally:
            os._exit(1)

    def notice(*_: Any) -> None:
        if os.waitpid(executor, os.WNOHANG)[0]:
            print("the executor of the site's own code ended unexpectedly", file=sys.stderr, flush=True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGCHLD, notice)
    pull = importlib.import_module("flwr.supercore.inflatable.inflatable_utils").pull_objects
    pull.__kwdefaults__["initial_backoff"] = 0.1  # a message may come a moment before its parts; else a second is lost
    loop = importlib.import_module("flwr.supernode.start_client_internal")
    loop.time = _Clock(own.poll)  # type: ignore[attr-defined]
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    sys.argv = ["flower-supernode", *others, "--host", "127.0.0.1", "--port", own.port]
    sys.argv += ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{reading}"]
    importlib.import_module("flwr.supernode.cli.flower_supernode").flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
