"""What several commands share: their options, settings from them, and the table of a result."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json
from fedc2i.report.comparison import comparison_table
from fedc2i.report.influence_table import influence_table
from fedc2i.runs import results, settings
from fedc2i.runs.summary import summary

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
Attack = Annotated[
    str | None,
    typer.Option(help="Dishonest clients: KIND[:STRENGTH]@CLIENT[,CLIENT...], e.g. sign-flip@20%; several joined by ;"),
]
Engine = Annotated[str | None, typer.Option(help="inprocess, or flower-sim: Flower's simulation on Ray.")]
RayAddress = Annotated[str | None, typer.Option(help="flower-sim: a running Ray cluster, e.g. auto or HOST:6379.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE: any setting or option of the method.")]
Out = Annotated[Path | None, typer.Option(help="A new folder for the run; by default one under runs/.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="tensorboard[:DIR], mlflow[:DIR or URI] or wandb[:PROJECT] (offline); repeatable."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with the same keys.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]


def values_of(file: Path | None, pairs: list[str] | None, *named: Any) -> dict[str, Any]:
    """All settings by name: the file's, then ``--set``, then named options."""
    values = {} if file is None else settings.read_toml(file)
    for pair in pairs or []:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"--set takes KEY=VALUE, got '{pair}'")
        if name == "method":
            raise UserError("--set method=...: name the method as the command's argument")
        if isinstance(values.get("options"), dict):
            values["options"].pop(name, None)
        values[name] = value
    names = ("data", "data_dir", "partition", "model", "rounds", "seeds", "topology", "device", "engine", "ray_address")
    both = zip((*names, "attack"), named, strict=True)
    values |= {name: str(value) for name, value in both if value is not None}
    return values


@contextmanager
def naming(file: Path | None) -> Iterator[None]:
    """An error about settings names the file that some of them stood in."""
    try:
        yield
    except UserError as error:
        if file is None:
            raise
        raise UserError(f"{error} (with the settings of {file})") from error


@contextmanager
def resumable(folder: Path, engine: str = "inprocess") -> Iterator[None]:
    """Who interrupts a run is told how to go on with it, where the engine can."""
    try:
        yield
    except KeyboardInterrupt:
        if engine == "inprocess":
            print(f"To go on: fedc2i resume {shlex.quote(str(folder))}", file=sys.stderr, flush=True)
        raise


def show(found: list[results.Result], folder: Path, json: bool) -> None:
    """The table of results, or all of them as JSON."""
    if json:
        print(to_json({"folder": str(folder), "results": {one.key: summary(one) for one in found}}), end="")
        return
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 160)  # a file or a pipe has no width of its own
    console.print()
    console.print(comparison_table(found).to_rich(console.width, console.is_terminal))
    for one in found:
        matrix = influence_table(one, console.width)
        if matrix is not None:
            console.print(matrix)
    seconds = sum(one.seconds for one in found)
    last = f"Run folder: {folder}   (rounds: {seconds:.0f} s, without starting and writing)"
    console.print(last, highlight=False, markup=False, soft_wrap=True)
