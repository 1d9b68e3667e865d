"""A federation whose data lies elsewhere: at real sites, or on the machine of a run that is only read."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch

from fedc2i.data.federation import Client, Federation, InputSpec, Split

if TYPE_CHECKING:
    from fedc2i.data.schema import Schema

PIXEL = InputSpec((3, 1, 1))  # where nobody looks at the samples
SITES = "sites"  # what the data of a run between real sites is called


@dataclass(frozen=True)
class RemoteFederation(Federation):
    """Only names, classes, shapes and sizes are known here; the samples are blank.

    Attributes:
        sizes: how many samples the clients report.
        digests: the checksums of their data, if they are known.
        counts: their training samples of each class, if they are known; real sites tell nobody.
        schema: on which they have agreed, if their data are tables.
    """

    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)
    counts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    schema: Schema | None = None

    has_samples: ClassVar[bool] = False

    def samples(self) -> dict[str, dict[str, int]]:
        """How many samples the clients report."""
        return {name: dict(self.sizes.get(name, {})) for name in self.names}

    def class_counts(self) -> dict[str, list[int]]:
        """Those of data that was here once."""
        return {name: list(own) for name, own in self.counts.items()}

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums of data that was here once; not even a digest leaves a real site."""
        return dict(self.digests)


def blank_clients(
    names: Sequence[str], sample: InputSpec = PIXEL, without_validation: Collection[str] = ()
) -> tuple[Client, ...]:
    """Clients with blank samples of this shape and type, some without validation data."""
    blank = Split(sample.zeros(2), torch.zeros(2, dtype=torch.int64))
    none = blank.take([])
    return tuple(Client(name, blank, none if name in without_validation else blank, blank) for name in names)
