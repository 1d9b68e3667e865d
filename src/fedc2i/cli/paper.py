"""``fedc2i paper``: the paper's tables and figures, computed here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json

app = typer.Typer(add_completion=False)


@app.command()
def paper(
    wanted: Annotated[
        list[str],
        typer.Argument(
            metavar="WHAT...", help="table1, table2, ablation, gamma, influence, samples or all.", show_default=False
        ),
    ],
    data_dir: Annotated[Path | None, typer.Option(help="Where the data lies; or the variable FEDC2I_DATA.")] = None,
    seeds: Annotated[str, typer.Option(help="For example 0,1,2 or 0-9.")] = "0,1,2",
    rounds: Annotated[
        str | None, typer.Option(help="A trial with other rounds than the protocol's, in a separate folder.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Tables and figures; the runs lie in runs/ below it.")] = Path("results"),
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout, all else on stderr.")] = False,
) -> None:
    """Compute the paper's tables and figures beside the published ones; finished runs are not repeated."""
    from fedc2i.report.progress import ProgressView
    from fedc2i.report.reproduction import ARTEFACTS, Reproduction
    from fedc2i.runs.cache import RunCache

    for name in wanted:
        if name not in (*ARTEFACTS, "all"):
            raise UserError(f"unknown table or figure '{name}', allowed are {', '.join(ARTEFACTS)} and all")
    names = list(ARTEFACTS) if "all" in wanted else list(dict.fromkeys(wanted))
    settings = {"seeds": seeds, "device": device}
    settings |= {} if data_dir is None else {"data_dir": str(data_dir)}
    settings |= {} if rounds is None else {"rounds": rounds}
    store = RunCache(out / "runs")
    work = Reproduction(names, settings, store)
    console = Console(stderr=True)
    folder = out if rounds is None else out / f"trial-{rounds}-rounds"  # a trial must not replace real tables
    console.print(f"Writing to {folder}; {work.runs_left()} runs to go", highlight=False, markup=False, soft_wrap=True)
    with ProgressView(console, work.plans_left()) as view:
        files = work.make(folder, view)
    if json:
        print(to_json({"folder": str(folder), "files": files}), end="")
    else:
        for file in files:
            print(folder / file)
