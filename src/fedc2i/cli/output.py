"""What several commands print: the table of results, lines of a log, and how to resume."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from fedc2i.core.files import to_json

if TYPE_CHECKING:
    from fedc2i.runs.results import Result


def console_for(least: int = 120) -> Console:
    """Standard output; a file or a pipe has no width, so lines there have at least this many characters."""
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, least)
    return console


def say(line: str) -> None:
    """One line of a log, on stderr."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def resumable(folder: Path, engine: str = "inprocess") -> Iterator[None]:
    """After an interruption, prints how to resume the run, if its engine can."""
    try:
        yield
    except KeyboardInterrupt:
        if engine == "inprocess":
            print(f"To resume: fedc2i resume {shlex.quote(str(folder))}", file=sys.stderr, flush=True)
        raise


def show(results: list[Result], folder: Path, json: bool) -> None:
    """Prints the table of results, or all of them as JSON."""
    if json:
        from fedc2i.runs.results import summary

        print(to_json({"folder": str(folder), "results": {one.key: summary(one) for one in results}}), end="")
        return
    from fedc2i.report.comparison import comparison_table, influence_table

    console = console_for(160)
    console.print()
    console.print(comparison_table(results).to_rich(console.width, console.is_terminal))
    for one in results:
        matrix = influence_table(one, console.width)
        if matrix is not None:
            console.print(matrix)
    seconds = sum(one.seconds for one in results)
    last = f"Run folder: {folder}   (rounds: {seconds:.0f} s, without starting and writing)"
    console.print(last, highlight=False, markup=False, soft_wrap=True)
