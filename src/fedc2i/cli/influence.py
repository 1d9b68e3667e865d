"""``fedc2i influence show``: how certain the influence of a finished run is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedc2i.cli.shared import DataDir, Json, Trust, console_for, runs_below
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import to_json

app = typer.Typer(help="How certain the influence of a finished run is.", no_args_is_help=True, add_completion=False)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of its comparison.")]


@app.callback()
def _influence() -> None:
    """How certain the influence of a finished run is."""


@app.command()
def show(
    folder: Run,
    seed: Annotated[int | None, typer.Option(help="One of the run's seeds; the first by default.")] = None,
    client: Annotated[str | None, typer.Option(help="Only whose models weigh with this client.")] = None,
    samples: Annotated[int, typer.Option(help="Samples of every client, or as many as it has.")] = 256,
    draws: Annotated[int, typer.Option(help="Draws of the bootstrap.")] = 200,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    data_dir: DataDir = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Whose model weighs most after the last round, with intervals from a bootstrap over samples.

    Helpers whose interval holds the equal share are marked: the samples show no difference. All numbers are written
    into the run folder, as influence-intervals.json.
    """
    from fedc2i.analysis.influence_intervals import FILE, intervals
    from fedc2i.report.influence_report import print_intervals
    from fedc2i.runs.finished_run import read_run
    from fedc2i.runs.interrupted_run import paths_from_start
    from fedc2i.runs.settings import read_toml

    folder = _run_with_influence(folder)
    names = read_run(folder).federation.names
    if client is not None and client not in names:
        raise UserError(f"no client '{client}', allowed are {one_line(', '.join(names), most=1000)}")
    with paths_from_start(read_toml(folder / "config.toml")):
        found = intervals(folder, seed=seed, samples=samples, draws=draws, level=level, data_dir=data_dir, trust=trust)
    if json:
        print(to_json(found.to_json()), end="")
        return
    print_intervals(console_for(), found, range(len(names)) if client is None else [names.index(client)])
    print(f"Written to {folder / FILE}")


def _run_with_influence(folder: Path) -> Path:
    """The folder itself if it holds a run, or the only run of a comparison that measures influence.

    Raises:
        UserError: if none or several do; the message names them.
    """
    from fedc2i.runs.finished_run import read_run

    found = runs_below(folder)
    if found == [folder]:
        return folder
    found = [run for run in found if read_run(run).influence("influence_vector").size]
    if not found:
        raise UserError(f"{folder}: no run of this comparison measures influence")
    if len(found) > 1:
        raise UserError(f"{folder}: a comparison; name one of its runs: {', '.join(map(str, found))}")
    return found[0]
