"""A program of another's as a process of ours: what it finds around it, its log, and its certain end.

Every program runs under a keeper (see :mod:`fedc2i.deploy.process_guard`), so nothing of it outlives this process.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from fedc2i.core.errors import UserError
from fedc2i.deploy import process_guard
from fedc2i.deploy.addresses import LOOPBACK

_PATIENCE = 10.0  # seconds that a program has to end by itself
_LONG = 10 * 2**20  # bytes of log after which the next start begins a new one
_NOISE = re.compile(r"^\s*(INFO|WARNING|ERROR|DEBUG)\s*:\s*|^\s*<?https?://\S+$")


@dataclass(frozen=True)
class Environment:
    """What every Flower process finds around it.

    Attributes:
        home: Flower's own folder, where it unpacks apps.
        host: an address of this machine that its programs call each other by, and no proxy may come between.
    """

    home: Path
    host: str = LOOPBACK

    def variables(self) -> dict[str, str]:
        """Ours without settings of other Flower installations, with those that every process of ours needs."""
        foreign = ("FLWR_", "FORWARDED_ALLOW_IPS", "PYTHONSTARTUP")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        here = str(Path(sys.executable).parent)  # Flower looks up the programs it starts along PATH
        threads = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "MKL", "OPENBLAS")}
        unproxied = (kept.get("no_proxy") or kept.get("NO_PROXY"), LOOPBACK, "localhost", "::1", self.host)
        no_proxy = ",".join(filter(None, unproxied))
        return {
            **kept,
            **threads,
            "PATH": os.pathsep.join([here, kept.get("PATH", os.defpath)]),
            "PYTHONUNBUFFERED": "1",
            "NO_PROXY": no_proxy,
            "no_proxy": no_proxy,
            "FLWR_HOME": str(self.home.absolute()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",  # seconds; else a second is lost with every message
        }


class Program:
    """One program under its keeper; what it says goes to ``<folder>/<name>.log``."""

    def __init__(self, name: str, folder: Path, environment: Environment | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.name, self.folder = name, folder
        self.log = folder / f"{name}.log"
        self.environment = environment or Environment(folder / "flwr")
        self._keeper: subprocess.Popen[bytes] | None = None
        self._begin = 0

    def launch(self, command: Sequence[str], patience: float = _PATIENCE) -> None:
        """Starts the command; a terminal's Ctrl-C reaches this process only, which ends its programs in order."""
        if self.is_alive():
            raise UserError(f"{self.name} runs already, as process {self.pid}")
        if self.log.exists() and self.log.stat().st_size > _LONG:
            self.log.replace(self.log.with_suffix(".log.old"))
        self._begin = self.log.stat().st_size if self.log.exists() else 0
        words = [sys.executable, "-I", "-S", process_guard.__file__, str(os.getpid()), str(patience), *command]
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self.environment.variables(),
                start_new_session=True,
            )

    @property
    def pid(self) -> int | None:
        """The keeper's process id: a SIGTERM to it ends the program and all that belongs to it."""
        return self._keeper.pid if self._keeper else None

    @property
    def exit_code(self) -> int | None:
        """None as long as it runs; 1 for all of Flower's own error codes, which only the log tells."""
        return self._keeper.poll() if self._keeper else None

    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._keeper is not None and self._keeper.poll() is None

    def said(self) -> str:
        """What it wrote since its latest start, colours taken off."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(self._begin)
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode("utf-8", errors="replace"))
        return ""

    def tail(self, lines: int = 4) -> str:
        """The last lines that say something, in one line; of an error that was not caught, its last line."""
        said = self.said()
        told = [_NOISE.sub("", line).strip() for line in said.splitlines()]
        told = [line for line in told if line][-1 if "Traceback (most recent call last)" in said else -lines :]
        return " | ".join(told) or "it wrote nothing"

    def stop(self) -> None:
        """Asks it to end, waits until nothing of it is left; no harm if it has ended already."""
        if self._keeper is None:
            return
        if self._keeper.poll() is None:
            self._keeper.send_signal(signal.SIGTERM)
        self._keeper.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Starts it; each kind of program knows how."""
        raise NotImplementedError
