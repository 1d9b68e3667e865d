"""``signals:FILE.npz`` or ``signals:DIR``: windows of signals ``(N, channels, time)`` with a label each.

One archive holds ``x``, ``y`` and ``client``, the name or number of each window's client; or a folder has one
``<client>.npz`` with ``x`` and ``y`` for each client. ``classes`` may name the classes. Neighbouring windows often
overlap, so they are not split at random: of each client and class, the first 70 % in the order of the file are for
training, the next 10 % for validation, and the last 20 % for test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.data import arrays, npz
from fedc2i.data.federation import DataOptions, Federation
from fedc2i.data.folder import entries, natural_key

TRAIN, VALIDATION = 0.7, 0.1

Array = np.ndarray[Any, Any]


def load(argument: str, options: DataOptions) -> Federation:
    """Clients from one archive or a folder of archives.

    Raises:
        UserError: for a missing or damaged file, or arrays of the wrong type or shape.
    """
    if not argument:
        raise UserError("signals: a file or folder is needed, as signals:FILE.npz or signals:DIR")
    path = Path(argument).expanduser()
    read = _folder if path.is_dir() else _file
    clients, classes = read(path)
    return build(f"signals:{argument}", clients, classes, options)


def build(
    name: str, clients: Mapping[str, tuple[Array, Array]], classes: Sequence[str] | None, options: DataOptions
) -> Federation:
    """A federation of windows and labels in the order they were recorded, by client."""
    divided = {client: _divided(f"{name}: client '{client}'", x, y) for client, (x, y) in clients.items()}
    return arrays.from_arrays(divided, classes, name=name, scale=options.scale)


def time_split(labels: Array) -> tuple[Array, Array, Array]:
    """Rows for training, validation and test: of each class the first, the next and the last ones."""
    parts: tuple[list[Array], ...] = ([], [], [])
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        ends = [round(TRAIN * len(rows)), round((TRAIN + VALIDATION) * len(rows))]
        for part, chosen in zip(parts, np.split(rows, ends), strict=True):
            part.append(chosen)
    train, validation, test = (np.sort(np.concatenate(part)) for part in parts)
    return train, validation, test


def _divided(where: str, x: Array, y: Array) -> dict[str, Array]:
    if x.ndim != 3:
        raise UserError(f"{where}: x has shape {x.shape}, expected is (N, channels, time)")
    if len(x) != len(y):
        raise UserError(f"{where}: x has {len(x)} windows but y has {len(y)} labels")
    rows = dict(zip(("train", "validation", "test"), time_split(y), strict=True))
    for part in ("train", "test"):
        if not len(rows[part]):
            raise UserError(f"{where}: {len(y)} windows leave none for {part}")
    return {f"{letter}_{part}": own[chosen] for part, chosen in rows.items() for letter, own in (("x", x), ("y", y))}


def _file(path: Path) -> tuple[dict[str, tuple[Array, Array]], Sequence[str] | None]:
    found = _read(path, ("x", "y", "client"))
    x, y, owner = found["x"], found["y"], found["client"]
    if owner.shape != y.shape or owner.ndim != 1:
        raise UserError(f"{path}: client has shape {owner.shape}, expected is one name or number for each of y")
    names = sorted({str(name) for name in owner.tolist()}, key=natural_key)
    texts = owner.astype(str)
    return {name: (x[texts == name], y[texts == name]) for name in names}, _classes(found)


def _folder(path: Path) -> tuple[dict[str, tuple[Array, Array]], Sequence[str] | None]:
    files = [file for file in entries(path) if file.suffix.lower() == ".npz"]
    if not files:
        raise UserError(f"{path}: no clients, expected one <client>.npz with x and y per client")
    clients, named = {}, []
    for file in files:
        found = _read(file, ("x", "y"))
        clients[file.stem] = found["x"], found["y"]
        named.append(_classes(found))
    if any(own != named[0] for own in named):
        raise UserError(f"{path}: 'classes' differs between clients; write one list into every file")
    return clients, named[0]


def _read(path: Path, needed: Sequence[str]) -> dict[str, Array]:
    with npz.opened(path) as archive:
        if missing := [name for name in needed if name not in archive.names]:
            known = one_line(", ".join(archive.names))
            raise UserError(f"{path}: no array {', '.join(missing)}; needed are {', '.join(needed)}, found {known}")
        return archive.read([*needed, *({"classes"} & set(archive.names))])


def _classes(found: Mapping[str, Array]) -> list[str] | None:
    return [str(name) for name in found["classes"].tolist()] if "classes" in found else None
