"""``fedc2i site``: one site of a real federation, on the machine where its data lies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedc2i.cli.shared import setting_flags
from fedc2i.cli.site_runs import require_flower
from fedc2i.core.errors import UserError

# What needs the extra `flower` is imported inside the commands, so that all others work without it.

app = typer.Typer(
    help="Take part in a federation: this machine's data, key and settings.", no_args_is_help=True, add_completion=False
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The site's folder.", show_default=False)]


@app.command()
@setting_flags("site")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)],
    name: Annotated[str, typer.Option(help="The site's name in the federation.", show_default=False)],
    settings: dict[str, str],
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where it is.", show_default=False)],
    ca: Annotated[Path | None, typer.Option(help="The coordinator's ca.crt, if it is here already.")] = None,
    client: Annotated[
        str | None, typer.Option(help="Which client of the data this site is, if it has several.")
    ] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Load the data now, to see that it can be.")] = True,
) -> None:
    """Make a site's folder: its settings, a fresh key, and the request to be admitted."""
    from fedc2i.deploy import site_folder, tls

    if "data" not in settings:
        raise UserError("name the site's data with --data, such as folder:DIR, table:FILE.csv or arrays:DIR")
    made, federation = site_folder.make_site(
        folder, name, coordinator=coordinator, client=client, authority=ca, check=check, **settings
    )
    for line in federation.describe() if federation else ["The data was not looked at."]:
        typer.echo(line)
    typer.echo(f"key of {name}: {made.fingerprint}")
    typer.echo(f"Send {made.request} to the coordinator, and tell them the key's SHA-256 by another way.")
    if ca is None:
        typer.echo(f"Put the coordinator's ca.crt into {made.folder}; compare its SHA-256 with what they told you.")
        return
    for line in tls.describe(tls.read_certificate(ca)):
        typer.echo(f"ca.crt: {line}")
    typer.echo("Compare this SHA-256 with what the coordinator told you by another way.")


@app.command()
def rotate(
    folder: Folder,
    confirm: Annotated[bool, typer.Option("--confirm", help="Use the new key, once it is admitted.")] = False,
) -> None:
    """Change the site's key, in two steps: make the next one, and use it when the coordinator has admitted it."""
    from fedc2i.deploy import site_folder
    from fedc2i.deploy.site_folder import read_site

    own = read_site(folder, ready=False)
    if confirm:
        site_folder.confirm(own)
        typer.echo(f"key of {own.name}: {own.fingerprint}; start the site again to use it.")
        return
    following = site_folder.rotate(own)
    typer.echo(f"next key of {own.name}: {following.fingerprint}; the present one stays in use.")
    typer.echo(f"Send {following.request} to the coordinator, who admits it with --replace;")
    typer.echo(f"then `fedc2i site rotate {folder} --confirm`, and start the site again.")


@app.command()
def start(folder: Folder) -> None:
    """Take part until Ctrl-C or SIGTERM; comes back by itself when the line or the coordinator was gone."""
    require_flower()
    from fedc2i.deploy.site_folder import read_site
    from fedc2i.deploy.supernode import SuperNode, keep_running

    site = read_site(folder)
    site.load()  # what is wrong with the data should be seen now, not in the first round
    with site.locked():
        keep_running(SuperNode(site))
