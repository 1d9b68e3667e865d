"""Converted data on disk: npz files, each with a manifest of its checksum and of what it was made from.

``<name>.npz`` lies beside ``<name>.manifest.json``. Both are written to a temporary file and renamed, so a
reader never sees half a file, and `verify` compares the checksum on every load.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedc2i.core.errors import UserError

LEFT = ("thumbs.db", "desktop.ini")  # by Windows, wherever somebody looked at the images
_MAX_MANIFEST = 2**20
_AGAIN = "run `fedc2i data prepare` again"


@dataclass(frozen=True)
class Source:
    """A published file, or a folder of them, that went into a converted one."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known about a converted file: its checksum, its sources, and what to say beside its results."""

    sha256: str
    bytes: int
    sources: tuple[Source, ...]
    notes: tuple[str, ...] = ()


def root() -> Path:
    """The cache folder: ``FEDC2I_CACHE``, else ``$XDG_CACHE_HOME/fedc2i``, else ``~/.cache/fedc2i``."""
    if own := os.environ.get("FEDC2I_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedc2i"


def file_of(source: str, key: str) -> Path:
    """Where the converted domain ``key`` of ``source`` lies, whether or not it is there."""
    return root() / source / f"{key}.npz"


def store(
    target: Path,
    arrays: Mapping[str, np.ndarray[Any, Any]],
    sources: Sequence[Path],
    notes: Sequence[str] = (),
) -> Manifest:
    """Write ``arrays`` as npz to ``target`` with a manifest that records ``sources`` and ``notes``.

    Raises:
        UserError: if the folder cannot be written.
    """
    try:
        origins = tuple(fingerprint(source) for source in sources)
        target.parent.mkdir(parents=True, exist_ok=True)
        _write(target, lambda stream: np.savez_compressed(stream, allow_pickle=False, **arrays))
        manifest = Manifest(sha256(target), target.stat().st_size, origins, tuple(notes))
        text = json.dumps(asdict(manifest), indent=2).encode() + b"\n"
        _write(_manifest_of(target), lambda stream: stream.write(text))
    except OSError as error:
        raise UserError(
            f"{target}: cannot be written ({error.strerror or error}), FEDC2I_CACHE names another folder"
        ) from None
    return manifest


def manifest(path: Path) -> Manifest | None:
    """The manifest beside ``path``, or None where there is none.

    Raises:
        UserError: if there is one that cannot be read.
    """
    file = _manifest_of(path)
    if not file.is_file():
        return None
    try:
        if file.stat().st_size > _MAX_MANIFEST:
            raise ValueError("too large")
        content = json.loads(file.read_bytes())
        sources = tuple(
            Source(str(entry["name"]), int(entry["bytes"]), str(entry["sha256"])) for entry in content["sources"]
        )
        notes = tuple(str(note) for note in content["notes"])
        return Manifest(str(content["sha256"]), int(content["bytes"]), sources, notes)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        raise UserError(f"{file}: not a manifest of converted data, {_AGAIN}") from None


def verify(path: Path) -> Manifest | None:
    """The manifest beside ``path`` after its checksum was found right; None where there is no manifest.

    Raises:
        UserError: if the checksum differs.
    """
    found = manifest(path)
    if found is not None and (path.stat().st_size != found.bytes or sha256(path) != found.sha256):
        raise UserError(f"{path}: its checksum differs from {_manifest_of(path).name} beside it, {_AGAIN}")
    return found


def file_for(source: str, key: str, sources: Sequence[Path]) -> Path:
    """Where the domain converted from these files lies or belongs: `file_of`, unless that was made from others.

    Files are told apart by names and sizes. Their contents are not read again, which would take as long as converting.
    """
    usual = file_of(source, key)
    if not sources or not usual.is_file():
        return usual
    sizes = [_measure(file) for file in sources]
    try:
        found = manifest(usual)
    except UserError:  # whoever reads the file says so
        return usual
    if found is None or [(one.name, one.bytes) for one in found.sources] == sizes:
        return usual
    return file_of(source, f"{key}-{hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]}")


def sha256(path: Path) -> str:
    """The SHA-256 of one file, read piece by piece."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(path: Path) -> Source:
    """Name, size and SHA-256 of a file; for a folder those of all files in it, by relative name."""
    if path.is_file():
        return Source(*_measure(path), sha256(path))
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return Source(*_measure(path), digest.hexdigest())


def _measure(path: Path) -> tuple[str, int]:
    """Name and size of a file, or of a folder with the number of files in it."""
    if path.is_file():
        return path.name, path.stat().st_size
    sizes = [file.stat().st_size for file in _files(path)]
    return f"{path.name}/ ({len(sizes)} files)", sum(sizes)


def _files(folder: Path) -> list[Path]:
    """All but hidden ones and those that Windows leaves, which come and go as people look at images."""
    found = (file for file in folder.rglob("*") if not file.name.lower().startswith((".", *LEFT)))
    return sorted(file for file in found if file.is_file())


def _manifest_of(path: Path) -> Path:
    return path.with_suffix(".manifest.json")


def _write(target: Path, fill: Callable[[IO[bytes]], object]) -> None:
    """Let ``fill`` write a temporary file beside ``target``, then put it in its place in one step."""
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
