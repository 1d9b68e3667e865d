"""The folders of a real federation: what lies in them, read and checked.

A site's::

    site.toml                        its name, its data, and where the coordinator is
    site.key, site.pub, NAME.csr     its key (mode 0600), the public half, and the request to be admitted
    ca.crt                           the coordinator's authority: whom the site trusts
    next/                            the same of a key that waits for the coordinator, see `site_folder.rotate`

The coordinator's::

    coordinator.toml                 its host names, its port, and the address it listens on
    ca.key, ca.crt                   its authority
    server.key, server.crt           what it shows to the sites
    sites/NAME.pub                   one file for each site that is admitted

Both have ``state/`` and ``logs/`` besides, which the running processes fill.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError
from fedc2i.data import sources
from fedc2i.data.federation import Federation
from fedc2i.deploy import keys, tls
from fedc2i.deploy.addresses import check_bind, check_host, check_port, parse_address
from fedc2i.deploy.secret_files import read_secret, read_small
from fedc2i.runs.settings import read_toml

SITE: Mapping[str, type] = {
    **dict.fromkeys(("name", "data", "coordinator", "client", "data_dir", "state", "logs"), str),
    "image_size": int,
}
COORDINATOR: Mapping[str, type] = {"hosts": list, "port": int, "bind": str, "state": str, "logs": str}
_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", list: "a list of texts"}


@dataclass(frozen=True)
class Site:
    """A site's folder; all paths are absolute."""

    folder: Path
    name: str
    data: str
    coordinator: str
    data_dir: Path | None
    client: str | None
    image_size: int | None
    state: Path
    logs: Path

    @property
    def key(self) -> Path:
        """For ``flower-supernode --auth-supernode-private-key``."""
        return self.folder / "site.key"

    @property
    def request(self) -> Path:
        """What the coordinator needs to admit the site."""
        return self.folder / f"{self.name}.csr"

    @property
    def authority(self) -> Path:
        """For ``flower-supernode --root-certificates``."""
        return self.folder / "ca.crt"

    def load(self) -> Federation:
        """The site's data, as a federation of one client that has the site's name.

        Raises:
            UserError: if it cannot be read, or holds several clients and the site does not say which is its own.
        """
        found = sources.load(self.data, data_dir=self.data_dir, image_size=self.image_size)
        if self.client is None and len(found.clients) > 1:
            raise UserError(f"{found.name}: several clients, this site's must be named: {', '.join(found.names)}")
        (own,) = found.select([self.client or found.names[0]]).clients
        return replace(found, clients=(replace(own, name=self.name),), averages={})


@dataclass(frozen=True)
class Coordinator:
    """The coordinator's folder; all paths are absolute."""

    folder: Path
    hosts: tuple[str, ...]
    port: int
    bind: str
    state: Path
    logs: Path

    @property
    def authority(self) -> Path:
        """For ``flower-superlink --ssl-ca-certfile``."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """For ``flower-superlink --ssl-certfile``."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """For ``flower-superlink --ssl-keyfile``."""
        return self.folder / "server.key"

    @property
    def sites(self) -> Path:
        """Where the keys of the admitted sites lie."""
        return self.folder / "sites"

    @property
    def names(self) -> tuple[str, ...]:
        """What its certificate must be valid for: its hosts, and the address on which its own processes call it."""
        own = () if ipaddress.ip_address(self.bind).is_unspecified else (self.bind,)
        return tuple(dict.fromkeys((*self.hosts, *own)))


def read_site(folder: Path, *, ready: bool = True) -> Site:
    """A site's folder.

    Args:
        folder: as `fedc2i.deploy.site_folder.make_site` made it.
        ready: also refuse what would keep it from starting: a key that others can read, a missing ``ca.crt``.

    Raises:
        UserError: for a file that is missing, damaged or open to others, an unknown setting or a wrong one.
    """
    path = folder / "site.toml"
    found = {**dict.fromkeys(SITE), **_settings(path, SITE, ("name", "data", "coordinator"))}
    where = str(path)
    keys.check_name(found["name"], where)
    parse_address(found["coordinator"], where)
    if found["data_dir"] is not None:
        found["data_dir"] = Path(found["data_dir"])
    site = Site(folder=folder.absolute(), **(found | _places(folder, found)))
    if ready:
        keys.read_private(read_secret(site.key), str(site.key))
        if not site.authority.exists():
            raise UserError(f"{site.authority}: missing; the coordinator's ca.crt must be put there")
        tls.read_certificate(read_small(site.authority), str(site.authority), authority=True)
    return site


def read_coordinator(folder: Path, *, ready: bool = True) -> Coordinator:
    """The coordinator's folder.

    Args:
        folder: as `fedc2i.deploy.coordinator_folder.make_coordinator` made it.
        ready: also refuse what would keep it from starting: a key that others can read, a certificate that sites
            would not accept. ``ca.key`` is not needed for that, and may lie elsewhere until the next renewal.

    Raises:
        UserError: for a file that is missing, damaged or open to others, an unknown setting or a wrong one.
    """
    path = folder / "coordinator.toml"
    found = _settings(path, COORDINATOR, ("hosts", "port", "bind"))
    if not found["hosts"] or not all(isinstance(host, str) for host in found["hosts"]):
        raise UserError(f"{path}: 'hosts' must be a list of texts, at least one")
    hosts = tuple(check_host(host, str(path)) for host in found["hosts"])
    check_port(found["port"], str(path))
    bind = check_bind(found["bind"], str(path))
    own = Coordinator(folder.absolute(), hosts, found["port"], bind, **_places(folder, found))
    if ready:
        authority = tls.read_certificate(read_small(own.authority), str(own.authority), authority=True)
        certificate = tls.read_certificate(read_small(own.certificate), str(own.certificate))
        key = keys.read_private(read_secret(own.key), str(own.key))
        if (secret := own.folder / "ca.key").exists():
            read_secret(secret)
        tls.check_server(authority, certificate, key, own.names)
    return own


def _settings(path: Path, kinds: Mapping[str, type], needed: Sequence[str]) -> dict[str, Any]:
    if not path.is_file():
        raise UserError(f"{path}: no such file; `fedc2i {path.stem} init` makes such a folder")
    values = read_toml(path)
    for name, value in values.items():
        if name not in kinds:
            raise UserError(f"{path}: unknown setting {name[:99]!a}, allowed are {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            raise UserError(f"{path}: '{name}' must be {_WORDS[kinds[name]]}, got {str(value)[:99]!a}")
    for name in needed:
        if name not in values:
            raise UserError(f"{path}: '{name}' is missing")
    return values


def _places(folder: Path, values: Mapping[str, Any]) -> dict[str, Path]:
    """The folders of running processes, relative to the settings' own unless they are absolute."""
    return {name: folder.absolute() / (values.get(name) or name) for name in ("state", "logs")}
