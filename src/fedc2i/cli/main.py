"""The command ``fedc2i``: parses, calls, prints."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from rich.console import Console
from rich.table import Table

from fedc2i import api
from fedc2i.cli import (
    coordinator,
    data,
    flower,
    influence,
    paper,
    privacy,
    report,
    resume,
    site,
    watch,
)
from fedc2i.cli.common import (
    Attack,
    ConfigFile,
    Data,
    DataDir,
    Device,
    Engine,
    Json,
    ModelName,
    Out,
    Partition,
    RayAddress,
    Rounds,
    Seeds,
    Set,
    Topology,
    Track,
    naming,
    resumable,
    show,
    values_of,
)
from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json
from fedc2i.core.options import options_of
from fedc2i.core.version import __version__
from fedc2i.engine import accountant
from fedc2i.methods.base import Method
from fedc2i.report.progress import ProgressView
from fedc2i.report.tracking import Observers
from fedc2i.report.tracking import track as trackers_of
from fedc2i.runs import settings
from fedc2i.runs.folder import new_folder, slug
from fedc2i.runs.plan import Plan, prepare

app = typer.Typer(
    help="Influence-oriented personalised federated learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
app.add_typer(data.app, name="data")
app.command()(paper.paper)
app.command()(privacy.privacy)
app.command()(resume.resume)
app.command()(report.report)
app.add_typer(influence.app, name="influence")
app.command()(watch.watch)
app.command(name="flower-local")(flower.flower_local)
app.command(name="flower-app")(flower.flower_app)
app.add_typer(coordinator.app, name="coordinator")
app.add_typer(site.app, name="site")
INTERRUPTED = 130  # the exit code of a program that ctrl-c ended


@app.command()
def run(
    method: Annotated[str | None, typer.Argument(help="A method's name or FILE.py:CLASS.")] = None,
    data: Data = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    topology: Topology = None,
    attack: Attack = None,
    engine: Engine = None,
    ray_address: RayAddress = None,
    set_: Set = None,
    out: Out = None,
    device: Device = None,
    config_file: ConfigFile = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Run one method and write its run folder.

    METHOD is a name that `fedc2i methods` lists (fedc2i by default), with or without options (fedc2i:gamma=2), or
    FILE.py:CLASS. Options of the method can also be given as --set NAME=VALUE.
    """
    named_options = data, data_dir, partition, model, rounds, seeds, topology, device, engine, ray_address, attack
    values = values_of(config_file, set_, *named_options)
    named = method or values.pop("method", "fedc2i")
    tracking = trackers_of(*(track or []))
    with naming(config_file):
        plans = prepare([named], {name: value for name, value in values.items() if name != "method"})
        plans[0].require_engine()
    folder = new_folder(out, f"{slug(plans[0].key)}-{slug(plans[0].config.data)}")
    with resumable(folder, plans[0].config.engine), _watching(plans, folder) as view, tracking:
        result = api.execute(plans[0], folder, Observers(view, tracking))
    show([result], folder, json)


@app.command()
def compare(
    wanted: Annotated[list[str], typer.Argument(metavar="METHOD...", help="E.g. local fedavg fedc2i fedc2i:gamma=2.")],
    data: Data = None,
    data_dir: DataDir = None,
    partition: Partition = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    topology: Topology = None,
    attack: Attack = None,
    engine: Engine = None,
    ray_address: RayAddress = None,
    set_: Set = None,
    out: Out = None,
    device: Device = None,
    config_file: ConfigFile = None,
    track: Track = None,
    json: Json = False,
) -> None:
    """Run several methods on equal terms and print one table.

    METHOD is a name that `fedc2i methods` lists, with or without options (fedc2i:gamma=2), or FILE.py:CLASS.
    """
    named_options = data, data_dir, partition, model, rounds, seeds, topology, device, engine, ray_address, attack
    values = values_of(config_file, set_, *named_options)
    tracking = trackers_of(*(track or []))
    with naming(config_file):
        plans = prepare(wanted, {name: value for name, value in values.items() if name != "method"})
        plans[0].require_engine()
    folder = new_folder(out, f"compare-{slug(plans[0].config.data)}")
    with resumable(folder, plans[0].config.engine), _watching(plans, folder) as view, tracking:
        found = api.execute_all(plans, folder, Observers(view, tracking))
    show(found, folder, json)


@app.command(name="methods")
def list_methods(json: Json = False) -> None:
    """List the methods, their options and defaults, and the settings of every run."""
    kinds = [Method.registry[name] for name in sorted(Method.registry)]
    if json:
        listed: dict[str, Any] = {
            kind.name: {"about": kind.about, "reconstruction": kind.reconstruction, "options": _options(kind)}
            for kind in kinds
        }
        print(
            to_json({"methods": listed, "shared": _options(Method), "settings": _options(settings.RunSettings)}), end=""
        )
        return
    console = Console()
    for kind in kinds:
        note = f". {kind.reconstruction}" if kind.reconstruction else ""
        _print_options(console, f"{kind.name}: {kind.about}{note}", kind)
    _print_options(console, "every method", Method)
    _print_options(console, "every run", settings.RunSettings)


def _options(kind: type) -> dict[str, Any]:
    """By name; of a method only its own, and shared ones that it has another default for."""
    shared = options_of(Method) if issubclass(kind, Method) and kind is not Method else {}
    return {
        option.name: {"default": option.default, "allowed": option.allowed, "about": option.about}
        for option in options_of(kind).values()
        if option.name not in ("method", "options") and option != shared.get(option.name)
    }


def _print_options(console: Console, title: str, kind: type) -> None:
    table = Table("option", "default", "allowed", "meaning", title=title, title_justify="left", box=None)
    for name, entry in _options(kind).items():
        table.add_row(name, str(entry["default"]), entry["allowed"], entry["about"])
    if table.row_count:
        console.print(table)
    else:
        console.print(title, "(no options of its own)", highlight=False, style="italic")
    console.print()


def _watching(plans: list[Plan], folder: Path) -> ProgressView:
    console = Console(stderr=True)
    planned = accountant.cost(plans[0].config, len(plans[0].federation.names))
    notes = [] if planned is None else [f"Privacy: {planned}"]
    for line in (*plans[0].federation.describe(), *notes, f"Writing to {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return ProgressView(console, len(plans))


def main() -> None:
    """The entry point: what a user can put right is one line and exit code 2, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # γ and λ must not stop a terminal that cannot show them
            stream.reconfigure(errors="backslashreplace")
    try:
        code = app(prog_name="fedc2i", standalone_mode=False)
        if code == INTERRUPTED:  # typer's answer to ctrl-c
            raise KeyboardInterrupt
        sys.exit(code if isinstance(code, int) else 0)
    except UserError as error:
        _fail(str(error))
    except click.ClickException as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # by its name: click before 8.2 has no such class
            sys.exit(2)  # the help has been shown
        hint = " Options of a method are given as --set NAME=VALUE." if isinstance(error, click.NoSuchOption) else ""
        said = error.message if "Did you mean" in error.message else error.format_message()  # some say it themselves
        _fail(said + hint)
    except (KeyboardInterrupt, click.Abort):
        said = "interrupted; what is finished is kept; `fedc2i resume` goes on with a run, this command with a study"
        print(f"fedc2i: {said}", file=sys.stderr, flush=True)
        simulation = sys.modules.get("fedc2i.flower.simulation")
        if simulation is not None and simulation.was_interrupted:  # its threads wait for processes that are gone
            os._exit(INTERRUPTED)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, e.g. `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(message: str) -> None:
    print(f"fedc2i: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """What every command has."""
