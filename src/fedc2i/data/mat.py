"""Arrays of a MATLAB 5 file, the format in which SVHN and SynthDigits are published.

`scipy.io.loadmat` is not used: a damaged type code makes it read outside its tables, which ends the interpreter with a
segmentation fault (seen with SciPy 1.17). Here every size is checked before anything is allocated.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core import memory

MAX_BYTES = 2**31  # of an array; the largest published one, the training images of SynthDigits, has 1.5e9
_PACKED = 15  # the type code of a compressed element
_HEADER = 256  # bytes of an element that hold everything but its values
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}


def read_arrays(path: Path, names: Collection[str]) -> dict[str, np.ndarray[Any, Any]]:
    """The numeric arrays of these names; others are skipped.

    Raises:
        ValueError, LookupError, struct.error, zlib.error: for a damaged file.
    """
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with path.open("rb") as stream:
        order = {b"IM": "<", b"MI": ">"}.get(stream.read(128)[126:])
        if order is None:
            raise ValueError("its header is not that of MATLAB 5")
        left = path.stat().st_size
        while tag := stream.read(8):
            code, size = struct.unpack(f"{order}2I", tag)
            element = stream.read(min(left, size))
            if len(element) != size:
                raise ValueError("it is truncated")
            arrays |= _array(path, names, element if code == _PACKED else tag + element, code == _PACKED, order)
    return arrays


def _array(
    path: Path, names: Collection[str], element: bytes, packed: bool, order: str
) -> dict[str, np.ndarray[Any, Any]]:
    """The array in one element, by its name.

    An element is a tag of eight bytes and four parts: flags, dimensions, name and values.
    """
    content = zlib.decompressobj().decompress(element, _HEADER) if packed else element
    parts = [(0, 0, 8)]  # type code, size and place of the tag and of each part
    while len(parts) < 5:
        parts.append(_part(content, sum(parts[-1][1:]), order))
    (_, axes_size, axes_place), (_, name_size, name_place), (code, size, place) = parts[2:]
    if place > _HEADER:
        raise ValueError(f"an array of {axes_size // 4:,} axes, or with a name of {name_size:,} letters")
    shape = struct.unpack_from(f"{order}{axes_size // 4}i", content, axes_place)
    name = content[name_place : name_place + name_size].rstrip(b"\0").decode("latin1")
    if name not in names:
        return {}
    dtype = np.dtype(f"{order}{_TYPES[code]}")
    if min(shape) < 0 or math.prod(shape) * dtype.itemsize != size or size > MAX_BYTES:
        raise ValueError(f"{name} is declared as {shape} of {dtype} but has {size:,} bytes")
    memory.require(f"{path}, {name}", size)
    if packed:
        content = zlib.decompressobj().decompress(element, place + size)
    return {name: np.frombuffer(content, dtype, math.prod(shape), place).reshape(shape, order="F")}


def _part(content: bytes, start: int, order: str) -> tuple[int, int, int]:
    """Type code, size and place of the part that begins at the next multiple of eight; small ones have a short tag."""
    start = -(-start // 8) * 8
    code, size = struct.unpack_from(f"{order}2I", content, start)
    return (code & 0xFFFF, code >> 16, start + 4) if code >> 16 else (code, size, start + 8)
