"""``fedc2i coordinator contribution``: who helps whom among real sites, by runs over coalitions of them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedc2i.cli import shared, site_runs
from fedc2i.cli.shared import Json, Set, say
from fedc2i.cli.site_runs import MethodName
from fedc2i.core.errors import UserError
from fedc2i.core.files import locked, refuse_links, to_json, writing

LEAST_SITES = 2  # that a round needs by default, and a coalition


@shared.setting_flags("coordinator")
def contribution(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.", show_default=False)],
    settings: dict[str, str],
    method: MethodName = "fedc2i",
    sites: Annotated[
        str | None, typer.Option(help="Names, e.g. north,south; by default all that agree.", show_default=False)
    ] = None,
    runs: Annotated[int, typer.Option(help="Beyond six sites: coalitions to run at most.")] = 400,
    classes: Annotated[str | None, typer.Option(help="The classes, e.g. cat,dog; by default the sites'.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the sites at the start of a run.")] = 300.0,
    set_: Set = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of the result; by default one under DIR/runs.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start without asking.")] = False,
    json: Json = False,
) -> None:
    """Measure which site helps which, by runs over coalitions of the sites that agreed.

    A site agrees by `contribution = true` in its policy. Only scores that sites report anyway are read. The command
    first says what it will cost, and asks. Interrupted or repeated, it runs only what is missing.
    """
    site_runs.require_flower()
    from fedc2i.deploy.coordinator_folder import admitted, read_coordinator
    from fedc2i.deploy.job import Job, split_policy
    from fedc2i.deploy.site_coalitions import SiteCoalitions, require_measurable
    from fedc2i.deploy.superlink import open_superlink, run_on
    from fedc2i.report.contribution_report import print_contribution
    from fedc2i.runs.folder import slug

    if runs < 1:
        raise UserError(f"runs must be at least 1, got {runs}")
    own = read_coordinator(folder)
    keys = admitted(own)
    wanted = tuple(filter(None, (sites or "").split(","))) or tuple(keys)
    if unknown := [name for name in wanted if name not in keys]:
        raise UserError(f"no site '{unknown[0]}' is admitted, allowed are {', '.join(keys)}")
    if len(wanted) < LEAST_SITES:
        raise UserError(f"{len(wanted)} of at least {LEAST_SITES} sites are admitted")
    policy, values = split_policy(shared.values_of(settings, set_), min_sites=LEAST_SITES)
    job = Job(
        (out or own.folder / "runs" / f"contribution-{slug(Path(method).name)}").absolute(),
        site_runs.absolute(method),
        site_runs.settings_of(method, values, policy),
        wanted,
        keys=keys,
        classes=tuple(filter(None, (classes or "").split(","))),
        wait=wait,
        policy=policy,
    )
    require_measurable(job)
    with writing(job.out):
        job.out.mkdir(parents=True, exist_ok=True)
        job.out.chmod(0o700)  # checkpoints hold the sites' models
    with locked(job.out):
        refuse_links(job.out)
        say(f"Writing to {job.out}")
        link = open_superlink(own)
        try:
            game = SiteCoalitions.survey(job, lambda one: run_on(link, one, say), say)
            lines = game.cost(runs)
            for line in lines:
                say(line)
            if lines and not yes and not _is_confirmed():
                say("nothing was run; the same command with --yes starts without asking")
                return
            found = game.measure(runs)
        finally:
            link.stop()
    if json:
        print(to_json(found.to_json()), end="")
        return
    print_contribution(shared.console_for(), found)
    print(f"Written to {job.out}/contribution.json and contribution.csv")
    print(f"`fedc2i report {game.everyone}` shows it")


def _is_confirmed() -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody is there to answer; --yes starts without asking")
    return typer.confirm("Start?", err=True)
