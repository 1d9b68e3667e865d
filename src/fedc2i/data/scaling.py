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
    sd: Tensor  # 1 where a feature is constant

    @classmethod
    def fit(cls, parts: Sequence[Tensor]) -> Scaling:
        """Over all samples of some clients; each adds only a count, a sum and a sum of squares."""
        count, total, squares = 0, torch.zeros(()), torch.zeros(())
        for x in parts:
            values = _by_feature(x).to(torch.float64)
            count += values.shape[1]
            total, squares = total + values.sum(1), squares + values.square().sum(1)
        mean = total / count
        variance = (squares - count * mean.square()) / max(1, count - 1)
        constant = variance <= 1e-12 * (squares / count).clamp(min=1e-30)
        return cls(mean, torch.where(constant, 1.0, variance.clamp(min=0).sqrt()))

    def apply(self, x: Tensor) -> Tensor:
        """Scaled samples ``(N, features)`` or ``(N, channels, ...)``."""
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return ((x.to(torch.float64) - self.mean.reshape(shape)) / self.sd.reshape(shape)).to(torch.float32)


def scale(clients: Sequence[Client], how: Scale) -> tuple[Client, ...]:
    """Clients with standardised inputs; images are not changed, as models scale them.

    Args:
        clients: their ``x`` are float32.
        how: ``client``, each by its own training data; ``federated``, all by the sums over their training data; or
            ``none``.
    """
    if how not in get_args(Scale):
        raise UserError(f"scale={how}, allowed are {', '.join(get_args(Scale))}")
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
