"""Tensors as a Flower record: all tensors of one type travel as one flat array, described by a small header.

Flower handles few large arrays much faster than many small ones. A record that arrives is checked before it is used: a
header that does not fit its arrays is rejected, and nothing in it is ever executed.
"""

from __future__ import annotations

import io
import json
import math
import tokenize
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params

HEADER = "header"
SMALL = 2**-8  # a tensor whose largest number is below it keeps its precision
MOST_HEADER = 2**22  # bytes
MOST_TENSORS = 2**14
MOST_SIZES = 2**40  # numbers in a tensor
MOST_AXES = 16
_TYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
}
# RuntimeError: from torch for a huge shape without elements, and for JSON that is nested too deep. MemoryError,
# SyntaxError, TokenError: from Python's parser, with which numpy reads an array's header.
_SHAPE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError)
_INVALID = (*_SHAPE, MemoryError, SyntaxError, tokenize.TokenError)


def pack(tensors: Params, half: bool = False) -> ArrayRecord:
    """Tensors as one record; ``half`` sends float32 as float16, unless a tensor does not fit.

    A tensor does not fit if a value is too large, or if all are small: float16 would lose a gradient of 1e-8.
    """
    header: list[Any] = []
    parts: dict[str, list[Any]] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu()
        stays = str(own.dtype).removeprefix("torch.")
        if half and own.dtype == torch.float32 and _fits_half(own):
            own = own.to(torch.float16)
        travels = str(own.dtype).removeprefix("torch.")
        if travels not in _TYPES:
            raise UserError(f"'{name}' is {travels}, which cannot be sent; allowed are {', '.join(_TYPES)}")
        header.append([name, stays, travels, list(own.shape)])
        parts.setdefault(travels, []).append(own.reshape(-1).numpy())
    arrays = {travels: Array(np.concatenate(own)) for travels, own in parts.items()}
    described = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    return ArrayRecord({HEADER: Array(described), **arrays})


def _fits_half(tensor: torch.Tensor) -> bool:
    peak = float(tensor.abs().max()) if tensor.numel() else 0.0
    return peak == 0.0 or SMALL <= peak <= torch.finfo(torch.float16).max


def unpack(record: Any) -> Params:
    """The tensors of a record that `pack` made."""
    try:
        described = _flat(record[HEADER], np.uint8)
        if len(described) > MOST_HEADER:
            raise ValueError("its header is too long")
        if not record.keys() <= {HEADER, *_TYPES}:
            raise ValueError("it holds more than its header describes")
        arrays = {name: _flat(array, name) for name, array in record.items() if name != HEADER}
        tensors: Params = {}
        used = dict.fromkeys(arrays, 0)
        header = json.loads(described.tobytes())
        if len(header) > MOST_TENSORS:
            raise ValueError(f"{len(header):,} tensors, allowed are {MOST_TENSORS:,}")
        for name, stays, travels, shape in header:
            same = stays == travels or (stays, travels) == ("float32", "float16")
            if not isinstance(name, str) or name in tensors or not same or not _is_shape(shape):
                raise ValueError("its header is damaged")
            flat, low = arrays[travels], used[travels]
            high = low + math.prod(shape)
            if high > len(flat):
                raise ValueError(f"'{name}' does not fit its array")
            used[travels] = high
            tensors[name] = torch.from_numpy(flat[low:high].copy()).reshape(shape).to(_TYPES[stays])
        if any(used[name] != len(flat) for name, flat in arrays.items()):
            raise ValueError("it holds more than its header describes")
    except _INVALID as error:
        raise UserError(f"not a record of tensors ({type(error).__name__}: {one_line(error)})") from None
    return tensors


def _is_shape(shape: Any) -> bool:
    sides = shape if isinstance(shape, list) and len(shape) <= MOST_AXES else [None]
    return all(type(side) is int and 0 <= side <= MOST_SIZES for side in sides)


def _flat(array: Any, dtype: Any) -> np.ndarray[Any, Any]:
    """The numbers of an array; numpy's own reader would first allocate memory for the shape in the bytes."""
    file = io.BytesIO(array.data)
    if npy.read_magic(file) != (1, 0):
        raise ValueError("an array in another format")
    shape, _, found = npy.read_array_header_1_0(file)
    if found != np.dtype(dtype):
        raise ValueError(f"an array of {found} in place of {np.dtype(dtype)}")
    flat = np.frombuffer(array.data, found, offset=file.tell())
    if shape != flat.shape:
        raise ValueError(f"an array with shape {shape} and {flat.size} numbers")
    return flat


def size(record: ArrayRecord) -> int:
    """The number of bytes of a record's tensors."""
    return sum(len(array.data) for array in record.values())
