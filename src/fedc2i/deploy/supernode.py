"""Flower's SuperNode as a process of ours: a site's program, which asks the SuperLink for work, and is kept running."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fedc2i.core.errors import UserError
from fedc2i.deploy.approval import clear_unpacked
from fedc2i.deploy.child_process import ChildProcess, free_port
from fedc2i.deploy.site_folder import SiteFolder
from fedc2i.flower import compat
from fedc2i.flower.site import COMPLAINT

_PRELOAD = "torch,fedc2i.deploy.worker"  # what a site's program imports, once for all messages
_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between an end and the next start
_REJECTED = 5.0  # the same after a rejection: the old session of a node that was killed ends within a minute
_STEADY = 60.0  # seconds after which the pauses start from the shortest again
_POLL = 0.2


class SuperNode(ChildProcess):
    """A site's program: asks the SuperLink for work, and starts the site's own code for each message."""

    def __init__(self, site: SiteFolder) -> None:
        super().__init__(site.name, site.folder / "logs")
        if "'" in str(site.folder) or "\n" in str(site.folder):
            raise UserError(f"{str(site.folder)!r}: a site's folder must not have quotes or line breaks in its path")
        self.site = site
        self._heard = 0  # how much of the log was searched for complaints

    def start(self) -> None:
        """Starts it, without waiting: it keeps trying until the SuperLink is there."""
        clear_unpacked(self.site.folder)
        words = ["--site", str(self.site.folder), "--port", str(free_port()), "--preload", _PRELOAD]
        words += ["--superlink", self.site.coordinator]
        words += ["--root-certificates", str(self.site.authority)]
        words += ["--auth-supernode-private-key", str(self.site.key), "--node-config", f"site='{self.site.folder}'"]
        self.launch([sys.executable, "-P", "-m", "fedc2i.deploy.node_executor", *words])

    def node_id(self) -> int | None:
        """Its number at the SuperLink; None until it has been accepted."""
        return compat.node_id(self.output())

    def rejection(self) -> str | None:
        """Why the SuperLink rejected it, if it ended for that."""
        return compat.rejection(self.output())

    def complaints(self) -> list[str]:
        """Why the site could not take part or do a task, since the last call."""
        with contextlib.suppress(OSError), self.log.open("rb") as log:
            log.seek(max(self._heard, self._log_start))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
            self._heard = log.tell()
            return [found for line in lines if (found := line.partition(COMPLAINT)[2])]
        return []


def report(line: str) -> None:
    """Prints one event with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


def keep_running(node: SuperNode, stop: threading.Event | None = None, say: Callable[[str], None] = report) -> None:
    """Runs the node until SIGTERM or Ctrl-C, or until ``stop`` is set; restarts it whenever it ends.

    The pause before a restart doubles from one second to half a minute, until the node has run for a minute. After a
    rejection it is always five seconds. ``say`` takes one line per event.
    """
    stop = stop or threading.Event()
    pause = _SHORTEST
    with _until_signal(stop):
        try:
            while not stop.is_set():
                began, known = time.monotonic(), None
                node.start()
                say(f"{node.name}: started, connecting to the SuperLink at {node.site.coordinator}")
                while node.is_alive() and not stop.wait(_POLL):
                    if known is None and (known := node.node_id()) is not None:
                        say(f"{node.name}: online as node {known}")
                    for line in node.complaints():
                        say(f"{node.name}: {line}")
                if stop.is_set():
                    break
                if time.monotonic() - began > _STEADY:
                    pause = _SHORTEST
                wait = _REJECTED if node.rejection() is not None else pause
                say(f"{node.name}: {_why(node)}; restarting in {wait:.0f} s")
                pause = min(2 * pause, _LONGEST)
                stop.wait(wait)
        finally:
            node.stop()
    say(f"{node.name}: stopped")


@contextlib.contextmanager
def _until_signal(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set the event; only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _why(node: SuperNode) -> str:
    if (reason := node.rejection()) is not None:
        return (
            f"the coordinator rejected it ({reason or 'no reason given'}); it may be just starting, or hold an earlier "
            f"session of this site for up to a minute; after that, check that the key is admitted and ca.crt right"
        )
    return f"it ended with code {node.exit_code}: {node.tail(2)} (log: {node.log})"
