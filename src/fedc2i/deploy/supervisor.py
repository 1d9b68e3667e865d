"""Keeps a site's SuperNode running: starts it again whenever it ends, until it is told to stop."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

from fedc2i.deploy.flower_processes import SuperNode

_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between an end and the next start
_REFUSED = 5.0  # after a refusal: a node that was killed is let in again when its old session ends, within a minute
_STEADY = 60.0  # seconds after which it counts as running well
_LOOK = 0.2


def report(line: str) -> None:
    """One event, one line, with the time."""
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _until_signal(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and Ctrl-C set the event; in another thread than the main one signals are not ours to take."""
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
    if (reason := node.refused()) is not None:
        return (
            f"the coordinator did not let it in ({reason or 'no reason given'}); it may be just starting, or hold an "
            f"earlier session of this site for up to a minute; if this goes on, is the key admitted, and ca.crt right?"
        )
    return f"it ended with code {node.exit_code}: {node.tail(2)} (log: {node.log})"


def supervise(node: SuperNode, stop: threading.Event | None = None, say: Callable[[str], None] = report) -> None:
    """Runs the node until SIGTERM or Ctrl-C, or until ``stop`` is set; starts it again whenever it ends.

    The wait before a start doubles from one second to half a minute as long as the node does not stay up; after a
    refusal it is always five seconds.

    Args:
        node: not started yet.
        stop: set it to end; a signal sets it too.
        say: takes one line per event.
    """
    stop = stop or threading.Event()
    pause = _SHORTEST
    with _until_signal(stop):
        try:
            while not stop.is_set():
                began, known = time.monotonic(), None
                node.start()
                say(f"{node.name}: started, looking for the SuperLink at {node.superlink}")
                while node.is_alive() and not stop.wait(_LOOK):
                    if known is None and (known := node.node_id()) is not None:
                        say(f"{node.name}: online as node {known}")
                if stop.is_set():
                    break
                if time.monotonic() - began > _STEADY:
                    pause = _SHORTEST
                wait = _REFUSED if node.refused() is not None else pause
                say(f"{node.name}: {_why(node)}; starting again in {wait:.0f} s")
                pause = min(2 * pause, _LONGEST)
                stop.wait(wait)
        finally:
            node.stop()
    say(f"{node.name}: stopped")
