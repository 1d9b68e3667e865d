"""The cache of converted data: npz files, each with a manifest of its checksum and of the files it was made from.

``<name>.npz`` lies beside ``<name>.manifest.json``; `verify` compares the checksum on every load.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from fedc2i.core.errors import UserError
from fedc2i.core.files import read_json, to_json, write_atomically

WINDOWS_FILES = ("thumbs.db", "desktop.ini")  # Windows makes them wherever somebody looks at images
_AGAIN = "run `fedc2i data prepare` again"


@dataclass(frozen=True)
class Source:
    """A published file, or a folder of files, that was converted."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What is known about a converted file; ``notes`` are shown beside results on it."""

    sha256: str
    bytes: int
    sources: tuple[Source, ...]
    notes: tuple[str, ...] = ()


def root() -> Path:
    """The cache folder: ``FEDC2I_CACHE``, else the system's folder for caches (``~/.cache/fedc2i`` on Linux)."""
    own = os.environ.get("FEDC2I_CACHE")
    return Path(own).expanduser() if own else platformdirs.user_cache_path("fedc2i", appauthor=False)


def file_of(source: str, key: str) -> Path:
    """Where the converted domain ``key`` of ``source`` belongs."""
    return root() / source / f"{key}.npz"


def file_for(source: str, key: str, sources: Sequence[Path]) -> Path:
    """Where the domain converted from these files belongs: `file_of`, unless that was made from other files.

    Names and sizes identify files: reading their contents would take as long as converting them.
    """
    usual = file_of(source, key)
    if not sources or not usual.is_file():
        return usual
    try:
        found = manifest(usual)
    except UserError:  # reported when the file is read
        return usual
    sizes = [_measure(file) for file in sources]
    if found is None or [(one.name, one.bytes) for one in found.sources] == sizes:
        return usual
    return file_of(source, f"{key}-{hashlib.sha256(repr(sizes).encode()).hexdigest()[:12]}")


def write(
    target: Path, arrays: Mapping[str, np.ndarray[Any, Any]], sources: Sequence[Path], notes: Sequence[str] = ()
) -> Manifest:
    """Writes ``arrays`` as npz to ``target``, and beside it the manifest.

    Raises:
        UserError: if the folder cannot be written.
    """
    origins = tuple(fingerprint(source) for source in sources)
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **arrays)
    packed = content.getvalue()
    manifest = Manifest(hashlib.sha256(packed).hexdigest(), len(packed), origins, tuple(notes))
    try:
        write_atomically(target, packed, durable=True)
        write_atomically(_manifest_of(target), to_json(asdict(manifest)).encode(), durable=True)
    except UserError as error:
        raise UserError(f"{error}; FEDC2I_CACHE names another folder") from None
    return manifest


def manifest(path: Path) -> Manifest | None:
    """The manifest beside ``path``, or None if there is none.

    Raises:
        UserError: if it cannot be read.
    """
    file = _manifest_of(path)
    if not file.is_file():
        return None
    try:
        content = read_json(file)
        sources = tuple(
            Source(str(entry["name"]), int(entry["bytes"]), str(entry["sha256"])) for entry in content["sources"]
        )
        notes = tuple(str(note) for note in content["notes"])
        return Manifest(str(content["sha256"]), int(content["bytes"]), sources, notes)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        raise UserError(f"{file}: not a manifest of converted data, {_AGAIN}") from None


def verify(path: Path) -> Manifest | None:
    """The manifest beside ``path``, whose checksum the file has; None if there is no manifest.

    Raises:
        UserError: if the checksum differs.
    """
    found = manifest(path)
    if found is not None and (path.stat().st_size != found.bytes or sha256(path) != found.sha256):
        raise UserError(f"{path}: its checksum differs from {_manifest_of(path).name} beside it, {_AGAIN}")
    return found


def sha256(path: Path) -> str:
    """The SHA-256 of a file of any size."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprint(path: Path) -> Source:
    """Name, size and SHA-256 of a file, or of all files in a folder with their relative names."""
    if path.is_file():
        return Source(*_measure(path), sha256(path))
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.relative_to(path).as_posix()}\0{sha256(file)}\n".encode())
    return Source(*_measure(path), digest.hexdigest())


def _measure(path: Path) -> tuple[str, int]:
    """Name and size of a file, or of a folder with the number of its files."""
    if path.is_file():
        return path.name, path.stat().st_size
    sizes = [file.stat().st_size for file in _files(path)]
    return f"{path.name}/ ({len(sizes)} files)", sum(sizes)


def _files(folder: Path) -> list[Path]:
    """All files but hidden ones and those that Windows makes when people look at images."""
    found = (file for file in folder.rglob("*") if not file.name.lower().startswith((".", *WINDOWS_FILES)))
    return sorted(file for file in found if file.is_file())


def _manifest_of(path: Path) -> Path:
    return path.with_suffix(".manifest.json")
