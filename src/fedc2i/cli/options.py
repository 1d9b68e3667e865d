"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedc2i.core.errors import UserError

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
    from fedc2i.runs import settings

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
