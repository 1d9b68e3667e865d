"""Data sources: every one delivers a `Federation`, and `load` finds it by name."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Literal

from fedc2i.core.errors import UserError, nearest
from fedc2i.data.federation import DataOptions, Federation

SOURCES = (
    *("heart", "digits", "digit5", "office10", "hapt", "amazon", "ham10000"),
    *("table", "signals", "folder", "arrays"),
)
PUBLIC_IMAGES = ("digits", "digit5", "office10", "ham10000")  # that anyone may see
MIN_SIZE, MAX_SIZE = 8, 512
FILE_SIZES = {"folder": MAX_SIZE, "ham10000": 96}  # sources of image files, and the side that is in the files


def load(
    spec: str,
    *,
    data_dir: Path | None = None,
    image_size: int | None = None,
    partition: str | None = None,
    seed: int = 0,
    target: str | None = None,
    clients: str | None = None,
    split: str | None = None,
    drop: str | None = None,
    scale: Literal["client", "federated", "none"] = "client",
) -> Federation:
    """Load a federation by name.

    Args:
        spec: ``name`` or ``name:argument``, e.g. ``heart`` or ``table:patients.csv``; the names are those in `SOURCES`.
        data_dir: where downloaded data lies, for the sources that need it.
        image_size: edge length of the images, 8 to 512; the source's default if not given.
        partition: split every client further, e.g. ``dirichlet:10:0.5``; see `fedc2i.data.partition`.
        seed: of the partition, and of the split of a table.
        target: of a table, the column to predict.
        clients: of a table, the column that names each row's client.
        split: of a table, the column that says train, validation or test; else rows are divided 70/10/20.
        drop: of a table, columns that are no inputs, separated by commas.
        scale: standardise inputs other than images by each client's training data (``client``), by the training data
            of all clients (``federated``), or not (``none``).

    Raises:
        UserError: for an unknown name, a size out of range, or data that the source or the partition refuses.

    Example:
        >>> load("heart:cleveland,va").names
        ('Cleveland', 'Long Beach')
    """
    name, _, argument = spec.partition(":")
    if name not in SOURCES:
        raise UserError(f"data source '{name}' is unknown{_hint(spec)}, allowed are {', '.join(SOURCES)}")
    if name != "table" and any((target, clients, split, drop)):
        raise UserError(f"data '{name}': target, clients, split and drop are for table:FILE and table:DIR")
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
    options = DataOptions(data_dir, image_size, scale, target, clients, split, drop, seed)
    federation: Federation = source.load(argument, options)
    if partition is None:
        return federation
    from fedc2i.data.partition import partition as divided

    return divided(federation, partition, seed)


def shows_images(federation: Federation) -> bool:
    """Whether a page or figure shows its images unasked: those of the public benchmarks."""
    return federation.input.is_image and federation.name.partition(":")[0].split(" ")[0] in PUBLIC_IMAGES


def _hint(spec: str) -> str:
    """What the user may have meant: a file of a table, a folder that exists, or a similar name."""
    from fedc2i.data.table_reader import SUFFIXES

    path = Path(spec)
    try:
        kind = "table" if path.suffix.lower() in SUFFIXES and (":" not in spec or path.is_file()) else None
        if spec and path.is_dir():
            suffixes = {child.suffix.lower() for child in path.iterdir()}
            kind = "arrays" if ".npz" in suffixes else "table" if suffixes & set(SUFFIXES) else "folder"
        if kind:
            return f" (did you mean '{kind}:{spec}'?{'' if path.exists() else ' There is no such file.'})"
    except (OSError, ValueError):  # no name that a file can have
        pass
    return nearest(spec.partition(":")[0], SOURCES)
