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

from fedc2i import api, cli_data, cli_paper, cli_study, config, results
from fedc2i.errors import UserError
from fedc2i.methods.base import Method
from fedc2i.options import options_of
from fedc2i.plans import Plan, prepare
from fedc2i.progress import ProgressView
from fedc2i.report import tables
from fedc2i.runs import new_folder, slug, to_json

app = typer.Typer(
    help="Influence-oriented personalised federated learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    add_completion=False,
)
app.add_typer(cli_data.app, name="data")
app.command()(cli_paper.paper)
app.add_typer(cli_study.app, name="study")
INTERRUPTED = 130  # the exit code of a program that ctrl-c ended

Data = Annotated[str | None, typer.Option(help="embedded, digit5, office10, folder:DIR or arrays:DIR.")]
DataDir = Annotated[Path | None, typer.Option(help="Where the data lies; or the variable FEDC2I_DATA.")]
Partition = Annotated[str | None, typer.Option(help="Split every client further, e.g. dirichlet:10:0.5.")]
ModelName = Annotated[
    str | None, typer.Option("--model", help="lenet5, lenet5-bn, lenet-wide, lenet-wide-bn or FILE.py:FUNCTION.")
]
Rounds = Annotated[str | None, typer.Option(help="Communication rounds.")]
Seeds = Annotated[str | None, typer.Option(help="For example 0,1,2 or 0-9.")]
Topology = Annotated[
    str | None, typer.Option(help="Whose models a client receives: full, ring, random:K or a FILE of neighbours.")
]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE: any setting or option of the method.")]
Out = Annotated[Path | None, typer.Option(help="A new folder for the run; by default one under runs/.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with the same keys.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]


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
    set_: Set = None,
    out: Out = None,
    device: Device = None,
    config_file: ConfigFile = None,
    json: Json = False,
) -> None:
    """Run one method and write its run folder.

    METHOD is a name that `fedc2i methods` lists (fedc2i by default), with or without options (fedc2i:gamma=2), or
    FILE.py:CLASS. Options of the method can also be given as --set NAME=VALUE.
    """
    values = _values(config_file, set_, data, data_dir, partition, model, rounds, seeds, topology, device)
    named = method or values.pop("method", "fedc2i")
    plans = prepare([named], {name: value for name, value in values.items() if name != "method"})
    folder = new_folder(out, f"{slug(plans[0].key)}-{slug(plans[0].config.data)}")
    with _watching(plans, folder) as view:
        result = api.execute(plans[0], folder, view)
    _report([result], folder, json)


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
    set_: Set = None,
    out: Out = None,
    device: Device = None,
    config_file: ConfigFile = None,
    json: Json = False,
) -> None:
    """Run several methods on equal terms and print one table.

    METHOD is a name that `fedc2i methods` lists, with or without options (fedc2i:gamma=2), or FILE.py:CLASS.
    """
    values = _values(config_file, set_, data, data_dir, partition, model, rounds, seeds, topology, device)
    plans = prepare(wanted, {name: value for name, value in values.items() if name != "method"})
    folder = new_folder(out, f"compare-{slug(plans[0].config.data)}")
    with _watching(plans, folder) as view:
        found = api.execute_all(plans, folder, view)
    _report(found, folder, json)


@app.command(name="methods")
def list_methods(json: Json = False) -> None:
    """List the methods, their options and defaults, and the settings of every run."""
    kinds = [Method.registry[name] for name in sorted(Method.registry)]
    if json:
        listed: dict[str, Any] = {
            kind.name: {"about": kind.about, "reconstruction": kind.reconstruction, "options": _options(kind)}
            for kind in kinds
        }
        print(to_json({"methods": listed, "shared": _options(Method), "settings": _options(config.Config)}), end="")
        return
    console = Console()
    for kind in kinds:
        note = f". {kind.reconstruction}" if kind.reconstruction else ""
        _print_options(console, f"{kind.name}: {kind.about}{note}", kind)
    _print_options(console, "every method", Method)
    _print_options(console, "every run", config.Config)


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


def _values(file: Path | None, pairs: list[str] | None, *named: Any) -> dict[str, Any]:
    """All settings by name: the file's, then ``--set``, then named options."""
    values = {} if file is None else config.read_toml(file)
    for pair in pairs or []:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"--set takes KEY=VALUE, got '{pair}'")
        if name == "method":
            raise UserError("--set method=...: name the method as the command's argument")
        if isinstance(values.get("options"), dict):
            values["options"].pop(name, None)
        values[name] = value
    names = ("data", "data_dir", "partition", "model", "rounds", "seeds", "topology", "device")
    values |= {name: str(value) for name, value in zip(names, named, strict=True) if value is not None}
    return values


def _watching(plans: list[Plan], folder: Path) -> ProgressView:
    console = Console(stderr=True)
    for line in (*plans[0].federation.describe(), f"Writing to {folder}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return ProgressView(console, len(plans))


def _report(found: list[results.Result], folder: Path, json: bool) -> None:
    if json:
        print(to_json({"folder": str(folder), "results": {one.key: one.summary() for one in found}}), end="")
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file or a pipe has no width of its own
    console.print()
    console.print(tables.comparison(found).to_rich(console.width))
    for one in found:
        matrix = tables.influence(one, console.width)
        if matrix is not None:
            console.print(matrix)
    seconds = sum(one.seconds for one in found)
    console.print(f"Run folder: {folder}   ({seconds:.0f} s)", highlight=False, markup=False, soft_wrap=True)


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
        _fail(error.format_message() + hint)
    except (KeyboardInterrupt, click.Abort):
        print("fedc2i: interrupted; the run folder holds what was finished", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output, e.g. `head`, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)


def _fail(message: str) -> None:
    print(f"fedc2i: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(results.versions()["fedc2i"])
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """What every command has."""
