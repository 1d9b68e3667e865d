"""The coordinator's folder: its settings, its certificates, and which sites are admitted.

coordinator.toml                 its host names, its port, and the address it listens on
ca.key, ca.crt                   the key and certificate of its authority
next-ca.key                      the key of the next authority, while ca.crt holds both (see `rotate`)
server.key, server.crt           the key and certificate that it shows to the sites
sites/NAME.pub                   one public key for each admitted site
state/, logs/                    written by the running processes
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically, writing
from fedc2i.deploy import keys, tls
from fedc2i.deploy.folder_settings import (
    LOOPBACK,
    check_bind,
    check_host,
    check_port,
    make_folder,
    read_settings,
    require_new,
    to_toml,
)

PORT = 9092
NEXT_KEY = "next-ca.key"
SETTINGS = {"hosts": list, "port": int, "bind": str}


@dataclass(frozen=True)
class CoordinatorFolder:
    """The coordinator's folder and its settings; all paths are absolute."""

    folder: Path
    hosts: tuple[str, ...]
    port: int
    bind: str

    @property
    def authority(self) -> Path:
        """For ``flower-superlink --ssl-ca-certfile``."""
        return self.folder / "ca.crt"

    @property
    def sites(self) -> Path:
        """Where the keys of the admitted sites lie."""
        return self.folder / "sites"

    @property
    def names(self) -> tuple[str, ...]:
        """What its certificate must be valid for: its hosts, and the address that its own processes call."""
        own = () if ipaddress.ip_address(self.bind).is_unspecified else (self.bind,)
        return tuple(dict.fromkeys((*self.hosts, *own)))


def read_coordinator(folder: Path, *, ready: bool = True) -> CoordinatorFolder:
    """Reads a folder made by `make_coordinator`.

    ``ready`` also rejects what would keep it from starting: a key that others can read, a certificate that sites would
    not accept. ``ca.key`` is not needed for that, and may lie elsewhere until the next renewal.
    """
    path = folder / "coordinator.toml"
    found = read_settings(path, SETTINGS)
    if not found["hosts"]:
        raise UserError(f"{path}: 'hosts' must have at least one entry")
    hosts = tuple(check_host(str(host), str(path)) for host in found["hosts"])
    port, bind = check_port(found["port"], str(path)), check_bind(found["bind"], str(path))
    own = CoordinatorFolder(folder.absolute(), hosts, port, bind)
    if ready:
        authorities = tls.read_authorities(own.authority)
        certificate = tls.read_certificate(own.folder / "server.crt")
        if (secret := own.folder / "ca.key").exists():
            keys.read_private(secret)
        tls.check_server(authorities, certificate, keys.read_private(own.folder / "server.key"), own.names)
    return own


def make_coordinator(folder: Path, hosts: Sequence[str], port: int = PORT, bind: str = LOOPBACK) -> CoordinatorFolder:
    """Makes the coordinator's folder with a new authority and a server certificate. If it fails, it leaves nothing.

    Sites reach it by the names and addresses in ``hosts``; it listens on the address ``bind``.
    """
    require_new(folder)
    names = tuple(dict.fromkeys(map(check_host, hosts)))
    own = CoordinatorFolder(folder.absolute(), names, check_port(port), check_bind(bind))
    authority_key, authority = tls.new_authority(f"fedc2i authority of {names[0]}")
    key = keys.new_key()
    files = {
        "ca.key": keys.to_private(authority_key, "PKCS8"),
        "ca.crt": tls.to_pem(authority),
        "server.key": keys.to_private(key, "PKCS8"),
        "server.crt": tls.to_pem(tls.server_certificate(authority_key, authority, key.public_key(), own.names)),
        "coordinator.toml": _settings(own),
    }
    make_folder(folder, files, ("sites", "state", "logs"))
    return own


def renew(own: CoordinatorFolder, hosts: Sequence[str] = (), days: int = tls.SERVER_DAYS) -> CoordinatorFolder:
    """Makes a new server certificate with the same key and authority, so that sites need no new file."""
    if days < 1:
        raise UserError(f"days is {days}, must be at least 1")
    authority_key, key = (keys.read_private(own.folder / name) for name in ("ca.key", "server.key"))
    renewed = replace(own, hosts=tuple(dict.fromkeys(map(check_host, hosts))) or own.hosts)
    authority = tls.authority_of(authority_key, tls.read_authorities(own.authority))
    certificate = tls.server_certificate(authority_key, authority, key.public_key(), renewed.names, days)
    if renewed != own:
        write_atomically(own.folder / "coordinator.toml", _settings(renewed))
    write_atomically(own.folder / "server.crt", tls.to_pem(certificate))
    return renewed


def rotate(own: CoordinatorFolder) -> None:
    """Makes the next authority: ``ca.crt`` then holds both, and the present one stays in use until `confirm`.

    Raises a `UserError` if there is a next one already, since its certificate may have been sent.
    """
    following = own.folder / NEXT_KEY
    authorities = tls.read_authorities(own.authority)
    if following.exists() or len(authorities) > 1:
        raise UserError(
            f"{own.authority}: holds the next authority already; send it to all sites, and then "
            "`fedc2i coordinator rotate --confirm`"
        )
    key, authority = tls.new_authority(f"fedc2i authority of {own.hosts[0]}")
    write_atomically(following, keys.to_private(key, "PKCS8"), mode=0o600)
    write_atomically(own.authority, tls.to_pem(authorities[0]) + tls.to_pem(authority))


def confirm(own: CoordinatorFolder) -> None:
    """Signs the server certificate by the next authority, and drops the present one; safe to repeat.

    Sites that have the ``ca.crt`` of `rotate` trust both, so they need no other file.
    """
    following, secret = own.folder / NEXT_KEY, own.folder / "ca.key"
    authorities = tls.read_authorities(own.authority)
    if not following.exists() and len(authorities) == 1:
        raise UserError(f"{own.folder}: no next authority waits there; `fedc2i coordinator rotate` makes one")
    key = keys.read_private(following if following.exists() else secret)
    authority = tls.authority_of(key, authorities)
    server = keys.read_private(own.folder / "server.key").public_key()
    write_atomically(own.folder / "server.crt", tls.to_pem(tls.server_certificate(key, authority, server, own.names)))
    with writing(secret):
        if following.exists():
            following.replace(secret)
    write_atomically(own.authority, tls.to_pem(authority))


def admitted(own: CoordinatorFolder) -> dict[str, str]:
    """The public key line of every admitted site, by name."""
    found: dict[str, str] = {}
    for path in sorted(path for path in own.sites.glob("*") if not path.name.startswith(".")):
        if path.suffix != ".pub":
            raise UserError(f"{path}: not a NAME.pub file; `fedc2i coordinator admit` takes requests")
        name, public = keys.check_name(path.stem, str(path)), keys.read_public(path)
        if public in found.values():
            raise UserError(f"{path}: this key stands under another name as well; remove one of them")
        found[name] = public
    return found


def admit(
    own: CoordinatorFolder, request: keys.Request, *, replace_key: bool = False, fingerprint: str | None = None
) -> bool:
    """Admits a site, from the next start on; returns whether anything changed.

    Raises a `UserError` if the name has another key, unless ``replace_key`` allows that, or the key has another name or
    another fingerprint than the one that the site gave in another way.
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


def remove(own: CoordinatorFolder, name: str) -> None:
    """Ends a site's admission, from the next start on."""
    path = own.sites / f"{keys.check_name(name)}.pub"
    if not path.is_file():
        raise UserError(f"no site '{name}' is admitted; `fedc2i coordinator sites` lists them")
    with writing(path):
        path.unlink()


def _settings(own: CoordinatorFolder) -> bytes:
    return to_toml("The coordinator of a federation.", {name: getattr(own, name) for name in SETTINGS})
