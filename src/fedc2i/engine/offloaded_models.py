"""Models of many clients that are offloaded from the device; only rows of those that are computed are fetched.

A device may not have room for every client's model, or a machine for all of them. If few clients take part in a round,
the models are then offloaded to host memory, or to a scratch file if that is too small, and the device holds no more
of them than take part. A scratch file has no name: it is gone with the process, however that ends. ``TMPDIR`` says
where it is; on a system whose ``/tmp`` is in memory, it should name a folder on a disk.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fedc2i.core import memory
from fedc2i.core.files import writing
from fedc2i.core.params import Stacked
from fedc2i.core.settings import cores
from fedc2i.engine.seed_run import ClientModels, Store

Place = Literal["host", "file"]

SHARE = 0.5  # of a memory that models may take before they are offloaded
COPIES = 3  # of every client's model: its own, what it received, and one of them while rows are replaced
HOST_SHARE = 0.8  # of free host memory; little else is there
OFFLOADED = 2  # copies of offloaded models: their rows are replaced in place
_ALIGNED = 64  # bytes
_PIECE = 2**24  # numbers that a thread touches at a time


def choose_store(device: torch.device, size: int, participants: int) -> Store:
    """The nearest place that has room for all models, ``size`` bytes in all, if ``participants`` train in a round.

    Offloading may change roundings, so it depends on what the device has, not on what is free at the moment.
    """
    if COPIES * size <= SHARE * _memory_of(device):
        return Store(device)
    in_memory = device.type != "cpu" and OFFLOADED * size <= HOST_SHARE * memory.available()
    return OffloadedStore(device, "host" if in_memory else "file", participants)


class OffloadedStore(Store):
    """Models are in a place other than the device."""

    offloads = True

    def __init__(self, device: torch.device, place: Place, at_once: int) -> None:
        """``at_once``: how many clients are computed at once."""
        super().__init__(device)
        self._place, self._at_once = place, at_once

    def new(self, clients: Sequence[int]) -> ClientModels:
        """See `Store.new`; few models are on the device."""
        few = len(clients) <= self._at_once
        return super().new(clients) if few else OffloadedModels(clients, self.device, self._place)

    def chunks(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        """See `Store.chunks`."""
        return [tuple(clients[low : low + self._at_once]) for low in range(0, len(clients), self._at_once)]


class OffloadedModels(ClientModels):
    """`ClientModels` whose ``tensors`` are in host memory or in a scratch file, and are changed in place."""

    def __init__(self, clients: Sequence[int], device: torch.device, place: Place) -> None:
        super().__init__(clients, device)
        self._place = place
        self._file: mmap.mmap | None = None

    def of(self, clients: Sequence[int]) -> Stacked:
        """See `ClientModels.of`."""
        found = {
            name: torch.empty((len(clients), *tensor.shape[1:]), dtype=tensor.dtype, device=self._device)
            for name, tensor in self.tensors.items()
        }
        for theirs, ours in self._runs(clients):
            for name, tensor in self.tensors.items():
                found[name][theirs].copy_(tensor[ours])
        self._release()
        return found

    def put(self, clients: Sequence[int], models: Stacked) -> None:
        """See `ClientModels.put`."""
        if not self.tensors:
            self.tensors = self._room_for(models)
        for theirs, ours in self._runs(clients):
            for name, tensor in self.tensors.items():
                tensor[ours].copy_(models[name][theirs])
        self._release()

    def _runs(self, clients: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """Which of ``clients`` follow each other here, and in which rows: they are copied in one piece."""
        first = 0
        for k in range(1, len(clients) + 1):
            if k == len(clients) or self._row[clients[k]] != self._row[clients[k - 1]] + 1:
                row = self._row[clients[first]]
                yield slice(first, k), slice(row, row + k - first)
                first = k

    def _room_for(self, models: Stacked) -> Stacked:
        """A row for each client."""
        shapes = {name: (len(self._row), *tensor.shape[1:]) for name, tensor in models.items()}
        if self._place == "host":
            room = {name: torch.empty(shape, dtype=models[name].dtype) for name, shape in shapes.items()}
            _touch(room.values())
            return room
        starts, end = dict[str, int](), 0
        for name, tensor in models.items():
            starts[name] = end
            end += -(-len(self._row) * tensor[0].nbytes // _ALIGNED) * _ALIGNED
        with writing(Path(tempfile.gettempdir())), tempfile.TemporaryFile() as file:
            reserve = getattr(os, "posix_fallocate", lambda number, _, size: os.truncate(number, size))
            reserve(file.fileno(), 0, end)  # a full disk is reported now where the system can, not by a signal later
            self._file = mmap.mmap(file.fileno(), end)
        return {name: _mapped(self._file, models[name].dtype, shapes[name], starts[name]) for name in models}

    def _release(self) -> None:
        """Pages of the file need not stay in this process's memory."""
        if self._file is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._file.madvise(mmap.MADV_DONTNEED)


def _touch(tensors: Iterable[Tensor]) -> None:
    """Makes the system provide their memory, by all cores: one alone takes half a second for a gigabyte."""
    pieces = [piece for tensor in tensors for piece in torch.split(tensor.view(-1), _PIECE)]
    with ThreadPoolExecutor(cores()) as threads:
        list(threads.map(lambda piece: ctypes.memset(piece.data_ptr(), 0, piece.nbytes), pieces))


def _mapped(file: mmap.mmap, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    count = torch.Size(shape).numel()
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(file, dtype=dtype, count=count, offset=start).reshape(shape)


def _memory_of(device: torch.device) -> int:
    """Bytes that a device has."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory.total()
