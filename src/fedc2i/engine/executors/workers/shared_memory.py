"""Tensors in memory that processes share, without copies through pipes."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedc2i.core.params import Params

_ALIGNED = 64  # bytes; libraries may add up in another order where memory is not aligned


class Entry(NamedTuple):
    """Where a tensor lies in shared memory."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


Layout = dict[str, Entry]


class SharedMemory:
    """A file in memory that grows as needed, known to other processes by its descriptor.

    It is not one of the files in ``/dev/shm``, whose sum is limited to 64 MB in many containers.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """A new one, or the one of an inherited ``descriptor``."""
        self.descriptor = _new_file() if descriptor is None else descriptor
        self._size = 0
        self._memory: mmap.mmap | None = None

    def close(self) -> None:
        """Gives the file back; its memory is free when no view of it is left."""
        os.close(self.descriptor)
        self._memory = None

    def place(self, tensors: Mapping[str, Tensor], start: int = 0) -> tuple[Layout, int]:
        """Room for tensors like these from ``start`` on, and where it ends; nothing is written."""
        layout: Layout = {}
        for name, tensor in tensors.items():
            layout[name] = Entry(start, tuple(tensor.shape), tensor.dtype)
            start += -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED
        if start > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, max(start, 2 * self._size, mmap.PAGESIZE))
        return layout, start

    def write(self, tensors: Mapping[str, Tensor], start: int = 0) -> tuple[Layout, int]:
        """Copies tensors in from ``start`` on; where they are, and where they end."""
        layout, end = self.place(tensors, start)
        for name, view in self.read(layout).items():
            view.copy_(tensors[name])
        return layout, end

    def read(self, layout: Layout) -> Params:
        """The tensors themselves: what one process writes into them, the others see."""
        return {name: self._view(entry) for name, entry in layout.items()}

    def _view(self, entry: Entry) -> Tensor:
        count = torch.Size(entry.shape).numel()
        if not count:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if self._memory is None or entry.offset + count * entry.dtype.itemsize > self._size:
            self._size = os.fstat(self.descriptor).st_size
            self._memory = mmap.mmap(self.descriptor, self._size)  # views of the old map keep that one alive
        flat = torch.frombuffer(self._memory, dtype=entry.dtype, count=count, offset=entry.offset)
        return flat.reshape(entry.shape)


def _new_file() -> int:
    if hasattr(os, "memfd_create"):
        return inheritable(os.memfd_create("fedc2i"))
    with tempfile.TemporaryFile() as file:
        return inheritable(os.dup(file.fileno()))


def inheritable(descriptor: int) -> int:
    """The descriptor, moved if it has the number of a standard stream, as it may where one of those is closed."""
    if descriptor > 2:
        return descriptor
    import fcntl  # not on Windows

    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved
