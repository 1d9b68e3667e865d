"""npz archives from strangers.

Nothing is unpickled. What an archive declares (members, headers, sizes) is compared with the file and with the free
memory before anything is allocated, and a bad archive raises one `UserError`.
"""

from __future__ import annotations

import io
import math
import struct
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy

from fedc2i.core import memory
from fedc2i.core.errors import UserError, flaw, one_line

Array = np.ndarray[Any, Any]

MOST_MEMBERS = 2**16  # a run of a thousand seeds has some thousand
MOST_HEADER = 10_000  # bytes before an array; numpy allows no more, but reads them all before it refuses
MAX_RATIO = 200  # unpacked to packed; real images stay far below
RATIO_FREE_BYTES = 16 * 2**20  # below this a high ratio is harmless, and sorted labels may reach it
_PIECE = 2**20
_PACKED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # unpacking others, such as LZMA, can need much memory
_KINDS = "biufSU"  # booleans, numbers and text
_DAMAGE = (
    *(OSError, EOFError, ValueError, RuntimeError, OverflowError, zipfile.BadZipFile, zlib.error, struct.error),
    *(SyntaxError, TypeError, MemoryError, tokenize.TokenError),  # numpy parses a header as a Python literal
    *(AttributeError, LookupError),  # zipfile, of odd entries
)


class Declared(NamedTuple):
    """An array as its header describes it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_packed_tight: bool  # it unpacks to far more than it takes in the file

    @property
    def nbytes(self) -> int:
        """Of the array in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


class Archive:
    """The arrays of an open archive, by name without ``.npy``."""

    def __init__(self, path: Path, file: zipfile.ZipFile, ratio: int | None) -> None:
        self._path, self._file, self._ratio = path, file, ratio
        entries = file.infolist()
        if len(entries) > MOST_MEMBERS:
            raise UserError(f"{path}: {len(entries):,} members, allowed are {MOST_MEMBERS:,}")
        if any(entry.compress_type not in _PACKED for entry in entries):
            raise UserError(f"{path}: packed in a way that numpy does not use, allowed are stored and deflated members")
        self._members = {entry.filename.removesuffix(".npy"): entry for entry in entries}
        if len(self._members) < len(entries):
            raise UserError(f"{path}: two members have one name")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all arrays."""
        return tuple(self._members)

    def declared(self, name: str) -> Declared:
        """What an array's header says; nothing is unpacked."""
        self._require(name)
        member = self._members[name]
        with self._file.open(member) as stream:
            shape, _, dtype = _header(f"{self._path}, {one_line(name)}", stream)
        return Declared(shape, dtype, member.file_size > max(RATIO_FREE_BYTES, MAX_RATIO * member.compress_size))

    def _require(self, name: str) -> None:
        if name not in self._members:
            raise UserError(f"{self._path}: no array '{name}', there are {one_line(', '.join(self.names)) or 'none'}")

    def read(self, names: Iterable[str], copies: int = 1) -> dict[str, Array]:
        """The arrays of these names, which will be in memory ``copies`` times at once."""
        wanted = list(names)
        for name in wanted:
            self._require(name)
        declared = sum(self._declared(name) for name in wanted)
        memory.require(self._path, declared, copies=copies)
        return {name: self._read(name) for name in wanted}

    def _declared(self, name: str) -> int:
        """The size in an array's header, if it agrees with the archive and the packing is plausible."""
        where, member = f"{self._path}, {one_line(name)}", self._members[name]
        with self._file.open(member) as stream:
            shape, _, dtype = _header(where, stream)
            held = member.file_size - stream.tell()
        if dtype.hasobject:
            raise UserError(f"{where}: an array of Python objects; allowed are uint8 images, whole numbers and strings")
        count = math.prod(shape)
        if dtype.kind not in _KINDS or min(shape, default=0) < 0 or (count and not dtype.itemsize):
            raise ValueError(f"{name} is declared as {dtype} {shape}")
        if count * dtype.itemsize != held:
            size = f"{count * dtype.itemsize:,}" if count < 2**63 else "more than 2**63"
            raise UserError(f"{where}: the header declares {size} bytes but the archive holds {held:,}")
        if self._ratio and member.file_size > max(RATIO_FREE_BYTES, self._ratio * member.compress_size):
            raise UserError(f"{where}: unpacks to more than {self._ratio} times its size, which no real images do")
        return held

    def _read(self, name: str) -> Array:
        with self._file.open(self._members[name]) as stream:
            shape, fortran, dtype = _header(name, stream)
            flat = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
            filled = 0
            while piece := stream.read(_PIECE):
                flat[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)  # an error if there is more
                filled += len(piece)
        if filled != len(flat):
            raise EOFError(f"{name} is truncated")
        if dtype.kind == "U":
            _check_letters(flat, dtype)
        values = flat.view(dtype) if dtype.itemsize else np.empty(0, dtype)
        return values.reshape(shape[::-1]).T if fortran else values.reshape(shape)


def _check_letters(content: Array, dtype: np.dtype[Any]) -> None:
    """Refuses text with numbers that are not letters of Unicode: numpy accepts them, but Python's strings fail."""
    letters = content.view(np.dtype("u4").newbyteorder(dtype.byteorder))
    if letters.size and letters.max() > sys.maxunicode:
        raise ValueError("text with letters that do not exist")


def _header(where: str, stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first axis runs fastest, and type."""
    version = npy.read_magic(stream)
    form = {(1, 0): "<H", (2, 0): "<I"}.get(version)
    if form is None:
        raise UserError(f"{where}: version {version} of the npy format, allowed are 1.0 and 2.0")
    prefix = stream.read(struct.calcsize(form))
    (length,) = struct.unpack(form, prefix)
    if length > MOST_HEADER:
        raise ValueError(f"a header of {length:,} bytes, allowed are {MOST_HEADER:,}")
    content = io.BytesIO(prefix + stream.read(length))
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read(content)
    return tuple(map(int, shape)), bool(fortran), dtype


@contextmanager
def opened(path: Path, ratio: int | None = MAX_RATIO) -> Iterator[Archive]:
    """An archive to read from; a damaged one raises a `UserError` that names it.

    ``ratio`` is the most that an array may unpack to, as a multiple of its packed size; None for any.
    """
    try:
        with zipfile.ZipFile(path) as file:
            yield Archive(path, file, ratio)
    except FileNotFoundError as error:
        raise UserError(f"{path}: {error.strerror}, an .npz archive is expected") from None
    except _DAMAGE as error:
        raise UserError(f"{path}: cannot be read as an .npz archive ({flaw(error)})") from None
