"""Files of a federation's folders: small, sometimes secret, and made all together or not at all."""

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

MOST_BYTES = 16 * 2**10  # of a key, a request or a certificate; real ones have about one thousand


def read_small(path: Path) -> bytes:
    """A key's, a request's or a certificate's file.

    Raises:
        UserError: if it cannot be read, or is far too long to be one.
    """
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
    """A private key's file.

    Raises:
        UserError: if others than its owner can read or write it, as ssh refuses it too, or it cannot be read.
    """
    content = read_small(path)
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise UserError(f"{path}: other users can read this private key; `chmod 600` it, or make a new one")
    return content


def toml(title: str, values: Mapping[str, Any]) -> bytes:
    """Settings as a file's content, without those that are None."""
    text = f"# {title}\n" + tomli_w.dumps({name: value for name, value in values.items() if value is not None})
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{title}: a path or name holds bytes that are no text here") from None


def require_new(folder: Path) -> None:
    """Refuses a folder that holds something."""
    with writing(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"{folder}: exists already and is not empty; choose another folder")


def make_folder(folder: Path, files: Mapping[str, bytes], below: Sequence[str] = ()) -> None:
    """Makes a folder that only its owner can enter, with all of this in it or not at all; ``*.key`` gets mode 0600.

    It is made beside its place and renamed. A folder that is there and empty, perhaps a mounted volume, is kept: what
    was made moves into it, the last of ``files`` last.

    Raises:
        UserError: if the folder holds something, or cannot be written.
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
