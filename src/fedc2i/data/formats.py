"""Readers of the formats in which the benchmark domains are published.

Every reader returns ``(images uint8, labels int64)``. Sizes are checked against the file's and against a cap
before anything is allocated, nothing is unpickled, and a bad file ends in one `UserError` that names it.
"""

from __future__ import annotations

import bz2
import gzip
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from fedc2i.core import memory
from fedc2i.core.errors import UserError, one_line
from fedc2i.data import npz
from fedc2i.data.images import read_image

Images: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Labels: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Labelled: TypeAlias = tuple[Images, Labels]

CLASSES = 10
MAX_BYTES = 2**31  # the largest published file, the training part of SynthDigits, unpacks to 1.5e9 bytes
MAX_SIDE = 512
_DEFLATE_RATIO = 1032  # deflate cannot pack more bytes than this into one
_MAT_PACKED = 15
_MAT_AXES, _MAT_NAME = 32, 64  # MATLAB's names have at most 63 letters
_MAT_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_USPS_SIDE = 16
_MAX_LISTED = 100_000  # images in a USPS or MNIST-M file; published are at most 60,000
_MAX_LINE = 16_384
_MAX_CHUNK = 2**28  # bytes that HDF5 unpacks at once; what the whole of USPS needs as float64 is 2e7


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turn whatever a parser raises about ``path`` into one line that says what was expected."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes, allowed are {MAX_BYTES:,}")
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, expected {expected}") from None
    except Exception as error:  # foreign parsers fail in too many ways to list
        reason = one_line(error, 160) or type(error).__name__
        raise UserError(f"{path}: cannot be read ({reason}), expected {expected}") from None


def labelled(path: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Labelled:
    """``images`` and ``labels`` if they belong together.

    Raises:
        UserError: for another type or shape, unequal counts, or a label outside 0..9.
    """
    grey_or_rgb = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    if (
        images.dtype != np.uint8
        or not grey_or_rgb
        or not 1 <= min(images.shape[1:3]) <= max(images.shape[1:3]) <= MAX_SIDE
    ):
        raise UserError(f"{path}: images are {images.dtype} {images.shape}, expected uint8 (N, H, W) or (N, H, W, 3)")
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        raise UserError(f"{path}: labels are {labels.dtype} {labels.shape}, expected integers (N,)")
    if len(images) != len(labels):
        raise UserError(f"{path}: {len(images)} images but {len(labels)} labels")
    if len(labels) == 0:
        raise UserError(f"{path}: no images")
    if labels.min() < 0 or labels.max() >= CLASSES:
        bad = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{path}: label {bad} is out of range, allowed are 0..{CLASSES - 1}")
    return images, labels.astype(np.int64)


def read_idx(path: Path) -> Images:
    """One idx file of unsigned bytes, plain or gzipped: ``(N, H, W)`` for images, ``(N,)`` for labels."""
    packed = path.suffix == ".gz"
    with _reading(path, "an idx file of bytes as MNIST is published"):
        stream: IO[bytes]
        with gzip.open(path) if packed else path.open("rb") as stream:  # type: ignore[assignment]
            magic = stream.read(4)
            if magic not in (b"\0\0\x08\x01", b"\0\0\x08\x03"):
                raise ValueError(f"it begins with {magic.hex() or 'nothing'}")
            shape = struct.unpack(f">{magic[3]}I", stream.read(4 * magic[3]))
            size = math.prod(shape)
            if size > min(MAX_BYTES, path.stat().st_size * (_DEFLATE_RATIO if packed else 1)):
                raise ValueError(f"its header declares {size:,} bytes, more than the file can hold")
            memory.require(path, size, "its header")
            content = stream.read(size + 1)
        if len(content) != size:
            raise ValueError(
                f"{'more' if len(content) > size else 'fewer'} than the {size:,} bytes its header declares"
            )
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_mnist(images: Path, labels: Path) -> Labelled:
    """A pair of idx files."""
    return labelled(images, read_idx(images), read_idx(labels))


def read_mat(path: Path) -> Labelled:
    """A ``*_32x32.mat`` of SVHN or SynthDigits: ``X`` ``(32, 32, 3, N)``, ``y`` N labels, 10 for digit 0."""
    with _reading(path, "a MATLAB 5 file with X, uint8 (32, 32, 3, N), and y, N labels"):
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        with path.open("rb") as stream:
            order = {b"IM": "<", b"MI": ">"}.get(stream.read(128)[126:])
            if order is None:
                raise ValueError("its header is not that of MATLAB 5")
            left = path.stat().st_size
            while tag := stream.read(8):
                arrays |= _mat_array(path, tag, stream.read(min(left, struct.unpack(f"{order}2I", tag)[1])), order)
        if set(arrays) != {"X", "y"} or arrays["X"].shape[:3] != (32, 32, 3):
            found = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in sorted(arrays.items()))
            raise ValueError(f"it holds {found or 'neither'}")
        numbers = arrays["y"].reshape(-1)
        with np.errstate(invalid="ignore"):  # not a number, or far too large: found out in the next line
            labels = numbers.astype(np.int64)
        if not np.array_equal(labels, numbers):
            raise ValueError("y holds numbers that are not whole")
        labels[labels == 10] = 0
        return labelled(path, arrays["X"].transpose(3, 0, 1, 2), labels)


def _mat_array(path: Path, tag: bytes, element: bytes, order: str) -> dict[str, np.ndarray[Any, Any]]:
    """The array in one element of a MATLAB 5 file, by name; nothing for arrays other than X and y.

    scipy's reader is not used because damaged type codes crash the interpreter in it.
    """
    kind, size = struct.unpack(f"{order}2I", tag)
    if len(element) != size:
        raise ValueError("it is cut off")
    content = zlib.decompressobj().decompress(element, 256) if kind == _MAT_PACKED else tag + element
    part = [(0, 0, 8)]  # type code, size and place of flags, dimensions, name and values, one behind the other
    while len(part) < 5:
        part.append(_mat_part(content, sum(part[-1][1:]), order))
    if part[2][1] > 4 * _MAT_AXES or part[3][1] > _MAT_NAME:
        raise ValueError(f"an array of {part[2][1] // 4:,} axes, or with a name of {part[3][1]:,} letters")
    shape = struct.unpack_from(f"{order}{part[2][1] // 4}i", content, part[2][2])
    name = content[part[3][2] : sum(part[3][1:])].rstrip(b"\0").decode("latin1")
    code, size, place = part[4]
    if name not in ("X", "y"):
        return {}
    dtype = np.dtype(f"{order}{_MAT_TYPES[code]}")
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != size or size > MAX_BYTES:
        raise ValueError(f"{name} is declared as {shape} of {dtype} but has {size:,} bytes")
    memory.require(f"{path}, {name}", size)
    if kind == _MAT_PACKED:
        content = zlib.decompressobj().decompress(element, place + size)
    return {name: np.frombuffer(content, dtype, math.prod(shape), place).reshape(shape, order="F")}


def _mat_part(content: bytes, start: int, order: str) -> tuple[int, int, int]:
    """Type code, size and place of the part that begins at the next multiple of eight."""
    start = -(-start // 8) * 8
    code, size = struct.unpack_from(f"{order}2I", content, start)
    return (code & 0xFFFF, code >> 16, start + 4) if code >> 16 else (code, size, start + 8)


def read_usps_libsvm(path: Path) -> Labelled:
    """``usps.bz2`` or ``usps.t.bz2``: lines ``label index:value ...``, labels 1..10, 256 values in -1..1."""
    rows: list[Images] = []
    labels: list[int] = []
    with _reading(path, "USPS in LIBSVM format, lines of a label 1..10 and 256 pairs index:value in -1..1"):
        with bz2.open(path) as stream:
            while line := stream.readline(_MAX_LINE):
                if len(rows) == _MAX_LISTED or len(line) == _MAX_LINE:
                    raise ValueError(f"more than {_MAX_LISTED:,} lines or {_MAX_LINE:,} bytes in a line")
                label, *pairs = line.split()
                values = np.zeros(_USPS_SIDE**2, dtype=np.float32)
                for pair in pairs:
                    index, value = pair.split(b":")
                    if not 1 <= int(index) <= values.size:
                        raise ValueError(f"index {int(index)} in line {len(rows) + 1}")
                    values[int(index) - 1] = float(value)
                if not (np.abs(values) <= 1).all():
                    raise ValueError(f"a value outside -1..1 in line {len(rows) + 1}")
                rows.append(((values + 1) / 2 * 255).astype(np.uint8).reshape(_USPS_SIDE, _USPS_SIDE))
                labels.append(int(label) - 1)
        return labelled(path, np.stack(rows), np.array(labels, dtype=np.int64))


def read_usps_h5(path: Path, part: str) -> Labelled:
    """The ``part`` (``train`` or ``test``) of ``usps.h5``: ``<part>/data`` in 0..1 and ``<part>/target``."""
    import h5py  # only this format needs it

    with (
        _reading(path, "USPS as HDF5 with train/data, train/target, test/data, test/target"),
        h5py.File(path, "r") as file,
    ):
        data, target = (_h5_own(file, part, name) for name in ("data", "target"))
        if math.prod(data.shape[1:]) != _USPS_SIDE**2 or data.shape[0] > _MAX_LISTED or data.dtype.kind not in "fu":
            raise ValueError(f"{part}/data is {data.dtype} {data.shape}")
        if target.shape != data.shape[:1] or target.dtype.kind not in "iu":
            raise ValueError(f"{part}/target is {target.dtype} {target.shape}")
        values = np.asarray(data[()], dtype=np.float64)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError(f"{part}/data has values outside 0..1")
        images = (values * 255).astype(np.uint8).reshape(-1, _USPS_SIDE, _USPS_SIDE)
        return labelled(path, images, np.asarray(target[()]))


def _h5_own(file: Any, part: str, name: str) -> Any:
    """A data set whose numbers lie in this very file: HDF5 would also fetch them from any file that it names."""
    import h5py

    for group, key in ((file, part), (file[part], name)):
        if not isinstance(group.get(key, getlink=True), h5py.HardLink):
            raise ValueError(f"{part}/{name} is a link to elsewhere")
    own = file[part][name]
    if own.external or own.is_virtual:
        raise ValueError(f"{part}/{name} lies in another file")
    if own.chunks and math.prod(own.chunks) * own.dtype.itemsize > _MAX_CHUNK:
        raise ValueError(f"{part}/{name} is packed in pieces of {own.chunks}")
    return own


def read_png_folder(folder: Path, listing: Path) -> Labelled:
    """MNIST-M as images in ``folder`` with the text file ``listing`` of lines ``name label``."""
    names: list[str] = []
    labels: list[int] = []
    with _reading(listing, "lines 'name label', the names being files of the folder beside it"):
        with listing.open(encoding="utf-8") as stream:
            while line := stream.readline(_MAX_LINE):
                name, label = line.split()
                if Path(name).name != name or len(names) == _MAX_LISTED or label.startswith("-"):
                    raise ValueError(f"name '{name[:80]}' with label '{label[:20]}' in line {len(names) + 1}")
                names.append(name)
                labels.append(min(int(label), 2**31))  # what is too large for an array is too large for a label
        if not names:
            raise ValueError("it is empty")
    for name in names:
        require_inside(listing, folder, name)
    first = read_image(folder / names[0])
    if max(first.shape) > MAX_SIDE or first.size * len(names) > MAX_BYTES:
        raise UserError(f"{folder}: {len(names)} images of {first.shape[1]}x{first.shape[0]} are too many or too large")
    images = np.empty((len(names), *first.shape), dtype=np.uint8)
    for row, name in enumerate(names):
        image = read_image(folder / name)
        if image.shape != first.shape:
            raise UserError(f"{folder / name}: {image.shape[1]}x{image.shape[0]}, expected the size of {names[0]}")
        images[row] = image
    return labelled(folder, images, np.array(labels, dtype=np.int64))


def require_inside(listing: Path, folder: Path, name: str) -> Path:
    """The file of this name in a folder, if it is one and does not lie elsewhere by way of a link.

    Raises:
        UserError: otherwise.
    """
    try:
        file = folder / name
        if file.resolve().is_relative_to(folder.resolve()) and file.is_file():
            return file
    except (OSError, ValueError, RuntimeError):  # too long, no text that a file's name can be, or links in a circle
        pass
    raise UserError(f"{listing}: '{one_line(name)}' is not a file inside {folder}")


def read_npz(path: Path, classes: Sequence[str] | None = None) -> tuple[Labelled, Labelled]:
    """The training and the test part of an npz with ``x_train, y_train, x_test, y_test``.

    Args:
        path: the file; arrays of objects are refused, so nothing in it can run.
        classes: if given and the file holds ``classes``, both must be equal.
    """
    names = [f"{letter}_{part}" for part in ("train", "test") for letter in "xy"]
    with npz.opened(path) as archive:
        if missing := [name for name in names if name not in archive.names]:
            raise UserError(f"{path}: no {', '.join(missing)}, expected an npz with {', '.join(names)}")
        if classes is not None and "classes" in archive.names:
            stored = archive.read(["classes"])["classes"].tolist()
            if stored != list(classes):
                raise UserError(f"{path}: its classes are {one_line(stored)}, allowed are {', '.join(classes)}")
        x_train, y_train, x_test, y_test = archive.read(names).values()
    parts = (x_train, y_train), (x_test, y_test)
    train, test = (labelled(path, images, labels) for images, labels in parts)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise UserError(f"{path}: training images are {train[0].shape[1:]} but test images {test[0].shape[1:]}")
    return train, test
