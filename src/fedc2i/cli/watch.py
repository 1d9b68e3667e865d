"""The command ``fedc2i watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    every: Annotated[float, typer.Option(help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and end.")] = False,
) -> None:
    """Look at a run while another process computes it: accuracy, influence, time left.

    It reads the run's files only. It ends when the run does or nobody works on it any more, or with
    ctrl-c, which does nothing to the run.
    """
    from fedc2i.report import live_view as picture

    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file or a pipe has no width of its own
    try:
        picture.watch(folder, console, every, once)
    except KeyboardInterrupt:
        console.print("no longer watching; the run goes on", highlight=False)
