"""Standardisation of inputs that are not images: each feature or channel to mean 0 and standard deviation 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Split

Scale = Literal["client", "federated", "none"]


@dataclass(frozen=True)
class Scaling:
    """Means and standard deviations, one for each column of a table or channel of a signal."""

    mean: Tensor
    sd: Tensor  # inf where a feature is constant: it becomes 0, in test samples as well

    @classmethod
    def fit(cls, parts: Sequence[Tensor]) -> Scaling:
        """Over all samples of some clients; each adds only sums: of its samples, then of their squared distances."""
        values = [_by_feature(x).to(torch.float64) for x in parts]
        count = sum(own.shape[1] for own in values)
        mean = torch.stack([own.sum(1) for own in values]).sum(0) / count
        variance = torch.stack([(own - mean[:, None]).square().sum(1) for own in values]).sum(0) / max(1, count - 1)
        constant = variance.sqrt() <= 1e-12 * mean.abs()
        return cls(mean, torch.where(constant, torch.inf, variance.sqrt()))

    def apply(self, x: Tensor) -> Tensor:
        """Scaled samples ``(N, features)`` or ``(N, channels, ...)``."""
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return ((x.to(torch.float64) - self.mean.reshape(shape)) / self.sd.reshape(shape)).to(torch.float32)


def check_scale(how: str) -> None:
    """Refuses what is no `Scale`."""
    if how not in get_args(Scale):
        raise UserError(f"scale={how}, allowed are {', '.join(get_args(Scale))}")


def scale(clients: Sequence[Client], how: Scale) -> tuple[Client, ...]:
    """Clients with standardised inputs; images are not changed, as models scale them.

    Args:
        clients: their ``x`` are float32.
        how: ``client``, each by its own training data; ``federated``, all by the sums over their training data; or
            ``none``.
    """
    check_scale(how)
    if how == "none" or clients[0].train.x.dtype == torch.uint8:
        return tuple(clients)
    together = Scaling.fit([client.train.x for client in clients]) if how == "federated" else None
    return tuple(_scaled(client, together or Scaling.fit([client.train.x])) for client in clients)


def _scaled(client: Client, by: Scaling) -> Client:
    def scaled(split: Split) -> Split:
        return Split(by.apply(split.x), split.y) if len(split) else split

    return replace(client, train=scaled(client.train), validation=scaled(client.validation), test=scaled(client.test))


def _by_feature(x: Tensor) -> Tensor:
    """``(N, features, ...)`` to ``(features, values)``."""
    return x.movedim(1, 0).flatten(1)
