"""Making the coordinator's folder, renewing its certificate, and deciding who takes part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically, writing
from fedc2i.deploy import keys, tls
from fedc2i.deploy.addresses import check_bind, check_host, check_port
from fedc2i.deploy.folders import Coordinator
from fedc2i.deploy.secret_files import make_folder, read_secret, read_small, require_new, toml

PORT, BIND = 9092, "127.0.0.1"


def make_coordinator(folder: Path, hosts: Sequence[str], port: int = PORT, bind: str = BIND) -> Coordinator:
    """Makes the coordinator's folder with a fresh authority and a server certificate, all of it or nothing.

    Args:
        folder: new, or there and empty.
        hosts: the names and addresses by which sites reach it, at least one.
        port: where it listens.
        bind: the address it listens on; by default this machine alone can reach it.

    Raises:
        UserError: if the folder holds something, or an argument is not allowed.
    """
    require_new(folder)
    if not hosts:
        raise UserError("host: at least one name or address is needed by which sites reach the coordinator")
    place, names = folder.absolute(), tuple(dict.fromkeys(map(check_host, hosts)))
    own = Coordinator(place, names, check_port(port), check_bind(bind), place / "state", place / "logs")
    authority_key, authority = tls.new_authority(f"fedc2i authority of {names[0]}")
    key = keys.new_key()
    files = {
        "ca.key": keys.tls_private(authority_key),
        "ca.crt": authority,
        "server.key": keys.tls_private(key),
        "server.crt": tls.server_certificate(authority_key, authority, key.public_key(), own.names),
        "coordinator.toml": _settings(own),
    }
    make_folder(folder, files, ("sites", "state", "logs"))
    return own


def renew(own: Coordinator, hosts: Sequence[str] = (), days: int = tls.SERVER_DAYS) -> Coordinator:
    """Makes a new server certificate with the same key and the same authority: sites need not be asked.

    Args:
        own: the coordinator.
        hosts: other names than it had, if any.
        days: how long it is valid.

    Raises:
        UserError: if ``ca.key`` is not there or does not belong to ``ca.crt``, or the authority has expired.
    """
    if days < 1:
        raise UserError(f"days is {days}, must be at least 1")
    secret = own.folder / "ca.key"
    authority_key = keys.read_private(read_secret(secret), str(secret))
    key = keys.read_private(read_secret(own.key), str(own.key))
    renewed = replace(own, hosts=tuple(dict.fromkeys(map(check_host, hosts))) or own.hosts)
    authority = read_small(own.authority)
    certificate = tls.server_certificate(authority_key, authority, key.public_key(), renewed.names, days)
    if renewed != own:
        write_atomically(own.folder / "coordinator.toml", _settings(renewed))
    write_atomically(own.certificate, certificate)
    return renewed


def admitted(own: Coordinator) -> dict[str, str]:
    """The public key line of every admitted site, by name.

    Raises:
        UserError: for a file that is no site's key, or a key under two names.
    """
    found: dict[str, str] = {}
    for path in sorted(path for path in own.sites.glob("*") if not path.name.startswith(".")):
        if path.suffix != ".pub":
            raise UserError(f"{path}: not a NAME.pub file; `fedc2i coordinator admit` takes requests")
        name, public = keys.check_name(path.stem, str(path)), keys.read_public(read_small(path), str(path))
        if public in found.values():
            raise UserError(f"{path}: this key stands under another name as well; remove one of them")
        found[name] = public
    return found


def admit(
    own: Coordinator, request: keys.Request, *, replace_key: bool = False, fingerprint: str | None = None
) -> bool:
    """Lets a site take part from the next start on.

    Args:
        own: the coordinator.
        request: as `keys.read_request` returns it.
        replace_key: whether a site that is known may get another key.
        fingerprint: what the key's must be, if the site told it by another way.

    Returns:
        Whether anything changed; False if this site was admitted with this key already.

    Raises:
        UserError: if the name has another key, the key another name or another fingerprint.
    """
    if fingerprint is not None and fingerprint.strip() != keys.fingerprint(request.public):
        raise UserError(
            f"{request.name}: the key in the request is not the one with {fingerprint[:99]!a}; not admitted"
        )
    known = admitted(own)
    if known.get(request.name) == request.public:
        return False
    for name, public in known.items():
        if public == request.public:
            raise UserError(f"{request.name}: this key is admitted already, as '{name}'; every site needs its own")
        if name.lower() == request.name.lower() and (name != request.name or not replace_key):
            advice = "--replace takes the new key" if name == request.name else "names must differ by more than case"
            raise UserError(
                f"{request.name}: '{name}' is admitted with another key, {keys.fingerprint(public)}; {advice}"
            )
    write_atomically(own.sites / f"{request.name}.pub", f"{request.public} {request.name}\n".encode())
    return True


def remove(own: Coordinator, name: str) -> None:
    """Lets a site take part no longer, from the next start on.

    Raises:
        UserError: if no such site is admitted.
    """
    path = own.sites / f"{keys.check_name(name)}.pub"
    if not path.is_file():
        raise UserError(f"no site '{name}' is admitted; `fedc2i coordinator sites` lists them")
    with writing(path):
        path.unlink()


def _settings(own: Coordinator) -> bytes:
    inside = {
        name: str(path.relative_to(own.folder) if path.is_relative_to(own.folder) else path)
        for name, path in (("state", own.state), ("logs", own.logs))
    }
    values = {"hosts": list(own.hosts), "port": own.port, "bind": own.bind}
    return toml("The coordinator of a federation.", values | inside)
