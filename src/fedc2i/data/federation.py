"""What every data source delivers: a `Federation` of `Client` records.

Samples are tensors of any shape. Images stay ``uint8`` in ``(N, 3, H, W)`` layout from the file to the device, and a
model scales them when it reads them. Everything else (tables, signals, features) is ``float32`` and scaled already.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from fedc2i.core.errors import UserError

MOST_AXES, MOST_NUMBERS = 4, 2**22  # of one sample
MOST_NAMED = 8  # clients or classes listed in a line of text


@dataclass(frozen=True)
class InputSpec:
    """Shape and type of one sample: uint8 images ``(3, H, W)``, or float32 of any shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.uint8

    @classmethod
    def of(cls, x: Tensor) -> InputSpec:
        """Of the samples ``x`` ``(N, ...)``."""
        return cls(tuple(x.shape[1:]), x.dtype)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}

    @classmethod
    def from_json(cls, values: Any) -> InputSpec:
        """Reads `to_json`, which may come from a stranger.

        Raises:
            ValueError: if it is something else, or far too large.
        """
        shape, dtype = tuple(values["shape"]), {"uint8": torch.uint8, "float32": torch.float32}.get(values["dtype"])
        sized = 0 < len(shape) <= MOST_AXES and all(type(side) is int and side > 0 for side in shape)
        if dtype is None or not sized or math.prod(shape) > MOST_NUMBERS:
            raise ValueError(f"samples of {values['dtype']} {shape}")
        if dtype == torch.uint8 and (len(shape), shape[0]) != (3, 3):
            raise ValueError(f"images of shape {shape}")
        return cls(shape, dtype)

    @property
    def is_image(self) -> bool:
        """Whether samples are pixels that a person can look at."""
        return self.dtype == torch.uint8

    def zeros(self, count: int) -> Tensor:
        """Blank samples."""
        return torch.zeros(count, *self.shape, dtype=self.dtype)

    def noise(self, count: int) -> Tensor:
        """Random samples, the same at every call: pixels of all values, or standard normal numbers."""
        generator = torch.Generator().manual_seed(0)
        if self.is_image:
            return torch.randint(0, 256, (count, *self.shape), generator=generator, dtype=torch.uint8)
        return torch.randn(count, *self.shape, generator=generator)

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape[1:] if self.is_image else self.shape))
        kind = {1: "features", 2: "signals (channels x time)"}.get(len(self.shape), "inputs")
        return f"images {size}" if self.is_image else f"{size} {kind}"


@dataclass(frozen=True, repr=False)
class Split:
    """Some labelled samples: ``x`` ``(N, ...)`` uint8 images or float32, ``y`` int64 ``(N,)``."""

    x: Tensor
    y: Tensor

    def __repr__(self) -> str:
        return f"<Split of {len(self)} samples, {InputSpec.of(self.x)}>"

    def __len__(self) -> int:
        return int(self.y.shape[0])

    def take(self, index: Tensor | Sequence[int]) -> Split:
        """The samples at ``index``, in that order."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        return Split(self.x[rows], self.y[rows])

    @classmethod
    def from_numpy(cls, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Split:
        """From floats ``(N, ...)``, or uint8 ``(N, H, W)``, ``(N, H, W, 1)`` or ``(N, H, W, 3)``, grey or in colour."""
        labels = torch.from_numpy(np.asarray(y, dtype=np.int64).copy())
        if x.dtype != np.uint8:
            return cls(torch.from_numpy(np.array(x, dtype=np.float32)), labels)
        if x.ndim == 3:
            x = x[..., None]
        if x.shape[-1] == 1:
            x = np.repeat(x, 3, axis=-1)
        images = torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))
        return cls(images, labels)


@dataclass(frozen=True)
class DataOptions:
    """How data is read, whatever its source.

    Attributes:
        data_dir: where downloaded benchmarks lie; see `catalog.data_root` for None.
        image_size: side of the images; None for the source's default.
        scale: how inputs other than images are standardised; see `scaling.scale`.
        target: the column of a table to predict.
        clients: the column of a table that names each row's client.
        split: the column of a table that says train, validation or test.
        drop: columns of a table that are no inputs, separated by commas.
        seed: of random splits.
    """

    data_dir: Path | None = None
    image_size: int | None = None
    scale: Literal["client", "federated", "none"] = "client"
    target: str | None = None
    clients: str | None = None
    split: str | None = None
    drop: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class Client:
    """One site's data. ``validation`` may be empty; ``train`` and ``test`` may not."""

    name: str
    train: Split
    validation: Split
    test: Split

    @functools.cached_property
    def checksum(self) -> str:
        """SHA-256 of the samples and labels."""
        digest = hashlib.sha256()
        for split in (self.train, self.validation, self.test):
            digest.update(np.array(split.x.shape, dtype=np.int64).tobytes())
            digest.update(split.x.contiguous().numpy().tobytes())
            digest.update(split.y.contiguous().numpy().tobytes())
        return digest.hexdigest()


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
        warnings: those of the notes that probably point at a mistake, so they are also shown before a run.
        attachments: texts by file name that a run folder stores with the result: how a table was encoded and split.
    """

    name: str
    clients: tuple[Client, ...]
    classes: tuple[str, ...]
    notes: tuple[str, ...] = ()
    preset: Mapping[str, Any] = field(default_factory=dict)
    averages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    attachments: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    has_samples: ClassVar[bool] = True  # those of a `RemoteFederation` are blank

    def __post_init__(self) -> None:
        if not self.clients:
            raise UserError(f"{self.name}: no clients")
        names = [client.name for client in self.clients]
        if len(set(names)) != len(names):
            raise UserError(f"{self.name}: client names must differ, got {', '.join(names)}")
        for client in self.clients:
            for part, split in (("train", client.train), ("validation", client.validation), ("test", client.test)):
                self._check(f"{self.name}: client '{client.name}', {part}", split, part != "validation")

    def _check(self, where: str, split: Split, needed: bool) -> None:
        if len(split) == 0:
            if needed:
                raise UserError(f"{where}: no samples")
            return
        x, own, first = split.x, InputSpec.of(split.x), self.input
        is_image = own.is_image and x.ndim == 4 and x.shape[1] == 3
        if not is_image and (x.dtype != torch.float32 or x.ndim < 2):
            got = f"{x.dtype} {tuple(x.shape)}"
            raise UserError(f"{where}: samples must be uint8 images (N, 3, H, W) or float32 (N, ...), got {got}")
        if x.shape[0] != len(split):
            raise UserError(f"{where}: {x.shape[0]} samples but {len(split)} labels")
        if own != first:
            raise UserError(f"{where}: {own}, but the first client has {first}; all samples must have one shape")
        low, high = int(split.y.min()), int(split.y.max())
        if low < 0 or high >= len(self.classes):
            bad = low if low < 0 else high
            raise UserError(f"{where}: label {bad} is out of range, allowed are 0..{len(self.classes) - 1}")

    @property
    def names(self) -> tuple[str, ...]:
        """The clients' names, in table order."""
        return tuple(client.name for client in self.clients)

    @property
    def input(self) -> InputSpec:
        """Shape and type of one sample, the same at every client."""
        return InputSpec.of(self.clients[0].train.x)

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

    def class_counts(self) -> dict[str, list[int]]:
        """How many training samples of each class a client has, by client; empty where that is not known."""
        return {client.name: client.train.y.bincount(minlength=len(self.classes)).tolist() for client in self.clients}

    @property
    def all_notes(self) -> tuple[str, ...]:
        """The notes, and one for each way in which clients lack samples of classes.

        Those of data that lies elsewhere are the notes that were written where it lies.
        """
        return (*self.notes, *(f"{line[:1].upper()}{line[1:]}." for line in self._lacks()))

    def _lacks(self) -> list[str]:
        """Who lacks samples of which classes, a line for each kind of lack."""
        untrained, single, absent = {}, {}, {}
        trained = {client.name: set(client.train.y.tolist()) for client in self.clients} if self.has_samples else {}
        anywhere = set().union(*trained.values())
        for client in self.clients if self.has_samples else ():
            own, tested = trained[client.name], set(client.test.y.tolist())
            if tested - own:
                untrained[client.name] = tested - own
            elif len(own) == 1 < len(self.classes):
                single[client.name] = own
            if anywhere - own - tested and client.name not in single:
                absent[client.name] = anywhere - own - tested
        return [
            *self._listed("tested on classes without a training sample of them", untrained),
            *self._listed("samples of one class only", single),
            *self._listed("neither training nor test samples of classes that others have", absent),
        ]

    def _listed(self, what: str, labels: Mapping[str, set[int]]) -> list[str]:
        """One line about some clients and their classes; none if there are none."""
        shown = [f"{name} ({self._named(own)})" for name, own in [*labels.items()][:MOST_NAMED]]
        more = f", and {len(labels) - MOST_NAMED} more clients" if len(labels) > MOST_NAMED else ""
        return [f"{what}: {', '.join(shown)}{more}"] if labels else []

    def _named(self, labels: set[int]) -> str:
        named = ", ".join(self.classes[label] for label in sorted(labels)[:MOST_NAMED])
        return f"{named}, ..." if len(labels) > MOST_NAMED else named

    def describe(self) -> list[str]:
        """What was read, in one line, and a warning for each thing that is probably a mistake."""
        sizes = [f"{name} {'/'.join(map(str, own.values()))}" for name, own in self.samples().items()]
        more = f", and {len(sizes) - MOST_NAMED} more" if len(sizes) > MOST_NAMED else ""
        many = "s" * (len(self.clients) != 1)
        line = (
            f"{self.name}: {len(self.clients)} client{many}, {len(self.classes)} classes, {self.input}; "
            f"train/validation/test: {', '.join(sizes[:MOST_NAMED])}{more}"
        )
        warnings = self._warnings()
        if len(warnings) >= MOST_NAMED:
            hidden = len(warnings) + 1 - MOST_NAMED
            warnings = [*warnings[: MOST_NAMED - 1], f"({hidden} more warnings)"]
        return [line, *warnings]

    def _warnings(self) -> list[str]:
        anywhere = set().union(*(client.train.y.tolist() for client in self.clients))
        found = [f"warning: {line}" for line in self.warnings]
        unseen = {label for label in range(len(self.classes)) if label not in anywhere}
        if unseen:
            count = f"{len(unseen)} of {len(self.classes)} classes"
            found.append(f"warning: {count} have no training sample ({self._named(unseen)})")
        return [*found, *(f"warning: {line}" for line in self._lacks())]

    @functools.cached_property
    def checksums(self) -> dict[str, str]:
        """SHA-256 of every client's samples and labels, which trace a number back to its data."""
        return {client.name: client.checksum for client in self.clients}


def stratified_order(labels: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """An order of the samples in which every run of neighbours has about the class shares of the whole.

    Args:
        labels: ``(N,)`` classes.
        keys: ``(N,)`` distinct numbers that order the samples within a class, e.g. random ones.

    Returns:
        ``(N,)`` indices. The i-th of a class's n samples stands at (i + 1/2)/n of the way.
    """
    position = np.empty(len(labels))
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        position[rows[np.argsort(keys[rows])]] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.lexsort((keys, position))
