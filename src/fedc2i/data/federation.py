"""What every data source delivers: a `Federation` of `Client` records.

Images stay ``uint8`` in ``(N, 3, H, W)`` layout from the file to the device; a model scales them when it reads them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedc2i.core.errors import UserError

MOST_NAMED = 8  # clients or classes listed in a line of text


@dataclass(frozen=True, repr=False)
class Split:
    """Some labelled images: ``x`` uint8 ``(N, 3, H, W)``, ``y`` int64 ``(N,)``."""

    x: Tensor
    y: Tensor

    def __repr__(self) -> str:
        return f"<Split of {len(self)} images {'x'.join(map(str, self.x.shape[1:]))}>"

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def take(self, index: Tensor | Sequence[int]) -> Split:
        """The samples at ``index``, in that order."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        return Split(self.x[rows], self.y[rows])

    @classmethod
    def from_numpy(cls, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Split:
        """From uint8 ``(N, H, W)``, ``(N, H, W, 1)`` or ``(N, H, W, 3)``; grey is repeated over three channels."""
        if x.ndim == 3:
            x = x[..., None]
        if x.shape[-1] == 1:
            x = np.repeat(x, 3, axis=-1)
        images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
        return cls(images, torch.from_numpy(np.asarray(y, dtype=np.int64).copy()))


@dataclass(frozen=True)
class Client:
    """One site's data. ``validation`` may be empty; ``train`` and ``test`` may not."""

    name: str
    train: Split
    validation: Split
    test: Split


@dataclass(frozen=True)
class Federation:
    """All clients of a benchmark, in table order, over one list of classes.

    Attributes:
        name: the source as the user wrote it, e.g. ``digit5``.
        clients: the sites.
        classes: class names; a label ``c`` means ``classes[c]``.
        notes: what a reader of a result on this data must know (stand-ins, re-cuts).
        preset: default settings on this data (``model``, ``rounds``).
        averages: further averages that tables show beside ``Avg``: by title, the clients they are over.
    """

    name: str
    clients: tuple[Client, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    preset: Mapping[str, Any] = field(default_factory=dict)
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError(f"{self.name}: no clients")
        names = [client.name for client in self.clients]
        if len(set(names)) != len(names):
            raise UserError(f"{self.name}: client names must differ, got {', '.join(names)}")
        shape = self.clients[0].train.x.shape[1:]
        for client in self.clients:
            for part, split in (("train", client.train), ("validation", client.validation), ("test", client.test)):
                self._check(f"{self.name}: client '{client.name}', {part}", split, part != "validation", shape)

    def _check(self, where: str, split: Split, needed: bool, shape: torch.Size) -> None:
        if len(split) == 0:
            if needed:
                raise UserError(f"{where}: no samples")
            return
        if split.x.dtype != torch.uint8 or split.x.ndim != 4 or split.x.shape[1] != 3:
            raise UserError(f"{where}: images must be uint8 (N, 3, H, W), got {split.x.dtype} {tuple(split.x.shape)}")
        if split.x.shape[0] != len(split):
            raise UserError(f"{where}: {split.x.shape[0]} images but {len(split)} labels")
        if split.x.shape[1:] != shape:
            got, want = "x".join(map(str, split.x.shape[2:])), "x".join(map(str, shape[1:]))
            raise UserError(f"{where}: images are {got}, but the first client's are {want}; all must have one size")
        low, high = int(split.y.min()), int(split.y.max())
        if low < 0 or high >= len(self.classes):
            bad = low if low < 0 else high
            raise UserError(f"{where}: label {bad} is out of range, allowed are 0..{len(self.classes) - 1}")

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in table order."""
        return tuple(client.name for client in self.clients)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(3, H, W)``."""
        channels, height, width = self.clients[0].train.x.shape[1:]
        return int(channels), int(height), int(width)

    def select(self, names: Sequence[str]) -> Federation:
        """Only these clients, in the order given.

        Raises:
            UserError: for a name that is not there; the message lists those that are.
        """
        by_name = {client.name: client for client in self.clients}
        for name in names:
            if name not in by_name:
                raise UserError(f"{self.name}: no client '{name}', allowed are {', '.join(by_name)}")
        averages = {title: members for title, members in self.averages.items() if set(members) <= set(names)}
        return replace(self, clients=tuple(by_name[name] for name in names), averages=averages)

    def samples(self) -> dict[str, dict[str, int]]:
        """How many samples each client has to train, validate and test on."""
        return {
            client.name: {"train": len(client.train), "validation": len(client.validation), "test": len(client.test)}
            for client in self.clients
        }

    def describe(self) -> list[str]:
        """What was read, in one line, and a warning for each thing that is probably a mistake."""
        sizes = [f"{name} {'/'.join(map(str, own.values()))}" for name, own in self.samples().items()]
        more = f", and {len(sizes) - MOST_NAMED} more" if len(sizes) > MOST_NAMED else ""
        height, width = self.image_shape[1:]
        many = "s" * (len(self.clients) != 1)
        line = (
            f"{self.name}: {len(self.clients)} client{many}, {len(self.classes)} classes, images {height}x{width}; "
            f"train/validation/test: {', '.join(sizes[:MOST_NAMED])}{more}"
        )
        warnings = self._warnings()
        if len(warnings) >= MOST_NAMED:
            hidden = len(warnings) + 1 - MOST_NAMED
            warnings = [*warnings[: MOST_NAMED - 1], f"({hidden} more warnings)"]
        return [line, *warnings]

    def _warnings(self) -> list[str]:
        trained = {client.name: set(client.train.y.tolist()) for client in self.clients}
        anywhere = set().union(*trained.values())
        found = []
        unseen = [name for label, name in enumerate(self.classes) if label not in anywhere]
        if unseen:
            named = ", ".join(unseen[:MOST_NAMED]) + (", ..." if len(unseen) > MOST_NAMED else "")
            found.append(f"warning: {len(unseen)} of {len(self.classes)} classes have no training sample ({named})")
        for client in self.clients:
            only_tested = sorted(set(client.test.y.tolist()) - trained[client.name])
            if only_tested:
                named = ", ".join(self.classes[label] for label in only_tested[:MOST_NAMED])
                found.append(f"warning: {client.name} is tested on classes it has no training sample of ({named})")
        return found

    @functools.cached_property
    def checksums(self) -> dict[str, str]:
        """SHA-256 of every client's images and labels, which trace a number back to its data."""
        return {client.name: _digest(client) for client in self.clients}


def _digest(client: Client) -> str:
    digest = hashlib.sha256()
    for split in (client.train, client.validation, client.test):
        digest.update(np.array(split.x.shape, dtype=np.int64).tobytes())
        digest.update(split.x.contiguous().numpy().tobytes())
        digest.update(split.y.contiguous().numpy().tobytes())
    return digest.hexdigest()
