"""FedIC's clusters, prototypes and row weights for one class, with plain loops and scipy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles import fedpac

Array = NDArray[np.float64]


def cosine(a: Array, b: Array) -> float:
    """⟨a, b⟩ over their lengths."""
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def finch(points: dict[int, Array]) -> list[set[int]]:
    """Clusters of clients: everyone joins the cluster of its nearest neighbour."""
    clusters = [{m} for m in points]
    for m, point in points.items():
        others = [k for k in points if k != m]
        if others:
            nearest = max(others, key=lambda k, point=point: cosine(point, points[k]))
            ours = [cluster for cluster in clusters if m in cluster or nearest in cluster]
            clusters = [cluster for cluster in clusters if cluster not in ours] + [set.union(*ours)]
    return clusters


def one_class(
    points: dict[int, Array], counts: dict[int, int], variances: dict[int, float]
) -> tuple[dict[int, Array], dict[int, dict[int, float]]]:
    """For every client that has the class, the prototype of its cluster, and its weights over the cluster."""
    prototypes, weights = {}, {}
    for cluster in finch(points):
        who = sorted(cluster)
        alpha = fedpac.weights([variances[m] for m in who], [points[m] for m in who])
        for number, m in enumerate(who):
            total = sum(counts[k] for k in who)
            prototypes[m] = sum(counts[k] * points[k] for k in who) / total
            weights[m] = dict(zip(who, alpha[number].tolist(), strict=True))
    return prototypes, weights
