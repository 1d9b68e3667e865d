"""The small files of a site's or coordinator's folder: settings, keys, requests and certificates."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fedc2i.core.errors import UserError
from fedc2i.core.files import writing
from fedc2i.runs.settings import read_toml

MOST_BYTES = 16 * 2**10  # of a key, a request or a certificate; real ones have about one thousand
_WORDS: Mapping[type, str] = {str: "a text", int: "a whole number", list: "a list of texts"}


def read_small(path: Path) -> bytes:
    """The content of a key, request or certificate."""
    try:
        if path.exists() and not path.is_file():  # a pipe or a device would never end
            raise UserError(f"{path}: not a file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > MOST_BYTES:
        raise UserError(f"{path}: longer than {MOST_BYTES:,} bytes, which no key, request or certificate is")
    return content


def read_secret(path: Path) -> bytes:
    """The content of a private key."""
    content = read_small(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read this private key; `chmod 600` it, or make a new one")
    return content


def read_settings(path: Path, kinds: Mapping[str, type], needed: Sequence[str]) -> dict[str, Any]:
    """The settings in ``site.toml`` or ``coordinator.toml``."""
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


def places(folder: Path, settings: Mapping[str, Any]) -> dict[str, Path]:
    """The folders ``state`` and ``logs``, relative to ``folder`` unless the settings have absolute paths."""
    return {name: folder.absolute() / (settings.get(name) or name) for name in ("state", "logs")}


def toml(title: str, values: Mapping[str, Any]) -> bytes:
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
