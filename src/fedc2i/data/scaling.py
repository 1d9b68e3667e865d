"""Standardisation of inputs that are not images: each feature or channel to mean 0 and standard deviation 1.

A run folder stores the means and deviations, so that new samples can be standardised alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Split

Scale = Literal["client", "federated", "none"]
SCALING = "scaling.json"  # in the run folder
MOST_STORED = 2**19  # means of all clients; more would be a file of ten megabytes


@dataclass(frozen=True)
class Scaling:
    """Means and standard deviations, one for each column of a table or channel of a signal."""

    mean: Tensor
    sd: Tensor  # inf where a feature is constant: it becomes 0, in test samples as well
    inputs: tuple[str, ...] = ()  # their names, if they have any
    shared: bool = False  # over the training data of all clients

    @classmethod
    def fit(cls, parts: Sequence[Tensor], inputs: tuple[str, ...] = ()) -> Scaling:
        """Over all samples of some clients; each adds only sums: of its samples, then of their squared distances."""
        values = [_by_feature(x).to(torch.float64) for x in parts]
        count = sum(own.shape[1] for own in values)
        mean = torch.stack([own.sum(1) for own in values]).sum(0) / count
        variance = torch.stack([(own - mean[:, None]).square().sum(1) for own in values]).sum(0) / max(1, count - 1)
        constant = variance.sqrt() <= 1e-12 * mean.abs()
        return cls(mean, torch.where(constant, torch.inf, variance.sqrt()), inputs)

    def apply(self, x: Tensor) -> Tensor:
        """Scaled samples ``(N, features)`` or ``(N, channels, ...)``."""
        shape = (1, -1) + (1,) * (x.ndim - 2)
        return ((x.to(torch.float64) - self.mean.reshape(shape)) / self.sd.reshape(shape)).to(torch.float32)

    def to_json(self) -> dict[str, Any]:
        """As plain values; the deviation of a constant is 0."""
        sd = [value if math.isfinite(value) else 0.0 for value in self.sd.tolist()]
        return {"inputs": list(self.inputs), "mean": self.mean.tolist(), "sd": sd, "shared": self.shared}

    @classmethod
    def from_json(cls, values: Any) -> Scaling:
        """Reads `to_json`, which may come from a stranger.

        Raises:
            ValueError: if it is something else.
        """
        inputs = tuple(str(name) for name in values["inputs"])
        mean, sd = (torch.tensor([*map(float, values[name])], dtype=torch.float64) for name in ("mean", "sd"))
        finite = bool(torch.isfinite(mean).all() and torch.isfinite(sd).all() and (sd >= 0).all())
        if not finite or len(mean) != len(sd) or len(inputs) not in (0, len(mean)):
            raise ValueError("means and deviations that do not fit")
        return cls(mean, torch.where(sd > 0, sd, torch.inf), inputs, bool(values["shared"]))


@dataclass(frozen=True)
class ScaledClient(Client):
    """One site's data, standardised, and how that was done."""

    scaling: Scaling = field(kw_only=True)


def attachment(clients: Sequence[Client]) -> dict[str, str]:
    """The file that a run folder stores of these clients, by name; none if nothing was standardised, or too much."""
    known = {client.name: client.scaling for client in clients if isinstance(client, ScaledClient)}
    if not known or sum(own.mean.numel() for own in known.values()) > MOST_STORED:
        return {}
    return {SCALING: json.dumps({"clients": {name: own.to_json() for name, own in known.items()}})}


def check_scale(how: str) -> None:
    """Refuses what is no `Scale`."""
    if how not in get_args(Scale):
        raise UserError(f"scale={how}, allowed are {', '.join(get_args(Scale))}")


def scale(clients: Sequence[Client], how: Scale, inputs: tuple[str, ...] = ()) -> tuple[Client, ...]:
    """Clients with standardised inputs; images are not changed, as models scale them.

    Args:
        clients: their ``x`` are float32.
        how: ``client``, each by its own training data; ``federated``, all by the sums over their training data; or
            ``none``.
        inputs: names of the features or channels, if they have any.
    """
    check_scale(how)
    if how == "none" or clients[0].train.x.dtype == torch.uint8:
        return tuple(clients)
    if how == "federated":
        together = replace(Scaling.fit([client.train.x for client in clients], inputs), shared=True)
        return tuple(_scaled(client, together) for client in clients)
    return tuple(_scaled(client, Scaling.fit([client.train.x], inputs)) for client in clients)


def _scaled(client: Client, by: Scaling) -> Client:
    def scaled(split: Split) -> Split:
        return Split(by.apply(split.x), split.y) if len(split) else split

    parts = (scaled(split) for split in (client.train, client.validation, client.test))
    return ScaledClient(client.name, *parts, scaling=by)


def _by_feature(x: Tensor) -> Tensor:
    """``(N, features, ...)`` to ``(features, values)``."""
    return x.movedim(1, 0).flatten(1)
