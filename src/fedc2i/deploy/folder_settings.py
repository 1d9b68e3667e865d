"""The settings in a site's or coordinator's folder, such as addresses, and how these folders are made."""

from __future__ import annotations

import ipaddress
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import tomli_w

from fedc2i.core.errors import UserError
from fedc2i.core.files import writing
from fedc2i.core.options import describe
from fedc2i.runs.settings import read_toml

LOOPBACK = "127.0.0.1"
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"


def read_settings(path: Path, kinds: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The settings in ``site.toml`` or ``coordinator.toml``; one that is missing has its default, if it has one."""
    if not path.is_file():
        raise UserError(f"{path}: no such file; `fedc2i {path.stem} init` makes such a folder")
    values = read_toml(path)
    for name in values:
        if name not in kinds:
            raise UserError(f"{path}: unknown setting {name[:99]!a}, allowed are {', '.join(kinds)}")
    for name, kind in kinds.items():
        value = values.setdefault(name, (defaults or {}).get(name))
        fits = value in get_args(kind) if get_origin(kind) is Literal else isinstance(value, kind)
        if not fits or isinstance(value, bool):
            got = "nothing" if value is None else ascii(str(value)[:99])
            raise UserError(f"{path}: '{name}' must be {describe(kind)}, got {got}")
    return values


def to_toml(title: str, values: Mapping[str, Any]) -> bytes:
    """The content of a settings file; None is skipped."""
    text = f"# {title}\n" + tomli_w.dumps({name: value for name, value in values.items() if value is not None})
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{title}: a path or name holds bytes that are no text here") from None


def require_new(folder: Path) -> None:
    """Raises a `UserError` if the folder is not empty."""
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: exists already and is not empty; choose another folder")


def make_folder(folder: Path, files: Mapping[str, bytes], below: Sequence[str] = ()) -> None:
    """Makes a folder that only its owner can enter, with all files or none; ``*.key`` gets mode 0600.

    The files are written to a temporary folder, which is then renamed. An empty folder that exists, perhaps a mounted
    volume, is kept: the files are moved into it, the last of ``files`` last.
    """
    require_new(folder)
    with writing(folder):
        there = folder.exists()
        folder.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".making-", dir=folder if there else folder.parent))
        try:
            for name in below:
                (made / name).mkdir()
            for name, content in files.items():
                (made / name).touch(mode=0o600 if name.endswith(".key") else 0o644, exist_ok=False)
                (made / name).write_bytes(content)
            if not there:
                made.rename(folder)
            for name in (*below, *files) if there else ():
                (made / name).rename(folder / name)
        finally:
            shutil.rmtree(made, ignore_errors=True)  # gone already if all went well


def check_host(host: str, where: str = "host") -> str:
    """A host name in lower case or an IP address, in the form that certificates use."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        lower = host.lower()
        if host.isascii() and len(host) <= 253 and re.fullmatch(rf"({_LABEL}\.)*(?![0-9]+\Z){_LABEL}", lower):
            return lower
        raise UserError(f"{where}: {host[:99]!a} is neither a host name in ASCII nor an IP address") from None
    if address.is_unspecified or getattr(address, "scope_id", None):
        raise UserError(f"{where}: {host} cannot be reached from another machine")
    return str(address)


def check_address(address: str, where: str = "coordinator") -> None:
    """Raises a `UserError` for anything but ``host:port`` or ``[IPv6]:port``."""
    parts = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+)):([0-9]{1,5})", address)
    if not parts:
        raise UserError(f"{where}: {address[:99]!a} is no address such as fed.example.org:9092, without https://")
    check_host(parts[1] or parts[2], where)
    check_port(int(parts[3]), where)


def check_port(port: int, where: str = "port") -> int:
    """A TCP port, or a `UserError`."""
    if not 1 <= port <= 65535:
        raise UserError(f"{where}: port {port} is out of range, allowed are 1..65535")
    return port


def check_bind(address: str, where: str = "bind") -> str:
    """An IP address to listen on, or a `UserError`."""
    try:
        return str(ipaddress.ip_address(address))
    except ValueError:
        raise UserError(f"{where}: {address[:99]!a} is no IP address to listen on, such as 10.0.0.5") from None
