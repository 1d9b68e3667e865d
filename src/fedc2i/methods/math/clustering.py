"""Clusters of clients from their pairwise similarity, without a number of clusters to choose.

A clustering is a boolean matrix ``same`` ``(..., K, K)``: who is in one cluster with whom. Absent clients are in none.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812


def cosine_similarity(points: Tensor) -> Tensor:
    """``(..., K, d)`` points to ``(..., K, K)`` cosines, float64; a point at the origin has cosine 0 with all."""
    units = F.normalize(points.to(torch.float64), dim=-1, eps=torch.finfo(torch.float64).tiny)
    return units @ units.mT


def first_neighbours(similarity: Tensor, present: Tensor) -> Tensor:
    """The first partition of FINCH: everyone is linked to its nearest neighbour; clusters are what hangs together.

    Sarfraz, Sharma, Stiefelhagen, "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019.
    Ties go to the lower index, so the result is deterministic; two present clients are always one cluster.

    Args:
        similarity: ``(..., K, K)``.
        present: ``(..., K)`` booleans, who takes part.

    Returns:
        ``(..., K, K)`` booleans.
    """
    alone = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
    pairs = present[..., None] & present[..., None, :] & ~alone
    nearest = similarity.masked_fill(~pairs, -torch.inf).argmax(-1)
    links = F.one_hot(nearest, similarity.shape[-1]).to(torch.bool) & pairs
    return _connected(links, present)


def linked_above(similarity: Tensor, present: Tensor, tau: float) -> Tensor:
    """Agglomerative clustering by single linkage: pairs at least ``tau`` similar are linked; shapes as above."""
    return _connected((similarity >= tau) & present[..., None] & present[..., None, :], present)


def _connected(links: Tensor, present: Tensor) -> Tensor:
    """Connected components of the undirected graph, by squaring its adjacency matrix."""
    same = links | links.mT | torch.diag_embed(present)
    for _ in range(max(1, links.shape[-1] - 1).bit_length()):
        reach = same.to(torch.float32)
        same = (reach @ reach) > 0
    return same
