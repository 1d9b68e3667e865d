"""``fedc2i coordinator``: the one machine of a real federation that all sites connect to."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedc2i.cli import site_runs
from fedc2i.cli.coordinator_contribution import LEAST_SITES, contribution
from fedc2i.cli.shared import Json, Set, say, setting_flags, values_of
from fedc2i.cli.site_runs import MethodName
from fedc2i.core.errors import UserError
from fedc2i.core.files import writing

# What needs the extra `flower` is imported inside the commands, so that all others work without it.

app = typer.Typer(
    help="Coordinate a federation: its certificates, and who takes part.", no_args_is_help=True, add_completion=False
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The coordinator's folder.", show_default=False)]


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    host: Annotated[
        list[str], typer.Option(help="A name or address by which sites reach it; may be repeated.", show_default=False)
    ],
    port: Annotated[int, typer.Option(help="Where it listens.")] = 9092,
    bind: Annotated[str, typer.Option(help="The address it listens on; by default only this machine's.")] = "127.0.0.1",
) -> None:
    """Make the coordinator's folder: its settings, its own authority, and a server certificate."""
    from fedc2i.deploy.coordinator_folder import make_coordinator

    made = make_coordinator(folder, host, port, bind)
    _print_certificates(made.folder)
    typer.echo(f"Send {made.authority} to every site, and tell them its SHA-256 by another way.")
    typer.echo(f"Admit a site with `fedc2i coordinator admit {folder} NAME.csr`.")
    if made.bind == "127.0.0.1":
        typer.echo("It will listen on 127.0.0.1, for this machine alone. For others, write an address of this machine")
        typer.echo(f"as bind into {folder / 'coordinator.toml'}, then `fedc2i coordinator renew {folder}`.")


@app.command()
def admit(
    folder: Folder,
    request: Annotated[Path, typer.Argument(metavar="NAME.csr", help="What the site sent.", show_default=False)],
    replace: Annotated[bool, typer.Option("--replace", help="Take a known site's new key for its old one.")] = False,
    fingerprint: Annotated[
        str | None, typer.Option(help="Admit only a key with this SHA-256, as the site told it.", show_default=False)
    ] = None,
) -> None:
    """Let a site take part, after showing whose key it is."""
    from fedc2i.deploy import coordinator_folder, keys

    own = coordinator_folder.read_coordinator(folder, ready=False)
    asked = keys.read_request(request)
    typer.echo(f"{asked.name}: {keys.fingerprint(asked.public)}")
    changed = coordinator_folder.admit(own, asked, replace_key=replace, fingerprint=fingerprint)
    typer.echo(f"{asked.name} is admitted." if changed else f"{asked.name} was admitted with this key already.")


@app.command()
def sites(folder: Folder) -> None:
    """List the admitted sites and their keys."""
    from fedc2i.deploy.coordinator_folder import admitted, read_coordinator
    from fedc2i.deploy.keys import fingerprint

    found = admitted(read_coordinator(folder, ready=False))
    if not found:
        typer.echo("No site is admitted yet.")
        return
    table = Table("site", "key", box=None)
    for name, public in found.items():
        table.add_row(name, fingerprint(public))
    Console(soft_wrap=True).print(table)


@app.command()
def remove(folder: Folder, name: Annotated[str, typer.Argument(help="The site's name.", show_default=False)]) -> None:
    """Let a site take part no longer."""
    from fedc2i.deploy import coordinator_folder

    coordinator_folder.remove(coordinator_folder.read_coordinator(folder, ready=False), name)
    typer.echo(f"{name} is removed, from the coordinator's next start on.")


@app.command()
def renew(
    folder: Folder,
    host: Annotated[list[str] | None, typer.Option(help="Other names than it has; may be repeated.")] = None,
    days: Annotated[int, typer.Option(help="How long it will be valid.")] = 397,
) -> None:
    """Make a new server certificate; the authority and the sites stay as they are."""
    from fedc2i.deploy.coordinator_folder import read_coordinator, renew

    made = renew(read_coordinator(folder, ready=False), host or (), days)
    _print_certificates(made.folder)
    typer.echo("Start the coordinator again to use it.")


@app.command()
def rotate(
    folder: Folder,
    confirm: Annotated[
        bool, typer.Option("--confirm", help="Use the next authority, once all sites trust it.")
    ] = False,
) -> None:
    """Change the authority, in two steps: make the next one, and use it when all sites have the new ca.crt."""
    from fedc2i.deploy import coordinator_folder

    own = coordinator_folder.read_coordinator(folder, ready=False)
    if confirm:
        coordinator_folder.confirm(own)
    else:
        coordinator_folder.rotate(own)
    _print_certificates(own.folder)
    if confirm:
        typer.echo("Start the coordinator again to use it; sites keep the ca.crt that they have.")
        return
    typer.echo(f"Send {own.authority}, which holds both, to every site, and tell them the new SHA-256 by another way;")
    typer.echo(f"when all have it and were started again: `fedc2i coordinator rotate {folder} --confirm`.")


def _print_certificates(folder: Path) -> None:
    from fedc2i.deploy import tls

    shown = [("ca.crt", one) for one in tls.read_authorities(folder / "ca.crt")]
    for name, one in [*shown, ("server.crt", tls.read_certificate(folder / "server.crt"))]:
        for line in tls.describe(one):
            typer.echo(f"{name}: {line}")


@app.command()
@setting_flags("coordinator")
def start(
    folder: Folder,
    settings: dict[str, str],
    method: MethodName = "fedc2i",
    classes: Annotated[str | None, typer.Option(help="The classes, e.g. cat,dog; by default the sites'.")] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the sites at the start.")] = 300.0,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder; by default one under DIR/runs, an unfinished one again.")
    ] = None,
    status: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve /healthz and Prometheus' /metrics there, e.g. 127.0.0.1:9093.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Start the coordinator, run a method over the admitted sites, and stop.

    The same command resumes an interrupted run after its last finished round.
    """
    site_runs.require_flower()
    from fedc2i.deploy.coordinator_folder import admitted, read_coordinator
    from fedc2i.deploy.job import Job, split_policy
    from fedc2i.deploy.run_counters import FILE
    from fedc2i.deploy.status_server import status_server
    from fedc2i.deploy.superlink import open_superlink, run_on

    own = read_coordinator(folder)
    keys = admitted(own)
    policy, values = split_policy(values_of(settings, set_), min_sites=LEAST_SITES)
    if len(keys) < policy.min_sites:
        raise UserError(f"{len(keys)} of at least {policy.min_sites} sites (--min-sites) are admitted")
    policy.check(len(keys))
    job = Job(
        Path(),
        site_runs.absolute(method),
        site_runs.settings_of(method, values, policy),
        tuple(keys),
        keys=keys,
        classes=tuple(filter(None, (classes or "").split(","))),
        wait=wait,
        policy=policy,
    )
    job = replace(job, out=site_runs.folder_of(job, out, own.folder / "runs"))
    with writing(job.out):
        job.out.chmod(0o700)  # checkpoints hold the sites' models
    say(f"Writing to {job.out}")
    link = open_superlink(own)
    try:
        say(f"listening on {own.bind}:{own.port}")
        with nullcontext() if status is None else status_server(status, [job.out / FILE, link.refused], link.is_alive):
            run_on(link, job, say)
    finally:
        link.stop()
    site_runs.show_run(job.out, json)


app.command()(contribution)
