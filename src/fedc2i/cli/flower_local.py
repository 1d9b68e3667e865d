"""``fedc2i flower-local``: real Flower processes on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedc2i.cli import site_runs
from fedc2i.cli.shared import Json, Out, Set, say, setting_flags, short_name, values_of
from fedc2i.cli.site_runs import MethodName
from fedc2i.core.errors import UserError
from fedc2i.core.files import locked, read_json, refuse_links
from fedc2i.core.options import names
from fedc2i.runs.settings import RunSettings

if TYPE_CHECKING:
    from fedc2i.deploy.job import Job

app = typer.Typer(add_completion=False)


@app.command()
@setting_flags("flower-local")
def flower_local(
    settings: dict[str, str],
    method: MethodName = "fedc2i",
    sites: Annotated[int | None, typer.Option(help="How many; the data's first clients. By default all.")] = None,
    set_: Set = None,
    out: Out = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the sites' folders and logs in this new folder.")] = None,
    json: Json = False,
) -> None:
    """Run a method over real Flower processes on this machine, with TLS and authentication.

    A SuperLink and a SuperNode for each site are started with temporary keys, and all of them are ended when the run
    is over, fails, or is interrupted. `fedc2i resume` resumes an interrupted run.
    """
    site_runs.require_flower()
    from fedc2i.deploy import site_folder
    from fedc2i.deploy.job import Job, split_policy
    from fedc2i.deploy.local_federation import set_up
    from fedc2i.deploy.run_description import reject_local_imports
    from fedc2i.runs.folder import new_folder, slug
    from fedc2i.runs.plan import prepare

    policy, values = split_policy(values_of(settings, set_))
    reject_local_imports(method, values.get("model"))
    if values.get("partition") is not None:
        raise UserError("partition: a site is one client of the data, which is not split further")
    site_folder.refuse_federated_scale(str(values.get("scale")))
    (plan,) = prepare([method], {**values, "engine": "flower"})
    federation = plan.federation
    count = len(federation.clients) if sites is None else sites
    if not 1 <= count <= len(federation.clients):
        raise UserError(
            f"--sites must be 1..{len(federation.clients)}, the clients of '{federation.name}', got {count}"
        )
    federation = federation.select(federation.names[:count])
    source = {name: getattr(plan.config, name) for name in site_folder.DATA}
    preset = {name: getattr(plan.config, name) for name in names(RunSettings, preset=True)}
    sent = site_runs.without_data(values) | preset
    # Refuses a topology or share that is wrong for this number of sites, and settings of another engine.
    prepare([method], {**sent, **policy.settings()}, federation)
    if policy.min_sites > count:
        raise UserError(f"--min-sites must be 1..{count}, the number of sites, got {policy.min_sites}")
    policy.check(plan.config.participants(count))
    if keep is not None and keep.exists():
        raise UserError(f"{keep}: exists already; choose another --keep or remove it")
    for line in federation.describe():
        say(line)
    folder = new_folder(out, f"{slug(plan.key)}-{short_name(plan.config.data)}-flower")
    say(f"Writing to {folder}")
    job = Job(
        folder.absolute(),
        site_runs.absolute(method),
        site_runs.absolute_settings(sent),
        classes=federation.classes,
        policy=policy,
    )
    with locked(folder):
        job = set_up(job, source.pop("data"), federation.names, keep, source)
        _run_locally(job, folder)
    site_runs.show_run(folder, json)
    if keep is None:
        say("The models were the sites' and are removed with them; --keep DIR keeps both, for predict and export")
    else:
        say(f"The sites' folders and logs are kept in {keep}, the models in {keep}/sites/SITE/state/RUN")


def _run_locally(job: Job, folder: Path) -> None:
    from fedc2i.deploy.local_federation import clear, run_locally

    try:
        run_locally(job, say)
    except BaseException:
        if not job.is_finished:
            say(f"`fedc2i resume {folder}` resumes after the last finished round")
        raise
    clear(job)


def is_local(folder: Path) -> bool:
    """Whether a run folder is of `fedc2i flower-local`."""
    try:
        return bool(read_json(folder / "job.json").get("local"))
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def resume_local(folder: Path, json: bool, trust: bool = False) -> None:
    """Resumes an interrupted run of `fedc2i flower-local`, and shows it."""
    site_runs.require_flower()
    from fedc2i.deploy.local_federation import clear, read_job

    with locked(folder):
        refuse_links(folder)
        job = read_job(folder, trust)
        if job.is_finished:
            say(f"{folder} is finished")
            clear(job)
        else:
            say(f"Resuming {folder}")
            _run_locally(job, folder)
    site_runs.show_run(folder, json)
