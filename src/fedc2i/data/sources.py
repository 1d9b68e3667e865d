"""Data sources: every one delivers a `Federation`, and `load` finds it by name."""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from fedc2i.core.errors import UserError, nearest
from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.data.partition import partition as partition_clients

__all__ = ["Client", "Federation", "Split", "from_arrays", "load"]

SOURCES = ("embedded", "digit5", "office10", "folder", "arrays")
MIN_SIZE, MAX_SIZE = 8, 512


def load(
    spec: str,
    *,
    data_dir: Path | None = None,
    image_size: int | None = None,
    partition: str | None = None,
    seed: int = 0,
) -> Federation:
    """Load a federation by name.

    Args:
        spec: ``name`` or ``name:argument``, e.g. ``embedded:scans,ink`` or ``folder:my_images``; the names are those in
            `SOURCES`.
        data_dir: where downloaded data lies, for the sources that need it.
        image_size: edge length of the images, 8 to 512; the source's default if not given.
        partition: split every client further, e.g. ``dirichlet:10:0.5``; see `fedc2i.data.partition`.
        seed: of the partition.

    Raises:
        UserError: for an unknown name, a size out of range, or data that the source or the partition refuses.

    Example:
        >>> load("embedded:scans,ink").names
        ('Scans', 'Ink')
    """
    name, _, argument = spec.partition(":")
    if name not in SOURCES:
        raise UserError(f"data source '{name}' is unknown{_hint(spec)}, allowed are {', '.join(SOURCES)}")
    if image_size is not None and (type(image_size) is not int or not MIN_SIZE <= image_size <= MAX_SIZE):
        raise UserError(f"image_size is {image_size}, allowed are whole numbers from {MIN_SIZE} to {MAX_SIZE}")
    for path in (argument, str(data_dir or "")):
        if "\0" in path:
            raise UserError(f"data '{name}': a path cannot hold a null character")
        try:
            os.fsencode(Path(path).expanduser())
        except UnicodeEncodeError:
            raise UserError(f"data '{name}': {path!a} cannot be the name of a file here") from None
        except RuntimeError:
            raise UserError(f"data '{name}': '{path}' names a user that this machine does not know") from None
    source = importlib.import_module(f"fedc2i.data.{name}")
    federation: Federation = source.load(argument, data_dir=data_dir, image_size=image_size)
    return federation if partition is None else partition_clients(federation, partition, seed)


def _hint(spec: str) -> str:
    """What the user may have meant: a folder or a directory of archives that exists, or a similar name."""
    path = Path(spec)
    try:
        if spec and path.is_dir():
            kind = "arrays" if any(path.glob("*.npz")) else "folder"
            return f"; did you mean {kind}:{spec}?"
    except (OSError, ValueError):  # no name that a file can have
        pass
    return nearest(spec.partition(":")[0], SOURCES)
