"""``fedc2i flower-local`` and ``fedc2i flower-app``; and what all commands that start a run over real sites share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedc2i.cli.common import Data, DataDir, Json, ModelName, Out, Rounds, Seeds, Set, Topology, show, values_of
from fedc2i.core.errors import UserError
from fedc2i.core.files import locked, read_json
from fedc2i.core.settings import names
from fedc2i.runs.folder import new_folder, slug
from fedc2i.runs.plan import prepare
from fedc2i.runs.read import read_run
from fedc2i.runs.settings import RunSettings, make
from fedc2i.runs.specs import parse

if TYPE_CHECKING:
    from fedc2i.deploy.lead import Job
    from fedc2i.flower.answer_collector import Policy

# What needs the extra `flower` is imported inside the commands, so that all others work without it.

MethodName = Annotated[str, typer.Argument(metavar="METHOD", help="A method's name, with options, or FILE.py:CLASS.")]
Deadline = Annotated[float, typer.Option(help="Seconds after which a round goes on with the sites that answered.")]
MinSites = Annotated[int, typer.Option(help="Answers without which a round does not end.")]
Wire = Annotated[str, typer.Option(help="How models travel: float32 or float16.")]
_OF_DATA = names(RunSettings, scope="data")


def say(line: str) -> None:
    """One line of a run's log, on stderr."""
    Console(stderr=True).print(line, highlight=False, markup=False, soft_wrap=True)


def policy_of(deadline: float, min_sites: int, wire: str) -> Policy:
    """How long to wait for whom, checked."""
    from fedc2i.flower.answer_collector import Policy

    kind, name, _ = parse("fedavg")
    make(kind, {"method": name, "engine": "flower", "deadline": deadline, "min_sites": min_sites, "wire": wire})
    return Policy(deadline, min_sites, wire == "float16")


def finish(folder: Path, json: bool) -> None:
    """Shows the run that ended."""
    show([read_run(folder)], folder, json)


def flower_local(
    method: MethodName = "fedc2i",
    data: Data = None,
    data_dir: DataDir = None,
    sites: Annotated[int | None, typer.Option(help="How many; the data's first clients. By default all.")] = None,
    model: ModelName = None,
    rounds: Rounds = None,
    seeds: Seeds = None,
    topology: Topology = None,
    deadline: Deadline = 600.0,
    min_sites: MinSites = 1,
    wire: Wire = "float32",
    set_: Set = None,
    out: Out = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the sites' folders and logs in this new folder.")] = None,
    json: Json = False,
) -> None:
    """Run a method over real Flower processes on this machine, with TLS and authentication.

    A SuperLink and a SuperNode for each site are started with keys made for the occasion, and all of them are ended
    when the run is over, fails, or is interrupted. `fedc2i resume` goes on with a run that was cut off.
    """
    require_flower()
    from fedc2i.deploy.app_files import reject_local_imports
    from fedc2i.deploy.lead import Job
    from fedc2i.deploy.local_federation import set_up

    values = values_of(None, set_, data, data_dir, None, model, rounds, seeds, topology, None, None, None, None)
    reject_local_imports(method, values.get("model"))
    (plan,) = prepare([method], values)
    federation = plan.federation
    count = len(federation.clients) if sites is None else sites
    if not 1 <= count <= len(federation.clients):
        raise UserError(
            f"--sites must be 1..{len(federation.clients)}, the clients of '{federation.name}', got {count}"
        )
    if values.get("partition") is not None:
        raise UserError("partition: a site is one client of the data as it is")
    federation = federation.select(federation.names[:count])
    settings = {name: value for name, value in values.items() if name not in _OF_DATA}
    settings |= {"model": plan.config.model, "rounds": plan.config.rounds}
    prepare([method], settings, federation)  # a topology or share that does not fit so many sites
    policy = policy_of(deadline, min_sites, wire)
    if min_sites > count:
        raise UserError(f"--min-sites must be 1..{count}, the number of sites, got {min_sites}")
    if keep is not None and keep.exists():
        raise UserError(f"{keep}: exists already; choose another --keep or remove it")
    for line in federation.describe():
        say(line)
    folder = new_folder(out, f"{slug(plan.key)}-{slug(federation.name)}-flower")
    say(f"Writing to {folder}")
    job = Job(
        folder.absolute(), absolute(method), absolute_settings(settings), classes=federation.classes, policy=policy
    )
    with locked(folder):
        own_data_dir = None if plan.config.data_dir is None else Path(plan.config.data_dir)
        job = set_up(job, plan.config.data, federation.names, keep, own_data_dir, plan.config.image_size)
        _run_locally(job, folder)
    if keep is not None:
        say(f"The sites' folders and logs are kept in {keep}")
    finish(folder, json)


def _run_locally(job: Job, folder: Path) -> None:
    from fedc2i.deploy.local_federation import clear, run_locally

    try:
        run_locally(job, say)
    except BaseException:
        if not job.is_finished:
            say(f"`fedc2i resume {folder}` goes on from the last finished round")
        raise
    clear(job)


def is_local(folder: Path) -> bool:
    """Whether a run folder is of `fedc2i flower-local`."""
    try:
        return bool(read_json(folder / "job.json").get("local"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def go_on(folder: Path, json: bool) -> None:
    """Goes on with a run of `fedc2i flower-local` that was cut off, and shows it."""
    require_flower()
    from fedc2i.deploy.local_federation import clear, read_job

    with locked(folder):
        job = read_job(folder)
        if job.is_finished:
            say(f"{folder} is finished")
            clear(job)
        else:
            say(f"Going on with {folder}")
            _run_locally(job, folder)
    finish(folder, json)


def flower_app() -> None:
    """Print the folder of the Flower App, for `flwr run` on a Flower federation of your own."""
    require_flower()
    from fedc2i.deploy.superlink_run import APP

    print(APP)


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


def require_flower() -> None:
    """Refuses where the extra is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise UserError("this command needs Flower: pip install 'fedc2i[flower]'") from None


def settings_of(method: str, values: dict[str, Any]) -> dict[str, Any]:
    """Settings of a run over sites that have their own data, checked as far as that can be without the data.

    Raises:
        UserError: for a setting that is unknown, wrong, or says where data lies; for a file that needs others.
    """
    from fedc2i.deploy.app_files import reject_local_imports

    reject_local_imports(method, values.get("model"))
    for name in _OF_DATA:
        if values.get(name) is not None:
            raise UserError(f"{name} is each site's own affair: it stands in its site.toml")
    kind, name, own = parse(method)
    config = make(kind, {**values, **own, "method": name})
    kind(**config.options)
    return absolute_settings(values)


def folder_of(job: Job, out: Path | None, parent: Path) -> Path:
    """The folder of a job: the one given, one with the same run unfinished, or a new one.

    Raises:
        UserError: if the one given holds something else.
    """
    if out is not None:
        begun = replace(job, out=out.absolute()).is_begun
        return out.absolute() if begun else new_folder(out).absolute()
    for folder in sorted(parent.glob("*")):
        if replace(job, out=folder).is_begun:
            return folder
    stem, number = slug(Path(job.method).name), 1
    while (folder := parent / f"{stem}-{number:03d}").exists() and any(folder.iterdir()):
        number += 1
    return new_folder(folder)
