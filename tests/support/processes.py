"""What tests ask of processes that they started."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    """Whether something holds soon."""
    until = time.monotonic() + seconds
    while not holds() and time.monotonic() < until:
        time.sleep(0.02)
    return holds()
