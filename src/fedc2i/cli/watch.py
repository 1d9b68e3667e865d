"""The command ``fedc2i watch``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedc2i.cli.shared import console_for

app = typer.Typer(add_completion=False)


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run or of a comparison.")],
    every: Annotated[float, typer.Option(help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show what there is now, and end.")] = False,
) -> None:
    """Look at a run while another process computes it: accuracy, influence, time left.

    It reads the run's files only. It ends when the run ends or when no process works on it, or with
    Ctrl-C, which does not stop the run.
    """
    from fedc2i.report import watch_view

    console = console_for()
    try:
        watch_view.watch(folder, console, every, once)
    except KeyboardInterrupt:
        console.print("stopped watching; the run continues", highlight=False)
