"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedc2i.core.errors import UserError

DataDir = Annotated[Path | None, typer.Option(help="The folder of the data; or the variable FEDC2I_DATA.")]
Device = Annotated[str | None, typer.Option(help="auto, cpu or cuda.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE: any setting or option of the method.")]
Out = Annotated[Path | None, typer.Option(help="A new folder for the run; by default one under runs/.")]
Track = Annotated[
    list[str] | None,
    typer.Option("--track", help="tensorboard[:DIR], mlflow[:DIR or URI] or wandb[:PROJECT] (offline); repeatable."),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A TOML file with the same keys.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, everything else on stderr.")]


def values_of(flags: Mapping[str, str], pairs: list[str] | None, file: Path | None = None) -> dict[str, Any]:
    """All settings by name: the file's, then ``--set``, then flags."""
    from fedc2i.runs.settings import read_toml

    values = {} if file is None else read_toml(file)
    for pair in pairs or []:
        name, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or not name:
            raise UserError(f"--set takes KEY=VALUE, got '{pair}'")
        if name == "method":
            raise UserError("--set method=...: name the method as the command's argument")
        if isinstance(values.get("options"), dict):
            values["options"].pop(name, None)
        values[name] = value
    return {**values, **flags}
