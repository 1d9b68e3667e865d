"""``fedc2i contribution``: what each member gives to each other member, by training among coalitions."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedc2i.cli import shared
from fedc2i.cli.shared import ConfigFile, Json, Set, Trust
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import to_json
from fedc2i.core.options import flags, names
from fedc2i.runs.settings import RunSettings

if TYPE_CHECKING:
    from fedc2i.runs.plan import Plan

app = typer.Typer(add_completion=False)
SAME_RUN = {"seeds", "metric", *names(RunSettings, scope="machine")}  # may be others than the run's


@app.command()
@shared.setting_flags("run")
def contribution(
    source: Annotated[
        str, typer.Argument(metavar="RUN|METHOD", help="The folder of a finished run, or a method's name.")
    ],
    settings: dict[str, str],
    runs: Annotated[int, typer.Option(help="Beyond six clients: coalitions to run at most.")] = 400,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the result; by default the run's, or one under runs/.", show_default=False),
    ] = None,
    config_file: ConfigFile = None,
    trust: Trust = False,
    json: Json = False,
) -> None:
    """Measure who helps whom: train among coalitions of the clients, and compare with training alone.

    Up to six clients all coalitions are run and Shapley values are exact; beyond, orders of givers are drawn. Every
    value has an interval over test samples and seeds. Interrupted or repeated, the same command computes only what is
    missing. The result is written as contribution.json and contribution.csv, and `fedc2i report FOLDER` shows it.
    """
    from fedc2i.analysis.contribution.measure import contribution as measure
    from fedc2i.core.files import locked, refuse_links, writing
    from fedc2i.report.contribution_report import print_contribution
    from fedc2i.report.work_view import WorkView
    from fedc2i.runs.folder import slug

    if runs < 1:
        raise UserError(f"runs must be at least 1, got {runs}")
    if Path(source).is_dir():
        folder = _run_of(Path(source))
        plan = _plan_of_run(folder, settings, set_, config_file, trust)
        folder = out or folder
    else:
        (plan,) = shared.plans_of([source], shared.values_of(settings, set_, config_file), config_file)
        folder = out or Path("runs") / f"contribution-{slug(plan.key)}-{shared.short_name(plan.config.data)}"
    is_new = not folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with locked(folder), _interruptible(folder, is_new), WorkView(console) as view:
        refuse_links(folder)
        found = measure(plan, folder, most_runs=runs, on_work=view.update, say=view.say)
    if json:
        print(to_json(found.to_json()), end="")
        return
    print_contribution(shared.console_for(), found)
    print(f"Written to {folder}/contribution.json and contribution.csv")
    print(f"`fedc2i report {folder}` shows it")


def _interruptible(folder: Path, is_new: bool) -> AbstractContextManager[None]:
    """Of a folder only runs of coalitions are removed, if no round of any is finished and there were none before."""
    from fedc2i.analysis.contribution.coalitions import RUNS
    from fedc2i.runs.folder import SUMMARY

    runs = folder / RUNS
    return shared.interruptible(
        folder,
        lambda: any((*runs.glob(f"*/{SUMMARY}"), *runs.glob("*/checkpoints/round*"))),
        f"Finished work is kept in {folder}; the same command resumes",
        is_new=is_new,
        unfinished=None if runs.exists() else runs,
    )


def _run_of(folder: Path) -> Path:
    """The folder itself if it holds a run, or the only run of a comparison that is not of Local training."""
    from fedc2i.runs.finished_run import read_run

    found = shared.runs_below(folder)
    if found == [folder]:
        return folder
    found = [run for run in found if read_run(run).method.name != "local"]
    if len(found) != 1:
        raise UserError(f"{folder}: a comparison; name one of its runs: {', '.join(map(str, found))}")
    return found[0]


def _plan_of_run(
    folder: Path, settings: dict[str, str], set_: list[str] | None, config_file: Path | None, trust: bool
) -> Plan:
    """The run once more, perhaps with other seeds."""
    from dataclasses import replace

    from fedc2i.runs.finished_run import reopen
    from fedc2i.runs.interrupted_run import paths_from_start
    from fedc2i.runs.settings import make, read_toml

    changed = {name: text for name, text in settings.items() if name in SAME_RUN}
    others = [*(settings.keys() - changed.keys() - {"data_dir"}), *(["--set"] if set_ else [])]
    others += ["--config"] if config_file else []
    if others:
        allowed = ", ".join(own.flag for own in flags(RunSettings, "run") if own.name in {*SAME_RUN, "data_dir"})
        raise UserError(f"{folder}: a run has its own {one_line(', '.join(others))}; allowed are {allowed}")
    place = settings.get("data_dir")
    with paths_from_start(read_toml(folder / "config.toml")):
        plan = reopen(folder, data_dir=None if place is None else Path(place), trust=trust)
    checked = make(type(plan.method), changed)
    return replace(plan, config=replace(plan.config, **{name: getattr(checked, name) for name in changed}))
