"""Files of a run and of a federation: written whole or not at all, read with care, and locked while they are in use."""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedc2i.core import memory
from fedc2i.core.errors import UserError


def to_json(value: Any) -> str:
    """Readable JSON; numbers that are not finite become null, which JSON has no other way to say."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    return json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """What a file that `to_json` wrote holds.

    Raises:
        UserError: if it is no file, or does not fit into memory.
        OSError: or `ValueError` or others of its kind, if it cannot be read or is not JSON.
    """
    if path.exists() and not path.is_file():  # a pipe would never end
        raise UserError(f"{path}: not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        memory.require(path, size, "its contents", copies=4)
        return json.loads(file.read(size).decode("utf-8"))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into a line that a person can act on."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_atomically(path: Path, content: bytes, durable: bool = False) -> None:
    """The file is either the old one or the whole new one, whatever happens; if ``durable``, after a power cut, too."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content)
            if durable:
                sync(beside)
            beside.replace(path)
            if durable:
                sync(path.parent)
        finally:
            beside.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    if os.name != "posix":  # a folder cannot be opened there
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time writes into a run folder; the lock is on the folder itself and ends with the process.

    Raises:
        UserError: if another one is at it.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        for more in (True, True, False):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks goes without
                if not more:
                    raise UserError(
                        f"{folder}: another process is at work on this run; wait for it or end it"
                    ) from None
                time.sleep(0.05)  # it may be `is_locked` of another process, which holds it for a moment
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process is at work in a run folder, see `locked`; true where that cannot be known."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as `locked` does: where it cannot, nor can this
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
