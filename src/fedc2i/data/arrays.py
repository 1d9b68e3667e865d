"""``arrays:DIR``: one ``<client>.npz`` per client, and `from_arrays` for arrays that are already in memory.

An archive holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, optionally ``x_validation`` and
``y_validation``, and ``classes``. Archives are taken as untrusted: nothing is unpickled, and the headers
inside are checked against the limits below before any array is read.
"""

from __future__ import annotations

import math
import tokenize
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.data import images
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.data.folder import entries
from fedc2i.errors import UserError

REQUIRED = ("x_train", "y_train", "x_test", "y_test")
OPTIONAL = ("x_validation", "y_validation")
MAX_BYTES = 4 * 2**30  # of one client's arrays
MAX_RATIO = 200  # unpacked to packed; real images stay far below
RATIO_FREE_BYTES = 16 * 2**20  # below this a high ratio is harmless, and sorted labels may reach it
MAX_CLASSES = 10_000
MIN_EDGE = 8  # also what tells channels from pixels
SHAPES = "(N, H, W), (N, H, W, 1), (N, H, W, 3), (N, 1, H, W) or (N, 3, H, W)"

_DAMAGE = (
    *(OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile, zlib.error),
    *(SyntaxError, TypeError, MemoryError, tokenize.TokenError),  # NumPy parses a header as a Python literal
)

Array = np.ndarray[Any, Any]
ClientArrays = Mapping[str, Array] | Sequence[Array]


def load(argument: str, *, data_dir: Path | None, image_size: int | None) -> Federation:
    """Clients from a directory of NumPy archives.

    Args:
        argument: the directory; each ``<client>.npz`` in it becomes a client, in natural order of names.
        data_dir: not used; the directory is relative to the working directory.
        image_size: edge length to which all images are resized; without it they must all have one size.

    Raises:
        UserError: for an archive that is damaged, too large, lacks a key or has one too many, or for arrays
            that `from_arrays` refuses.
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
    named: dict[Path, tuple[str, ...]] = {}
    for path in paths:
        arrays = _read_archive(path)
        if "classes" in arrays:
            named[path] = _class_names(path, arrays.pop("classes"))
        clients[path.stem] = arrays
    if len(set(named.values())) > 1:
        first, other = next((a, b) for a in named for b in named if named[a] != named[b])
        raise UserError(f"{other}: 'classes' differs from that in {first.name}; all clients must have one list")
    classes = next(iter(named.values()), None)
    return from_arrays(clients, classes, name=f"arrays:{argument}", image_size=image_size)


def from_arrays(
    clients: Mapping[str, ClientArrays],
    classes: Sequence[str] | None = None,
    *,
    name: str = "arrays",
    image_size: int | None = None,
) -> Federation:
    """A federation from arrays in memory; they are copied.

    Args:
        clients: by client name either ``(x_train, y_train, x_test, y_test)`` or a mapping with these keys
            and, if there is one, ``x_validation`` and ``y_validation``. Images are uint8 0..255 of shape
            `SHAPES`; labels are whole numbers from 0.
        classes: class names; without them the classes are ``0`` to the largest label of any client.
        name: the federation's name.
        image_size: edge length to which all images are resized; without it they must all have one size.

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
    return Federation(name=name, clients=tuple(built), classes=tuple(classes))


def _checked(where: str, given: ClientArrays) -> dict[str, Array]:
    """A client's arrays by key, images channels-last or grey ``(N, H, W)``, with validation even if it is empty."""
    if not isinstance(given, Mapping):
        if len(given) != len(REQUIRED):
            raise UserError(f"{where}: {len(given)} arrays, expected are {', '.join(REQUIRED)}")
        given = dict(zip(REQUIRED, given, strict=True))
    needed = REQUIRED + OPTIONAL if set(given) & set(OPTIONAL) else REQUIRED
    for problem, keys in (
        ("missing", [key for key in needed if key not in given]),
        ("unknown", [key for key in given if key not in REQUIRED + OPTIONAL]),
    ):
        if keys:
            raise UserError(
                f"{where}: {problem} {', '.join(keys)}; needed are {', '.join(REQUIRED)}, "
                f"optional are {', '.join(OPTIONAL)} and, in files, classes"
            )
    check = {"x": _images, "y": _labels}
    arrays = {key: check[key[0]](f"{where}, {key}", np.asarray(array)) for key, array in given.items()}
    arrays.setdefault("x_validation", arrays["x_train"][:0])
    arrays.setdefault("y_validation", arrays["y_train"][:0])
    for part in ("train", "validation", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if len(x) != len(y):
            raise UserError(f"{where}: x_{part} has {len(x)} images but y_{part} has {len(y)} labels")
    return arrays


def _images(where: str, x: Array) -> Array:
    if x.dtype != np.uint8:
        raise UserError(f"{where}: type {x.dtype}, but uint8 images 0..255 are expected")
    shape = x.shape
    if x.ndim == 3:
        x = x[..., None]
    elif x.ndim == 4 and shape[1] in (1, 3) and shape[3] not in (1, 3):
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1))  # a view would keep the caller's memory
    if x.ndim != 4 or x.shape[3] not in (1, 3) or min(x.shape[1:3]) < MIN_EDGE:
        raise UserError(f"{where}: shape {shape}, allowed are {SHAPES} with H and W from {MIN_EDGE}")
    return x[..., 0] if x.shape[3] == 1 else x


def _labels(where: str, y: Array) -> Array:
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise UserError(f"{where}: {y.dtype} of shape {y.shape}, but whole numbers of shape (N,) are expected")
    for label in (int(y.min()), int(y.max())) if len(y) else ():
        if not 0 <= label < MAX_CLASSES:
            raise UserError(f"{where}: label {label} is out of range, allowed are 0..{MAX_CLASSES - 1}")
    return y


def _split(arrays: Mapping[str, Array], part: str, image_size: int | None) -> Split:
    x = arrays[f"x_{part}"]
    return Split.from_numpy(x if image_size is None else images.resize(x, image_size), arrays[f"y_{part}"])


def _read_archive(path: Path) -> dict[str, Array]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
            declared = sum(_declared_bytes(f"{path}, {key}", archive, members[key]) for key in members)
            if declared > MAX_BYTES:
                raise UserError(f"{path}: the arrays declare {declared:,} bytes, allowed are {MAX_BYTES:,}")
            arrays = {}
            for key, member in members.items():
                with archive.open(member) as stream:
                    arrays[key] = np.lib.format.read_array(stream, allow_pickle=False)
            return arrays
    except _DAMAGE as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: cannot be read as an .npz archive ({reason})") from None


def _declared_bytes(where: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """The size that an array's header declares, once it agrees with the archive and the packing is plausible."""
    with archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise UserError(f"{where}: version {version} of the npy format, allowed are 1.0 and 2.0")
        held = member.file_size - stream.tell()
    if dtype.hasobject:
        raise UserError(f"{where}: an array of Python objects; allowed are uint8 images, whole numbers and strings")
    declared = math.prod(shape) * dtype.itemsize
    if declared != held:
        raise UserError(f"{where}: the header declares {declared:,} bytes but the archive holds {held:,}")
    if member.file_size > max(RATIO_FREE_BYTES, MAX_RATIO * member.compress_size):
        raise UserError(f"{where}: unpacks to more than {MAX_RATIO} times its size, which no real images do")
    return declared


def _class_names(path: Path, names: Array) -> tuple[str, ...]:
    if names.ndim != 1 or names.dtype.kind != "U" or len(set(names.tolist())) != len(names):
        raise UserError(f"{path}, classes: {names.dtype} of shape {names.shape}, expected are distinct strings (C,)")
    return tuple(names.tolist())
