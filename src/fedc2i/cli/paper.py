"""``fedc2i paper``: the paper's tables and figures, computed here."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i.cli.shared import Json, say, setting_flags
from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json

app = typer.Typer(add_completion=False)
NAMES = ("table1", "table2", "ablation", "gamma", "influence", "samples")  # of `reproduction.ARTEFACTS`, without torch


@app.command()
@setting_flags("paper")
def paper(
    wanted: Annotated[
        list[str],
        typer.Argument(metavar="WHAT...", help=f"{', '.join(NAMES)} or all.", show_default=False),
    ],
    settings: dict[str, str],
    out: Annotated[Path, typer.Option(help="Tables and figures; the runs lie in runs/ below it.")] = Path("results"),
    json: Json = False,
) -> None:
    """Compute the paper's tables and figures beside the published ones; finished runs are not repeated.

    Seeds are 0,1,2 by default. With --rounds it is a trial, in a separate folder.
    """
    from fedc2i.runs.job_processes import started_early

    for name in wanted:
        if name not in (*NAMES, "all"):
            raise UserError(f"unknown table or figure '{name}', allowed are {', '.join(NAMES)} and all")
    names = list(NAMES) if "all" in wanted else list(dict.fromkeys(wanted))
    computes_many = names != ["samples"] and not any(out.glob("runs/*/summary.json"))  # nothing is in the cache yet
    with started_early(settings) if computes_many else nullcontext() as processes:
        from fedc2i.report.progress import ProgressView
        from fedc2i.report.reproduction import Reproduction
        from fedc2i.runs.cache import RunCache

        work = Reproduction(names, {"seeds": "0,1,2", **settings}, RunCache(out / "runs"))
        rounds = settings.get("rounds")
        folder = out if rounds is None else out / f"trial-{rounds}-rounds"  # a trial must not replace real tables
        say(f"Writing to {folder}; {work.runs_left()} runs to go")
        with ProgressView(Console(stderr=True), work.plans_left()) as view:
            files = work.make(folder, view, processes)
    if json:
        print(to_json({"folder": str(folder), "files": files}), end="")
    else:
        for file in files:
            print(folder / file)
