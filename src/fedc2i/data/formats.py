"""Readers of the formats in which the benchmark domains are published.

Every reader returns ``(images uint8, labels int64)``. Sizes are checked against the file's and against a cap
before anything is allocated, nothing is unpickled, and a bad file raises one `UserError` that names it.
"""

from __future__ import annotations

import bz2
import gzip
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from fedc2i.core import memory
from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.data import mat, npz
from fedc2i.data.images import read_image

Images: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]
Labels: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Labelled: TypeAlias = tuple[Images, Labels]

CLASSES = 10
MAX_BYTES = 2**31  # the largest published file unpacks to 1.5e9 bytes
MAX_SIDE = 512
_DEFLATE_RATIO = 1032  # deflate cannot pack more bytes than this into one
_USPS_SIDE = 16
_MAX_LISTED = 100_000  # images in a USPS or MNIST-M file; the largest published one has 60,000
_MAX_LINE = 16_384


@contextmanager
def _reading(path: Path, expected: str) -> Iterator[None]:
    """Turns whatever a parser raises about ``path`` into one line that says what was expected."""
    try:
        if path.is_file() and path.stat().st_size > MAX_BYTES:
            raise ValueError(f"{path.stat().st_size:,} bytes, allowed are {MAX_BYTES:,}")
        yield
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{path}: no such file, expected {expected}") from None
    except Exception as error:  # parsers fail in too many ways to list
        raise UserError(f"{path}: cannot be read ({flaw(error)}), expected {expected}") from None


def labelled(path: Path, images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any]) -> Labelled:
    """``images`` and ``labels`` if they belong together.

    Raises:
        UserError: for another type or shape, unequal counts, or a label outside 0..9.
    """
    grey_or_rgb = images.ndim == 3 or (images.ndim == 4 and images.shape[3] in (1, 3))
    sides = images.shape[1:3]
    if images.dtype != np.uint8 or not grey_or_rgb or not 1 <= min(sides) <= max(sides) <= MAX_SIDE:
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
            more = "more" if len(content) > size else "fewer"
            raise ValueError(f"{more} than the {size:,} bytes its header declares")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def read_mnist(images: Path, labels: Path) -> Labelled:
    """A pair of idx files."""
    return labelled(images, read_idx(images), read_idx(labels))


def read_mat(path: Path) -> Labelled:
    """A ``*_32x32.mat`` of SVHN or SynthDigits: ``X`` ``(32, 32, 3, N)``, ``y`` N labels, 10 for digit 0."""
    with _reading(path, "a MATLAB 5 file with X, uint8 (32, 32, 3, N), and y, N labels"):
        arrays = mat.read_arrays(path, ("X", "y"))
        if set(arrays) != {"X", "y"} or arrays["X"].shape[:3] != (32, 32, 3):
            found = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in sorted(arrays.items()))
            raise ValueError(f"it holds {found or 'neither'}")
        numbers = arrays["y"].reshape(-1)
        with np.errstate(invalid="ignore"):  # the next line finds what is not a number or far too large
            labels = numbers.astype(np.int64)
        if not np.array_equal(labels, numbers):
            raise ValueError("y holds numbers that are not whole")
        labels[labels == 10] = 0
        return labelled(path, arrays["X"].transpose(3, 0, 1, 2), labels)


def read_usps(path: Path) -> Labelled:
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


def read_png_folder(folder: Path, listing: Path) -> Labelled:
    """MNIST-M as images in ``folder`` with the text file ``listing`` of lines ``name label``."""
    files: list[Path] = []
    labels: list[int] = []
    with _reading(listing, "lines 'name label', the names being files of the folder beside it"):
        with listing.open(encoding="utf-8") as stream:
            while line := stream.readline(_MAX_LINE):
                name, label = line.split()
                if Path(name).name != name or len(files) == _MAX_LISTED or not label.isdecimal():
                    raise ValueError(f"name '{name[:80]}' with label '{label[:20]}' in line {len(files) + 1}")
                files.append(_file_inside(listing, folder, name))
                labels.append(min(int(label), CLASSES))  # 10 is refused below as well
        if not files:
            raise ValueError("it is empty")
    first = read_image(files[0])
    if max(first.shape) > MAX_SIDE or first.size * len(files) > MAX_BYTES:
        raise UserError(f"{folder}: {len(files)} images of {first.shape[1]}x{first.shape[0]} are too many or too large")
    images = np.empty((len(files), *first.shape), dtype=np.uint8)
    for row, file in enumerate(files):
        image = read_image(file)
        if image.shape != first.shape:
            raise UserError(f"{file}: {image.shape[1]}x{image.shape[0]}, expected the size of {files[0].name}")
        images[row] = image
    return labelled(folder, images, np.array(labels, dtype=np.int64))


def _file_inside(listing: Path, folder: Path, name: str) -> Path:
    """The file of this name in the folder; one that a link leads to elsewhere is refused."""
    file = folder / name
    try:
        if file.resolve().is_relative_to(folder.resolve()) and file.is_file():
            return file
    except (OSError, ValueError, RuntimeError):  # too long, not text that can name a file, or links in a circle
        pass
    raise UserError(f"{listing}: '{one_line(name)}' is not a file inside {folder}")


def read_npz(path: Path, classes: Sequence[str] | None = None) -> tuple[Labelled, Labelled]:
    """The training and the test part of an npz with ``x_train, y_train, x_test, y_test``.

    Args:
        path: the file.
        classes: what its ``classes`` must be, if it has them; None for any.
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
    train, test = labelled(path, x_train, y_train), labelled(path, x_test, y_test)
    if train[0].shape[1:] != test[0].shape[1:]:
        raise UserError(f"{path}: training images are {train[0].shape[1:]} but test images {test[0].shape[1:]}")
    return train, test
