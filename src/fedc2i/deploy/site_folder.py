"""Making a site's folder, and changing its key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import writing
from fedc2i.data import catalog
from fedc2i.data.federation import Federation
from fedc2i.deploy import keys, tls
from fedc2i.deploy.addresses import parse_address
from fedc2i.deploy.folders import Site
from fedc2i.deploy.secret_files import make_folder, read_small, require_new, toml

PATHS = ("folder", "arrays")  # data sources whose argument is a path


def make_site(
    folder: Path,
    name: str,
    data: str,
    coordinator: str,
    *,
    data_dir: Path | None = None,
    client: str | None = None,
    image_size: int | None = None,
    authority: bytes | None = None,
    check: bool = True,
) -> tuple[Site, Federation | None]:
    """Makes a site's folder with a fresh key, all of it or nothing.

    Args:
        folder: new, or there and empty.
        name: the site's, see `keys.check_name`.
        data: as `fedc2i.data.load` takes it; relative paths are of the working directory, and are stored absolute.
        coordinator: ``host:port``.
        data_dir: where the data lies, for the sources that need it.
        client: which client of the data this site is; may be left out where there is only one.
        image_size: edge length of the images; the source's own if not given.
        authority: the coordinator's ``ca.crt``; it may be put into the folder later.
        check: whether to load the data now.

    Returns:
        The site and, if it was loaded, its data.

    Raises:
        UserError: if the folder holds something, an argument is not allowed, or the data cannot be loaded.
    """
    require_new(folder)
    keys.check_name(name)
    parse_address(coordinator)
    if authority is not None:
        tls.read_certificate(authority, "ca", authority=True)
    if data.partition(":")[0] in catalog.CLASSES:
        data_dir = catalog.data_root(data_dir)  # where it is found from here, the process will not look by itself
    data_dir = None if data_dir is None else _absolute(data_dir)
    place = folder.absolute()
    own = Site(place, name, _located(data), coordinator, data_dir, client, image_size, place / "state", place / "logs")
    federation = own.load() if check else None
    settings = {
        "name": name,
        "data": own.data,
        "data_dir": None if data_dir is None else str(data_dir),
        "client": client,
        "image_size": image_size,
        "coordinator": coordinator,
        "state": "state",
        "logs": "logs",
    }
    files = _key_files(name) | ({} if authority is None else {"ca.crt": authority})
    make_folder(folder, files | {"site.toml": toml("A site of a federation.", settings)}, ("state", "logs"))
    return own, federation


def own_fingerprint(site: Site) -> str:
    """The SHA-256 of the site's public key, to be told to the coordinator by another way than the request."""
    path = site.folder / "site.pub"
    return keys.fingerprint(keys.read_public(read_small(path), str(path)))


def rotate(site: Site) -> Site:
    """Makes the site's next key in ``next/``; the present one stays in use until `confirm`.

    Returns:
        The site as it will be, with ``next/`` for its folder; its request goes to the coordinator.

    Raises:
        UserError: if a next key is waiting already, as its request may have been sent.
    """
    following = _following(site)
    if following.folder.exists():
        raise UserError(
            f"{following.folder}: a new key waits there already; send {following.request.name} to the coordinator and "
            f"then `fedc2i site rotate --confirm`, or remove the folder to begin anew"
        )
    make_folder(following.folder, _key_files(site.name))
    return following


def confirm(site: Site) -> None:
    """Puts the next key in the present one's place, once the coordinator has admitted it; safe to repeat.

    Raises:
        UserError: if no next key is waiting.
    """
    following = _following(site)
    if not following.folder.is_dir():
        raise UserError(f"{following.folder}: no new key waits there; `fedc2i site rotate` makes one")
    with writing(site.key):
        for name in (site.request.name, "site.pub", site.key.name):  # the key last: only it decides
            if (following.folder / name).exists():
                (following.folder / name).replace(site.folder / name)
        following.folder.rmdir()


def _following(site: Site) -> Site:
    return replace(site, folder=site.folder / "next")


def _key_files(name: str) -> dict[str, bytes]:
    key = keys.new_key()
    return {
        "site.key": keys.ssh_private(key),
        "site.pub": f"{keys.ssh_public(key.public_key())} {name}\n".encode(),
        f"{name}.csr": keys.make_request(key, name),
    }


def _located(data: str) -> str:
    """A data source's name with an absolute path in it, where it has a path."""
    source, _, argument = data.partition(":")
    return f"{source}:{_absolute(Path(argument))}" if source in PATHS and argument else data


def _absolute(path: Path) -> Path:
    try:
        return path.expanduser().absolute()
    except RuntimeError:
        raise UserError(f"'{path}' names a user that this machine does not know") from None
