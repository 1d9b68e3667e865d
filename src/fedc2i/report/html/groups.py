"""The nodes of a who-helps-whom graph: clients, or for many of them their domains or clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedc2i.analysis.domain_share import domain_of
from fedc2i.runs.results import Array

MOST_NODES = 16
CLUSTERS = 8


@dataclass(frozen=True)
class Groups:
    """Nodes of the graph.

    Attributes:
        kind: ``client``, ``domain`` or ``cluster``.
        labels: of each node.
        members: for each client the node it belongs to.
    """

    kind: str
    labels: tuple[str, ...]
    members: tuple[int, ...]


def grouped(names: Sequence[str], vector: Array | None) -> Groups:
    """Each client a node; beyond `MOST_NODES` each domain, or clusters of clients that listen to each other.

    Args:
        names: of the clients; parts of a domain are written ``SVHN/3``.
        vector: ``(M, M)`` influence vectors to cluster by, or none.
    """
    domains = list(dict.fromkeys(map(domain_of, names)))
    if len(names) <= MOST_NODES:
        return Groups("client", tuple(names), tuple(range(len(names))))
    if 1 < len(domains) <= MOST_NODES:
        members = tuple(domains.index(domain_of(name)) for name in names)
        return Groups("domain", tuple(domains), members)
    if vector is None:
        return Groups("cluster", ("all clients",), (0,) * len(names))
    members = clusters(vector, CLUSTERS)
    return Groups("cluster", tuple(f"group {k + 1}" for k in range(max(members) + 1)), members)


def clusters(vector: Array, most: int) -> tuple[int, ...]:
    """Average-linkage clusters by mutual influence, numbered by their first client; what nobody measured counts 0."""
    shares = np.where(np.isfinite(vector), vector, 0.0)
    mutual = (shares + shares.T) / 2
    np.fill_diagonal(mutual, 0.0)
    distance = 1 - mutual / (mutual.max() or 1.0)
    np.fill_diagonal(distance, 0.0)
    found = fcluster(linkage(squareform(distance, checks=False), "average"), most, "maxclust")
    order = list(dict.fromkeys(found.tolist()))
    return tuple(order.index(one) for one in found.tolist())
