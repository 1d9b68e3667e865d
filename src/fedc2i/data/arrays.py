"""``arrays:DIR``: one ``<client>.npz`` per client, and `from_arrays` for arrays that are already in memory.

Arrays of uint8 with three or four axes are images. Everything else is a table ``(N, features)``, signals
``(N, channels, time)`` or numbers of any other shape, and is standardised.

An archive holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, optionally ``x_validation`` and
``y_validation``, and ``classes``. Archives are read as untrusted, see `fedc2i.data.npz`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core import memory
from fedc2i.core.errors import UserError, one_line
from fedc2i.data import images, npz
from fedc2i.data.federation import Client, DataOptions, Federation, Split
from fedc2i.data.folder import entries
from fedc2i.data.scaling import Scale
from fedc2i.data.scaling import scale as scaled

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")
COPIES = 2  # of a client's arrays in memory while they are read
MAX_CLASSES = 10_000
MOST_LISTED = 8  # clients in a line, and classes of each
MIN_EDGE = 8  # shorter axes are channels
IMAGES = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W)"

Array = np.ndarray[Any, Any]
ClientArrays = Mapping[str, Array] | Sequence[Array]


def load(argument: str, options: DataOptions) -> Federation:
    """Clients from a directory of NumPy archives.

    Args:
        argument: the directory, relative to the working directory; each ``<client>.npz`` in it becomes a client, in
            natural order of names.
        options: ``image_size`` resizes all images, and ``scale`` standardises other inputs.

    Raises:
        UserError: for a damaged or too large archive, a missing or unknown array, or arrays that `from_arrays` refuses.
    """
    if not argument:
        raise UserError("arrays: a directory is needed, as arrays:DIR with one <client>.npz per client")
    root = Path(argument).expanduser()
    paths = entries(root)
    for path in paths:
        if path.suffix.lower() != ".npz" or not path.is_file():
            raise UserError(f"{path}: not a <client>.npz file; move it elsewhere")
    if not paths:
        raise UserError(f"{root}: no clients, expected one <client>.npz per client")
    clients: dict[str, ClientArrays] = {}
    named: dict[tuple[str, ...], Path] = {}  # the first file with each list of classes
    for path in paths:
        arrays = _read_archive(path)
        if "classes" in arrays:
            named.setdefault(_class_names(path, arrays.pop("classes")), path)
        clients[path.stem] = arrays
    if len(named) > 1:
        lists = "; ".join(f"{path.name} has {_some(names)}" for names, path in list(named.items())[:MOST_LISTED])
        raise UserError(
            f"{root}: 'classes' differs between clients: {lists}; write one list of all of them into every file, and "
            "number its labels by it"
        )
    return from_arrays(
        clients, next(iter(named), None), name=f"arrays:{argument}", image_size=options.image_size, scale=options.scale
    )


def from_arrays(
    clients: Mapping[str, ClientArrays],
    classes: Sequence[str] | None = None,
    *,
    name: str = "arrays",
    image_size: int | None = None,
    scale: Scale = "client",
) -> Federation:
    """A federation from arrays in memory; they are copied.

    Args:
        clients: by client name either ``(x_train, y_train, x_test, y_test)`` or a mapping with these keys
            and, if there is one, ``x_validation`` and ``y_validation``. Samples are uint8 images of shape
            `IMAGES`, or finite numbers ``(N, features)``, ``(N, channels, time)`` or ``(N, channels, ...)``, also as
            a SciPy sparse matrix; labels are whole numbers from 0.
        classes: class names; without them the classes are ``0`` to the largest label of any client.
        name: the federation's name.
        image_size: edge length to which all images are resized; without it they must all have one size.
        scale: numbers that are not images are standardised by the client's own training data (``client``), by all
            training data (``federated``), or not at all (``none``).

    Raises:
        UserError: for missing arrays, a wrong type or shape, or a label that is out of range.

    Example:
        >>> x, y = np.zeros((4, 8, 8), np.uint8), np.array([0, 1, 0, 1])
        >>> from_arrays({"hospital A": (x, y, x, y)}).classes
        ('0', '1')
    """
    checked = {client: _checked(f"{name}: client '{client}'", given) for client, given in clients.items()}
    if classes is None:
        labels = [arrays[key] for arrays in checked.values() for key in arrays if key.startswith("y_")]
        count = 1 + max((int(y.max()) for y in labels if len(y)), default=0)
        classes = [str(label) for label in range(count)]
    built = [
        Client(client, **{part: _split(arrays, part, image_size) for part in ("train", "validation", "test")})
        for client, arrays in checked.items()
    ]
    found = Federation(name=name, clients=tuple(built), classes=tuple(classes))  # checks that they fit together
    return replace(found, clients=scaled(built, scale))


def _checked(where: str, given: ClientArrays) -> dict[str, Array]:
    """A client's arrays by key, images channels-last or grey ``(N, H, W)``, with validation even if it is empty."""
    if not isinstance(given, Mapping):
        if len(given) != len(REQUIRED):
            raise UserError(f"{where}: {len(given)} arrays, expected are {', '.join(REQUIRED)}")
        given = dict(zip(REQUIRED, given, strict=True))
    _refuse_keys(where, given)
    check = {"x": _samples, "y": _labels}
    arrays = {key: check[key[0]](f"{where}, {key}", _dense(f"{where}, {key}", own)) for key, own in given.items()}
    arrays.setdefault("x_validation", arrays["x_train"][:0])
    arrays.setdefault("y_validation", arrays["y_train"][:0])
    for part in ("train", "validation", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if len(x) != len(y):
            raise UserError(f"{where}: x_{part} has {len(x)} samples but y_{part} has {len(y)} labels")
    return arrays


def _refuse_keys(where: str, given: Collection[str]) -> None:
    """Refuses missing and unknown arrays."""
    needed = REQUIRED + OPTIONAL if set(given) & set(OPTIONAL) else REQUIRED
    missing = [key for key in needed if key not in given]
    unknown = [one_line(key) for key in given if key not in REQUIRED + OPTIONAL]
    if missing or unknown:
        problem = f"missing {', '.join(missing)}" if missing else f"unknown {', '.join(unknown)}"
        raise UserError(
            f"{where}: {problem}; needed are {', '.join(REQUIRED)}, "
            f"optional are {', '.join(OPTIONAL)} and, in files, classes"
        )


def _dense(where: str, array: Any) -> Array:
    """An array; a sparse matrix is filled up with zeros, if memory allows."""
    if not hasattr(array, "toarray"):
        return np.asarray(array)
    memory.require(where, 4 * math.prod(array.shape), "dense numbers", copies=COPIES)
    return np.asarray(array.astype(np.float32).toarray())


def _samples(where: str, x: Array) -> Array:
    """Images channels-last or grey, or finite float32 numbers."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        return _images(where, x)
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise UserError(f"{where}: shape {x.shape}, allowed are (N, features), (N, channels, time) and images {IMAGES}")
    if x.dtype.kind not in "biuf":
        raise UserError(f"{where}: type {x.dtype}, allowed are numbers; fedc2i.from_table takes text and categories")
    numbers = x.astype(np.float32)
    if not np.isfinite(numbers).all():
        row = int(np.flatnonzero(~np.isfinite(numbers).reshape(len(x), -1).all(1))[0])
        raise UserError(f"{where}: sample {row} holds a number that is missing, infinite or beyond float32")
    return numbers


def _images(where: str, x: Array) -> Array:
    shape = x.shape
    if x.ndim == 3:
        x = x[..., None]
    elif shape[1] in (1, 3) and shape[3] not in (1, 3):
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))  # a view would keep the caller's memory
    if x.shape[3] not in (1, 3) or min(x.shape[1:3]) < MIN_EDGE:
        raise UserError(f"{where}: shape {shape}, allowed are {IMAGES} with H and W from {MIN_EDGE}")
    return x[..., 0] if x.shape[3] == 1 else x


def _labels(where: str, y: Array) -> Array:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError(f"{where}: {y.dtype} of shape {y.shape}, but whole numbers of shape (N,) are expected")
    for label in (int(y.min()), int(y.max())) if len(y) else ():
        if not 0 <= label < MAX_CLASSES:
            hint = "; remove samples without a label" if label < 0 else ""
            raise UserError(f"{where}: label {label} is out of range, allowed are 0..{MAX_CLASSES - 1}{hint}")
    return y


def _split(arrays: Mapping[str, Array], part: str, image_size: int | None) -> Split:
    x = arrays[f"x_{part}"]
    resized = x if image_size is None or x.dtype != np.uint8 else images.resize(x, image_size)
    return Split.from_numpy(resized, arrays[f"y_{part}"])


def _read_archive(path: Path) -> dict[str, Array]:
    """A client's arrays; unknown ones are refused before any is read."""
    with npz.opened(path) as archive:
        _refuse_keys(f"client '{path.stem}'", {*REQUIRED, *archive.names} - {"classes"})
        return archive.read(archive.names, COPIES)


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(one_line(name) for name in names[:MOST_LISTED])
    return shown + (f", ... ({len(names)})" if len(names) > MOST_LISTED else "")


def _class_names(path: Path, names: Array) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != "U" or len(set(names.tolist())) != len(names):
        raise UserError(f"{path}, classes: {names.dtype} of shape {names.shape}, expected are distinct strings (C,)")
    return tuple(names.tolist())
