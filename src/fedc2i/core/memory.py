"""What this machine has: cores, and free memory, checked before anything is allocated that a file declares.

A hospital's archive of 10 GB is welcome if it fits, so declared sizes are compared with the free memory, not with a
fixed limit.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedc2i.core.errors import UserError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # a container's own limit
UNKNOWN = 2**33  # assumed free where the system does not say


def available() -> int:
    """Bytes of free memory on this machine or in this container."""
    found = [UNKNOWN]
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text(encoding="ascii").splitlines())
        found = [1024 * int(lines["MemAvailable"].split()[0])]
    except (OSError, ValueError, KeyError):
        if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
            found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    try:
        most, used = (int((_GROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text(encoding="ascii").splitlines())
        found.append(most - used + int(stat.get("inactive_file", 0)))  # the system gives its cache of files back
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return max(0, min(found))


def total() -> int:
    """Bytes of memory that this machine or container has, free or not."""
    known = hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if known else UNKNOWN
    try:
        return min(found, int((_GROUP / "memory.max").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return found


def require(where: object, declared: int, what: str = "the arrays", copies: int = 1) -> None:
    """Raises a `UserError` unless ``copies`` times the ``declared`` bytes are free; ``where`` begins the message."""
    if declared * copies > (free := available()):
        raise UserError(f"{where}: {what} declare {declared:,} bytes, but {free:,} bytes of memory are free here")
