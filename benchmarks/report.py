"""Tables for the terminal, and what machine they were measured on."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text


def show(
    console: Console, title: str, header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> None:
    """Prints a table, names to the left and numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD)
    for number, name in enumerate(header):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(Text(title, "bold"))
    console.print(table)
    if notes:
        console.print(Text("\n".join((*notes, "")), "dim"))


def machine() -> dict[str, Any]:
    """The processor, what may be used of it, and the versions that matter."""
    return {
        "cpu": cpu_name(),
        "cores": cores(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cpu_name() -> str:
    """As the system tells it."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, fastest, slowest and all."""
    return {
        "median": statistics.median(seconds),
        "fastest": min(seconds),
        "slowest": max(seconds),
        "all": [round(own, 5) for own in seconds],
    }


def clock(seconds: float) -> str:
    """Seconds with three significant digits, in the unit that suits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
