"""A federation whose data lies elsewhere: at the sites of a real one, or behind a run that is only read back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedc2i.data.federation import Client, Federation, Split


@dataclass(frozen=True)
class RemoteFederation(Federation):
    """Names, classes, image shape and sizes are all that is known here; the images are blank.

    Attributes:
        sizes: how many samples the clients say that they have.
        digests: the checksums of their data, where they are known.
    """

    sizes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)

    def samples(self) -> dict[str, dict[str, int]]:
        """As the clients say."""
        return {name: dict(self.sizes.get(name, {})) for name in self.names}

    @property
    def checksums(self) -> dict[str, str]:
        """Of data that was here once; not even a digest leaves a real site."""
        return dict(self.digests)


def blank_clients(
    names: Sequence[str], shape: Sequence[int], without_validation: Collection[str] = ()
) -> tuple[Client, ...]:
    """Clients with nothing but a name and the shape of their images, some without validation data."""
    blank = Split(torch.zeros(2, *shape, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))
    none = blank.take([])
    return tuple(Client(name, blank, none if name in without_validation else blank, blank) for name in names)
