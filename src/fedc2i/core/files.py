"""Files: atomic and durable writes, JSON, locks on folders, and names of a user's own method or model.

``FILE.py:NAME`` on the command line is a plugin; `fedc2i.core.plugins` loads it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedc2i.core import memory
from fedc2i.core.errors import UserError, one_line

BRIEFLY = 0.1  # seconds to try for a lock: `is_locked` of another process holds it for a moment
SILENCE = 3.0  # seconds of waiting for another process before a line says so
_LOCK_PAUSE = 0.05


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the operating system while ``path`` is written into a `UserError`."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None


def write_atomically(
    path: Path, content: bytes | Iterator[bytes | memoryview], durable: bool = False, mode: int = 0o666
) -> None:
    """Writes a whole file or nothing, and makes its folder: a reader sees the old content or all of the new content.

    Large content may come in pieces. ``durable``: also after a power failure, which takes much longer.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.unlink(missing_ok=True)
            temporary.touch(mode, exist_ok=False)  # never through a link that somebody has put there
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                with temporary.open("wb") as file:
                    for piece in content:
                        file.write(piece)
            if durable:
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Waits until a file's content, or a folder's list of names, is on the disk."""
    if os.name != "posix":  # other systems cannot open a folder
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_links(folder: Path) -> None:
    """Raises a `UserError` if a folder that will be written to has links, pipes or devices in it.

    A folder from a stranger could lead what is written to another place.
    """
    with writing(folder):
        for entry in _entries(folder):
            if entry.is_symlink():
                raise UserError(f"{entry.path}: a link, which a run folder has none of; remove it")
            if not entry.is_file():
                raise UserError(f"{entry.path}: not a file; remove it")


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder but its folders; links are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _entries(Path(entry.path))
            else:
                yield entry


_SPECIAL = re.compile(r"[^\n -~]")  # letters that a terminal may not show


def to_json(value: Any) -> str:
    """Readable JSON; numbers that are not finite become null, and a terminal shows all of its letters."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): plain(entry) for name, entry in value.items()}
        if isinstance(value, list | tuple):
            return [plain(entry) for entry in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None
        return value

    text = json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return _SPECIAL.sub(lambda found: found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1], text)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: if it is not a regular file or does not fit into memory.
        OSError, ValueError, RecursionError: if it cannot be read or is not JSON.
    """
    if path.exists() and not path.is_file():  # reading a pipe would never end
        raise UserError(f"{path}: not a file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        memory.require(path, size, "its contents", copies=4)
        return json.loads(file.read(size).decode("utf-8"))


@contextmanager
def locked(folder: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Keeps other processes from writing into a run folder; the lock is on the folder and ends with the process.

    The folder itself is locked, so that nothing but the run lies in it. A file system without locks is used without.

    Args:
        folder: it exists.
        waiting: waits for another process that holds the lock; called once if that takes long.

    Raises:
        UserError: if another process holds the lock, and this one does not wait.
    """
    if os.name != "posix":
        yield
        return
    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        if not _lock_within(descriptor, BRIEFLY if waiting is None else SILENCE):
            if waiting is None:
                raise UserError(f"{folder}: another process is at work on this run; wait for it or end it")
            waiting()
            _lock_within(descriptor, math.inf)
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of a run folder, see `locked`; true if that cannot be found out."""
    if os.name != "posix":
        return True
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        _lock(descriptor)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _lock_within(descriptor: int, seconds: float) -> bool:
    """Locks an open folder until it is closed; false if another process held the lock all the time."""
    until = time.monotonic() + seconds
    while True:
        try:
            _lock(descriptor)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                return True  # a file system that has no locks
            if time.monotonic() >= until:
                return False
            time.sleep(_LOCK_PAUSE)
        else:
            return True


def _lock(descriptor: int) -> None:
    """Locks an open folder until it is closed; an `OSError` at once if that is not possible."""
    import fcntl  # only where the system is POSIX

    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_plugin(name: str) -> bool:
    """Whether a name on the command line means a Python file."""
    return ".py:" in name


def refuse_code(folder: Path, named: Iterable[object], trust: bool) -> None:
    """Raises a `UserError` if a run folder names Python files to execute, unless the user trusts it."""
    for name in () if trust else filter(is_plugin, map(str, named)):
        raise UserError(
            f"{folder}: names {one_line(name)}, code that would be executed here; if you trust it, add --trust "
            "(in Python: trust=True)"
        )


def plugin_file(name: str) -> str:
    """The FILE.py of ``FILE.py:NAME``, with or without options after it."""
    return name.partition(".py:")[0] + ".py"


def plugin_checksums(method: str, model: str | None) -> dict[str, str]:
    """SHA-256 of the files that define a run's ``method`` and ``model``; files that these import are not included."""
    named = {"method": method, "model": model or ""}
    files = {what: Path(plugin_file(name)) for what, name in named.items() if is_plugin(name)}
    return {what: hashlib.sha256(path.read_bytes()).hexdigest() for what, path in files.items() if path.is_file()}


@contextmanager
def own_code(*names: str) -> Iterator[None]:
    """Where names such as ``FILE.py:NAME`` are executed: an error says where in the file it came up.

    Raises:
        UserError: in place of any other exception, if one of the names means a Python file.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not (files := [plugin_file(name) for name in names if is_plugin(name)]):
            raise
        from fedc2i.core.plugin_errors import located

        raise UserError(located(error, files)) from error
