"""A program as a process of ours, for example Flower's: its environment, its port, its log, and its end.

Every program runs under `fedc2i.deploy.process_tree`, so that it cannot outlive this process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from fedc2i.core.errors import UserError
from fedc2i.deploy import process_tree
from fedc2i.deploy.folder_settings import LOOPBACK
from fedc2i.flower import compat

_PATIENCE = 10.0  # seconds that a program has to end by itself
_LONG = 10 * 2**20  # bytes of log after which the next start begins a new one
_NOISE = re.compile(r"^\s*(INFO|WARNING|ERROR|DEBUG)\s*:\s*|^\s*<?https?://\S+$")


class ChildProcess:
    """One program with all that it starts; its output goes to ``<folder>/<name>.log``.

    ``home`` is Flower's own folder, where it unpacks apps; ``host`` is an address of this machine that programs call
    without a proxy.
    """

    def __init__(self, name: str, folder: Path, home: Path | None = None, host: str = LOOPBACK) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        self._home, self._host = home or folder / "flwr", host
        self.guard: subprocess.Popen[bytes] | None = None  # a SIGTERM to it ends the program and all that it started
        self._log_start = 0

    def start(self) -> None:
        """Starts it; each kind of program has its own command."""
        raise NotImplementedError

    def launch(self, command: Sequence[str], patience: float = _PATIENCE) -> None:
        """Starts the command; a terminal's Ctrl-C reaches this process only, which ends its programs in order."""
        if self.log.exists() and self.log.stat().st_size > _LONG:
            self.log.replace(self.log.with_suffix(".log.old"))
        self._log_start = self.log.stat().st_size if self.log.exists() else 0
        words = [sys.executable, "-I", "-S", process_tree.__file__, str(os.getpid()), str(patience), *command]
        with self.log.open("ab") as log:
            self.guard = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment(self._home, self._host),
                start_new_session=True,
            )

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs; 1 for all of Flower's own error codes, which are only in the log."""
        return self.guard.poll() if self.guard else None

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self.guard is not None and self.guard.poll() is None

    def output(self) -> str:
        """Its output since its latest start, without colours."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._log_start)
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode("utf-8", errors="replace"))
        return ""

    def tail(self, lines: int = 4) -> str:
        """The last lines of its output in one line; after a traceback only the last, which names the error."""
        output = self.output()
        found = [_NOISE.sub("", line).strip() for line in output.splitlines()]
        found = [line for line in found if line][-1 if "Traceback (most recent call last)" in output else -lines :]
        return " | ".join(found) or "it wrote nothing"

    def stop(self) -> None:
        """Asks it to end, and waits until it and all that it started have ended."""
        if self.guard is None:
            return
        if self.guard.poll() is None:
            self.guard.send_signal(signal.SIGTERM)
        self.guard.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def environment(home: Path, host: str = LOOPBACK) -> dict[str, str]:
    """The variables of a Flower process: ours without settings of other Flower installations."""
    foreign = ("FLWR_", "FORWARDED_ALLOW_IPS", "PYTHONSTARTUP")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
    return {
        **kept,
        **threads,
        **compat.ENVIRONMENT,
        "FLWR_HOME": str(home.absolute()),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)]),  # for Flower's own
        "PYTHONUNBUFFERED": "1",
        "NO_PROXY": without_proxy(host),
        "no_proxy": without_proxy(host),
    }


def without_proxy(host: str) -> str:
    """The variable ``no_proxy`` with this machine's addresses added: our programs call each other directly."""
    present = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    return ",".join(dict.fromkeys(filter(None, (*present, LOOPBACK, "localhost", "::1", host))))


def local_address(host: str, port: int) -> str:
    """``host:port`` for a client on this machine, where a server listens on ``host``."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def free_port() -> int:
    """A port that nobody uses at the moment."""
    with socket.create_server((LOOPBACK, 0)) as probe:
        return int(probe.getsockname()[1])


def require_free(host: str, port: int) -> None:
    """Raises a `UserError` with the reason if a server cannot listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(f"{host} is not an address of this machine; coordinator.toml has it as bind") from None
        raise UserError(
            f"cannot listen on port {port} of {host} ({os.strerror(error.errno or 0)}); set in coordinator.toml and "
            "site.toml"
        ) from None
