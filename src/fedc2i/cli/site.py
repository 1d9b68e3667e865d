"""``fedc2i site``: one site of a real federation, on the machine where its data lies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from fedc2i.cli.shared import Json, setting_flags
from fedc2i.cli.site_runs import require_flower
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import to_json

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
    data = settings.pop("data")
    made, federation = site_folder.make_site(
        folder, name, data, coordinator, client=client, authority=ca, check=check, policy=None, **settings
    )
    for line in federation.describe() if federation else ["The data was not looked at."]:
        typer.echo(line)
    typer.echo(f"key of {name}: {made.fingerprint}")
    typer.echo(f"Send {made.request} to the coordinator, and tell them the key's SHA-256 by another way.")
    if ca is None:
        typer.echo(f"Put the coordinator's ca.crt into {made.folder}; compare its SHA-256 with what they told you.")
        return
    for authority in tls.read_authorities(ca):
        for line in tls.describe(authority):
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
    from fedc2i.deploy import sandbox
    from fedc2i.deploy.audit import AuditLog, spent
    from fedc2i.deploy.site_folder import read_site
    from fedc2i.deploy.supernode import SuperNode, keep_running, report

    site = read_site(folder)
    sandbox.require_out_of_reach(site.key)
    entries = AuditLog(folder).entries()
    site.load()  # what is wrong with the data should be seen now, not in the first round
    report(f"{site.name}: {sandbox.describe()}")
    report(f"{site.name}: audit.log has {len(entries)} lines, unbroken; since the last renewal: {spent(entries)}")
    with site.locked():
        keep_running(SuperNode(site))


@app.command()
def pending(folder: Folder) -> None:
    """Show the method and model files that wait for approval, with their source."""
    from fedc2i.core.errors import printable
    from fedc2i.deploy.approval import CodeStore
    from fedc2i.deploy.sandbox import missing
    from fedc2i.deploy.site_folder import read_site

    read_site(folder, ready=False)
    store = CodeStore(folder)
    for entry in store.approved():
        typer.echo(f"approved: {entry.hash} {entry.name}, {entry.decided}")
    for entry in store.pending():
        source = store.source(entry)
        typer.echo(f"pending: {entry.hash} {entry.name}, {len(source):,} bytes, received {entry.received}")
        typer.echo(f"  from: {entry.sender}")
        typer.echo(f"  imports: {', '.join(entry.imports(source)) or 'nothing'}")
        typer.echo("  may see: all training, validation and test data of this site, and the models of its own run")
        typer.echo("  may send: what its method uploads, up to largest_upload of the policy, and scores")
        if lacks := missing():
            typer.echo(f"  may touch: all that this account may; no sandbox here, which needs {', '.join(lacks)}")
        else:
            typer.echo("  may touch: state/RUN of its own run; no other file of the site, no network, no other program")
        for line in source.decode("utf-8", errors="replace").splitlines():
            typer.echo(f"  | {printable(line)}")
    if not store.pending():
        typer.echo("Nothing waits for approval.")


Hash = Annotated[str, typer.Argument(metavar="HASH", help="At least 12 digits of a file's SHA-256.")]


@app.command()
def approve(folder: Folder, hash: Hash) -> None:
    """Let a pending file's code run at this site from now on; read it first."""
    _decide(folder, hash, "approved")


@app.command()
def revoke(folder: Folder, hash: Hash) -> None:
    """Take back an approval, or drop a pending file."""
    _decide(folder, hash, "revoked")


def _decide(folder: Path, hash: str, event: str) -> None:
    from fedc2i.deploy.approval import CodeStore
    from fedc2i.deploy.audit import AuditLog, account
    from fedc2i.deploy.site_folder import read_site

    read_site(folder, ready=False)
    store, log = CodeStore(folder), AuditLog(folder)
    log.entries()  # nothing is decided that cannot be logged
    entry = store.approve(hash, account()) if event == "approved" else store.revoke(hash)
    log.append(event, code={entry.name: entry.hash}, by=account())
    typer.echo(f"{event}: {entry.hash} {entry.name}")


@app.command()
def renew(folder: Folder) -> None:
    """Let the policy's runs and total ε start again from zero; what was spent so far is printed."""
    from fedc2i.deploy.audit import RENEWED, AuditLog, account, spent
    from fedc2i.deploy.site_folder import read_site

    read_site(folder, ready=False)
    log = AuditLog(folder)
    before = spent(log.entries())
    log.append(RENEWED, by=account())
    typer.echo(f"renewed; since the last time: {before}")


@app.command()
def audit(folder: Folder, json: Json = False) -> None:
    """Verify the site's log, and show what the site was asked and what left it."""
    from fedc2i.deploy.audit import AuditLog, spent
    from fedc2i.deploy.site_folder import read_site

    read_site(folder, ready=False)
    entries = AuditLog(folder).entries()
    if json:
        typer.echo(to_json(entries), nl=False)
        return
    for entry in entries:
        typer.echo(_line(entry))
    typer.echo(f"{len(entries)} lines, unbroken; since the last renewal: {spent(entries)}")


def _line(entry: Mapping[str, Any]) -> str:
    """A line of the log for people; `--json` has all of it."""
    words = [f"{entry['line']:>5}", str(entry["time"]), str(entry["event"])]
    if "run" in entry:
        words.append(f"{entry['run']} round {entry['round']}, {entry['method']}")
    if entry.get("outcome", "sent") != "sent":
        words.append(f"refused: {entry['outcome']}")
    elif "sum" in entry:
        words.append(f"{entry['total']:,} bytes of shares that unmask the sum of {len(entry['sum'])} sites")
    elif "total" in entry:
        spent = "no ε (uploads without noise)" if entry["epsilon"] is None else f"ε so far {entry['epsilon']:.4g}"
        words.append(
            f"{entry['total'] / 1e6:.3f} MB in {len(entry['bytes'])} tensors{', masked' if 'stage' in entry else ''}, "
            f"{len(entry['scores'])} scores, {spent}"
        )
    elif "by" in entry:
        words.append(
            " ".join([*(f"{name} {own[:16]}" for name, own in entry.get("code", {}).items()), "by", entry["by"]])
        )
    return one_line("  ".join(words), 400)
