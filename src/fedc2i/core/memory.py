"""How much memory there is, asked before anything is allocated on the word of a file.

A hospital's archive of 10 GB is welcome where it fits, so sizes that a file declares are held against the memory that
is free on this machine, not against a fixed figure.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedc2i.core.errors import UserError

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")  # a container's own limit
UNKNOWN = 2**33  # assumed free where the system does not say


def available() -> int:
    """Bytes of memory that are free here, for this machine or container as a whole."""
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
        found.append(most - used + int(stat.get("inactive_file", 0)))  # the cache of files makes room when asked
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        pass
    return max(0, min(found))


def require(where: object, declared: int, what: str = "the arrays", copies: int = 1) -> None:
    """Refuses what would not fit.

    Args:
        where: how the message begins.
        declared: bytes that a file says it holds.
        what: holds them.
        copies: how many times they will be in memory at once.

    Raises:
        UserError: if so much is not free.
    """
    if declared * copies > (free := available()):
        raise UserError(f"{where}: {what} declare {declared:,} bytes, but {free:,} bytes of memory are free here")
