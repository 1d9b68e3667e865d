"""What the commands that start a run over real sites share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedc2i.cli.shared import show
from fedc2i.core.errors import UserError, how_to_install
from fedc2i.core.options import names
from fedc2i.runs.settings import RunSettings, make

if TYPE_CHECKING:
    from fedc2i.deploy.job import Job
    from fedc2i.flower.answer_collector import Policy

MethodName = Annotated[str, typer.Argument(metavar="METHOD", help="A method's name, with options, or FILE.py:CLASS.")]


def require_flower() -> None:
    """Raises where the extra is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError(f"this command needs Flower: {how_to_install('flower')}") from None


def without_data(values: dict[str, Any]) -> dict[str, Any]:
    """The settings that do not say where data lies."""
    return {name: value for name, value in values.items() if name not in names(RunSettings, scope="data")}


def settings_of(method: str, values: dict[str, Any], policy: Policy) -> dict[str, Any]:
    """Settings of a run over sites that have their own data, checked as far as that is possible without the data.

    ``policy`` has those that are the coordinator's own.

    Raises:
        UserError: for a setting that is unknown, wrong, or says where data lies; for a file that needs others.
    """
    from fedc2i.deploy.run_description import reject_local_imports
    from fedc2i.runs.plan import parse_method

    reject_local_imports(method, values.get("model"))
    for name in names(RunSettings, scope="data"):
        if values.get(name) is not None:
            raise UserError(f"{name} is set by each site, in its site.toml")
    kind, name, own = parse_method(method)
    config = make(kind, {**values, **own, "method": name, **policy.settings()})
    kind(**config.options)
    return absolute_settings(values)


def absolute(name: str) -> str:
    """A method or model from a file, with the file's full path: the run's program works in another folder."""
    file, found, rest = name.partition(".py:")
    return f"{Path(file).absolute()}.py:{rest}" if found else name


def absolute_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The same for a model from a file, and for a topology's."""
    found = {"model": absolute(str(settings["model"]))} if settings.get("model") else {}
    if Path(topology := str(settings.get("topology", ""))).is_file():
        found["topology"] = str(Path(topology).absolute())
    return {**settings, **found}


def folder_of(job: Job, out: Path | None, parent: Path) -> Path:
    """The folder of a job: the one given, one with the same run unfinished, or a new one.

    Raises:
        UserError: if the one given holds something else.
    """
    from fedc2i.runs.folder import new_folder, slug

    if out is not None:
        unfinished = replace(job, out=out.absolute()).is_unfinished
        return out.absolute() if unfinished else new_folder(out).absolute()
    for folder in sorted(parent.glob("*")):
        if replace(job, out=folder).is_unfinished:
            return folder
    stem, number = slug(Path(job.method).name), 1
    while (folder := parent / f"{stem}-{number:03d}").exists() and any(folder.iterdir()):
        number += 1
    return new_folder(folder)


def show_run(folder: Path, json: bool) -> None:
    """Prints the run that ended."""
    from fedc2i.runs.finished_run import read_run

    show([read_run(folder)], folder, json)
