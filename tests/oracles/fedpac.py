"""FedPAC's statistics, prototypes and head weights, sample by sample and pair by pair; scipy solves the programme."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oracles.quadratic import simplex_by_scipy

Array = NDArray[np.float64]


@dataclass
class Statistics:
    """Of one client: mean features and counts of its classes, V, and h."""

    means: dict[int, Array]
    counts: dict[int, int]
    variance: float
    reference: Array


def statistics(features: Tensor, y: Tensor, classes: int) -> Statistics:
    """From the features of all samples."""
    h, total = features.double().numpy(), len(y)
    means, counts = {}, {}
    variance, reference = 0.0, np.zeros((classes, h.shape[1]))
    for c in range(classes):
        own = [h[n] for n in range(total) if int(y[n]) == c]
        if own:
            means[c], counts[c] = np.mean(own, axis=0), len(own)
            share = len(own) / total
            reference[c] = share * means[c]
            variance += share * np.mean([v @ v for v in own]) - share**2 * means[c] @ means[c]
    return Statistics(means, counts, variance / total, reference)


def class_variance(features: Tensor, y: Tensor, c: int) -> float:
    """FedIC's V of one class: the spread of its features around their mean, over their number."""
    own = [v for v, label in zip(features.double().numpy(), y.tolist(), strict=True) if label == c]
    mean = np.mean(own, axis=0)
    return float((np.mean([v @ v for v in own]) - mean @ mean) / len(own))


def weights(variances: list[float], points: list[Array]) -> Array:
    """Row m: the α of client m."""
    count = len(points)
    rows = []
    for m in range(count):
        q = np.diag(np.array(variances, dtype=np.float64))
        for j in range(count):
            for k in range(count):
                q[j, k] += np.sum((points[m] - points[j]) * (points[m] - points[k]))
        rows.append(simplex_by_scipy(q, np.zeros(count)))
    return np.stack(rows)


def global_prototypes(clients: list[Statistics], classes: int) -> dict[int, Array]:
    """Count-weighted means over the clients that have a class."""
    found = {}
    for c in range(classes):
        own = [client for client in clients if c in client.means]
        if own:
            total = sum(client.counts[c] for client in own)
            found[c] = sum(client.counts[c] * client.means[c] for client in own) / total
    return found
