"""A site's folder: its settings, its key, and whom it trusts.

site.toml                        its name, its data, the coordinator's address, and the site's policy
site.key, site.pub, NAME.csr     its private key (mode 0600), its public key, and the request to be admitted
ca.crt                           the certificate of the coordinator's authority, which the site trusts
next/                            the files of the next key, until the coordinator has admitted it (see `rotate`)
code/                            method and model files that came with runs: pending and approved
audit.log, audit.head            what the site was asked and what left it
masks.bin                        the secrets of the present round under secure aggregation (mode 0600)
state/, logs/                    written by the running processes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import tomli_w
from filelock import FileLock, Timeout

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import writing
from fedc2i.core.options import names, type_hints
from fedc2i.data import catalog, table
from fedc2i.data.federation import DataOptions, Federation
from fedc2i.deploy import keys, tls
from fedc2i.deploy.folder_settings import check_address, make_folder, read_settings, require_new, to_toml
from fedc2i.deploy.policy import COMMENTED, SitePolicy
from fedc2i.methods.fedavg import FedAvg
from fedc2i.runs.plan import load_data
from fedc2i.runs.settings import RunSettings, make

MASKS = "masks.bin"
DATA = names(RunSettings, scope="data")  # the settings of a run that are a site's own
PATH_SOURCES = ("folder", "arrays", "table", "signals")  # data sources whose argument is a path


def kinds() -> dict[str, Any]:
    """The types of all settings of a site."""
    hints = type_hints(RunSettings)
    own = {"name": str, "coordinator": str, "client": str | None, "policy": dict}
    return {**own, **{name: hints[name] for name in DATA}}


@dataclass(frozen=True)
class SiteFolder:
    """A site's folder and its settings; all paths are absolute."""

    folder: Path
    name: str
    coordinator: str
    client: str | None
    source: Mapping[str, Any]  # the settings in `DATA`
    policy: SitePolicy = field(default_factory=SitePolicy)

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

    @property
    def state(self) -> Path:
        """Where the site keeps its models."""
        return self.folder / "state"

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the site's public key, which people compare, for example by telephone."""
        return keys.fingerprint(keys.read_public(self.folder / "site.pub"))

    def sender(self) -> str:
        """Who sends what arrives here: the coordinator's address, and the authority that vouches for it."""
        try:
            authority = tls.describe(tls.read_certificate(self.authority))[1]
        except UserError as error:
            authority = str(error)
        return f"coordinator {self.coordinator}, authority with {authority.removeprefix('its ')}"

    def rows(self) -> table.Rows | None:
        """The rows of a table, which are encoded when the sites of a run have agreed on a schema."""
        kind, _, argument = self.source["data"].partition(":")
        if kind != "table":
            return None
        if self.source["partition"]:
            raise UserError("partition: a site is one client of its table, which is not split further")
        wanted = {own.name: self.source[own.name] for own in fields(DataOptions) if own.name in self.source}
        return table.at_site(argument, DataOptions(**wanted, seed=self.source["data_seed"]), self.name, self.client)

    def load(self, rows: table.Rows | None = None) -> Federation:
        """The site's data, as a federation of one client that has the site's name; ``rows`` if they are read."""
        rows = rows or self.rows()
        if rows is not None:
            return rows.encode(rows.describe()[self.name])
        found = load_data(RunSettings(**self.source))
        if self.client is None and len(found.clients) > 1:
            raise UserError(f"{found.name}: several clients, this site's must be named: {', '.join(found.names)}")
        (own,) = found.select([self.client or found.names[0]]).clients
        return replace(found, clients=(replace(own, name=self.name),), averages={})

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other programs from using the site's key and state at the same time."""
        self.state.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(self.state / "running", timeout=0):
                yield
        except Timeout:
            raise UserError(f"{self.folder}: this site is running already") from None


def read_site(folder: Path, *, ready: bool = True) -> SiteFolder:
    """Reads a folder made by `make_site`.

    ``ready`` also rejects what would keep the site from starting: a key that others can read, a missing ``ca.crt``.
    """
    path = folder / "site.toml"
    defaults = {own.name: own.default for own in fields(RunSettings) if own.name != "data"}
    found = read_settings(path, kinds(), {**defaults, "policy": {}})
    keys.check_name(found["name"], str(path))
    check_address(found["coordinator"], str(path))
    source = {name: found.pop(name) for name in DATA}
    refuse_federated_scale(source["scale"])
    found["policy"] = SitePolicy.read(found["policy"], str(path))
    site = SiteFolder(folder.absolute(), **found, source=source)
    if ready:
        keys.read_private(site.key)
        if not site.authority.exists():
            raise UserError(f"{site.authority}: missing; the coordinator's ca.crt must be put there")
        tls.read_authorities(site.authority)
    return site


def make_site(
    folder: Path,
    name: str,
    data: str,
    coordinator: str,
    *,
    client: str | None = None,
    authority: Path | None = None,
    check: bool = True,
    policy: SitePolicy | None = None,
    **settings: Any,
) -> tuple[SiteFolder, Federation | None]:
    """Makes a site's folder with a new key. If it fails, it leaves nothing.

    Args:
        folder: new or empty.
        name: of the site.
        data: as `fedc2i.load` takes it; relative paths are stored absolute.
        coordinator: ``host:port``.
        client: which client of the data this site is; not needed if there is only one.
        authority: the coordinator's ``ca.crt``; it may be put into the folder later.
        check: load the data now, and return it.
        policy: what runs may ask of the site; by default the one that `site.toml` then explains line by line.
        settings: the others in `DATA`, such as ``target`` of a table.
    """
    require_new(folder)
    keys.check_name(name)
    check_address(coordinator)
    trusted = {} if authority is None else {"ca.crt": b"".join(map(tls.to_pem, tls.read_authorities(authority)))}
    source = _source(data, settings)
    site = SiteFolder(folder.absolute(), name, coordinator, client, source, policy or SitePolicy())
    federation = site.load() if check else None
    settings = {"name": name, "coordinator": coordinator, "client": client, **source}
    table = COMMENTED.encode() if policy is None else b"\n" + tomli_w.dumps({"policy": policy.to_toml()}).encode()
    files = _key_files(name) | trusted | {"site.toml": to_toml("A site of a federation.", settings) + table}
    make_folder(folder, files, ("state", "logs"))
    return site, federation


def refuse_federated_scale(scale: str) -> None:
    """Real sites send no sums over their rows."""
    if scale == "federated":
        raise UserError("scale=federated needs sums over the rows of all sites; at real sites allowed are client, none")


def _source(data: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The checked settings in `DATA`, with absolute paths."""
    for name in settings:
        if name not in DATA:
            raise UserError(f"'{one_line(name)}' is no setting of a site's data, allowed are {', '.join(DATA)}")
    config = make(FedAvg, {**settings, "data": data})
    refuse_federated_scale(config.scale)
    kind, _, argument = data.partition(":")
    place = None if config.data_dir is None else Path(config.data_dir)
    if kind in {domain.source for domain in catalog.DOMAINS}:
        place = catalog.data_root(place)  # the site's process does not read FEDC2I_DATA
    if kind in PATH_SOURCES and argument:
        data = f"{kind}:{_absolute(Path(argument))}"
    own = {name: getattr(config, name) for name in DATA}
    return {**own, "data": data, "data_dir": place and str(_absolute(place))}


def rotate(site: SiteFolder) -> SiteFolder:
    """Makes the site's next key in ``next/``; the present one stays in use until `confirm`.

    Returns the site with ``next/`` as its folder; its request goes to the coordinator. Raises a `UserError` if there is
    a next key already, since its request may have been sent.
    """
    following = replace(site, folder=site.folder / "next")
    if following.folder.exists():
        raise UserError(
            f"{following.folder}: a new key waits there already; send {following.request.name} to the coordinator and "
            f"then `fedc2i site rotate --confirm`, or remove the folder to start again"
        )
    make_folder(following.folder, _key_files(site.name))
    return following


def confirm(site: SiteFolder) -> None:
    """Replaces the present key by the next one, once the coordinator has admitted it; safe to repeat."""
    following = site.folder / "next"
    if not following.is_dir():
        raise UserError(f"{following}: no new key waits there; `fedc2i site rotate` makes one")
    with writing(site.key):
        for name in (site.request.name, "site.pub", site.key.name):  # the private key last: only it matters
            if (following / name).exists():
                (following / name).replace(site.folder / name)
        following.rmdir()


def _key_files(name: str) -> dict[str, bytes]:
    key = keys.new_key()
    return {
        "site.key": keys.to_private(key, "OpenSSH"),
        "site.pub": f"{keys.ssh_public(key.public_key())} {name}\n".encode(),
        f"{name}.csr": keys.make_request(key, name),
    }


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise UserError(f"'{path}' names a user that this machine does not know") from None
