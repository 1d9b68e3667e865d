"""FedProto with lists and dictionaries, one sample at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

Vector = list[float]


def client_prototypes(features: Tensor, y: Tensor) -> dict[int, Vector]:
    """The mean feature of every class that there is."""
    groups: dict[int, list[Vector]] = {}
    for h, label in zip(features.double().tolist(), y.tolist(), strict=True):
        groups.setdefault(label, []).append(h)
    return {label: [sum(column) / len(group) for column in zip(*group, strict=True)] for label, group in groups.items()}


def global_prototypes(
    clients: Sequence[dict[int, Vector]], counts: Sequence[dict[int, int]] | None = None
) -> dict[int, Vector]:
    """The mean over the clients that have a class, weighted by their samples of it if those are given."""
    result = {}
    for label in sorted({label for own in clients for label in own}):
        owners = [k for k, own in enumerate(clients) if label in own]
        weights = [1 if counts is None else counts[k][label] for k in owners]
        result[label] = [
            sum(w * clients[k][label][j] for w, k in zip(weights, owners, strict=True)) / sum(weights)
            for j in range(len(clients[owners[0]][label]))
        ]
    return result


def loss(logits: Tensor, features: Tensor, y: Tensor, prototypes: dict[int, Vector], ld: float) -> float:
    """CE + ld · MSE, means over the batch and the feature's dimensions; nothing for a class without prototype."""
    total = 0.0
    for z, h, label in zip(logits.double().tolist(), features.double().tolist(), y.tolist(), strict=True):
        total += math.log(sum(math.exp(v) for v in z)) - z[label]
        if label in prototypes:
            total += ld * sum((a - b) ** 2 for a, b in zip(h, prototypes[label], strict=True)) / len(h)
    return total / len(y)


def nearest(features: Tensor, prototypes: dict[int, Vector]) -> list[int]:
    """The class of the nearest prototype, by Euclidean distance."""
    return [min(prototypes, key=lambda label, h=h: math.dist(h, prototypes[label])) for h in features.double().tolist()]
