"""The nodes of the who-helps-whom graph, which ``js/graph.js`` draws: clients, or of many their domains or clusters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from fedc2i.analysis.weights import domain_of
from fedc2i.runs.results import Array

MOST_NODES = 16
CLUSTERS = 8


@dataclass(frozen=True)
class GraphNodes:
    """Nodes of the graph: clients, domains or clusters."""

    kind: str
    labels: tuple[str, ...]
    members: tuple[int, ...]  # for each client the node it belongs to


def graph_nodes(names: Sequence[str], vector: Array | None) -> GraphNodes:
    """Each client a node; beyond `MOST_NODES` each domain, or clusters of clients that help each other.

    Args:
        names: of the clients; parts of a domain are written ``SVHN/3``.
        vector: ``(M, M)`` influence vectors to cluster by, or None.
    """
    domains = list(dict.fromkeys(map(domain_of, names)))
    if len(names) <= MOST_NODES:
        return GraphNodes("client", tuple(names), tuple(range(len(names))))
    if 1 < len(domains) <= MOST_NODES:
        return GraphNodes("domain", tuple(domains), tuple(domains.index(domain_of(name)) for name in names))
    if vector is None:
        return GraphNodes("cluster", ("all clients",), (0,) * len(names))
    members = clusters(vector, CLUSTERS)
    return GraphNodes("cluster", tuple(f"group {k + 1}" for k in range(max(members) + 1)), members)


def clusters(vector: Array, most: int) -> tuple[int, ...]:
    """Average-linkage clusters by mutual influence, numbered by their first client; unmeasured influence counts 0."""
    shares = np.where(np.isfinite(vector), vector, 0.0)
    mutual = (shares + shares.T) / 2
    np.fill_diagonal(mutual, 0.0)
    distance = 1 - mutual / (mutual.max() or 1.0)
    np.fill_diagonal(distance, 0.0)
    found = fcluster(linkage(squareform(distance, checks=False), "average"), most, "maxclust").tolist()
    order = list(dict.fromkeys(found))
    return tuple(order.index(one) for one in found)
