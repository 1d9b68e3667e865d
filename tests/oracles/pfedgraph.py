"""pFedGraph's collaboration graph, pair by pair, with scipy for the programme of every client."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from oracles.quadratic import simplex_by_scipy

Array = NDArray[np.float64]


def similarity(models: Array, first: Array, snap: float) -> Array:
    """cos(w_i − w_0, w_j − w_0); above ``snap``, 1."""
    found = np.ones((len(models), len(models)))
    for i, one in enumerate(models - first):
        for j, two in enumerate(models - first):
            cosine = one @ two / (np.linalg.norm(one) * np.linalg.norm(two))
            found[i, j] = 1.0 if cosine > snap or i == j else cosine
    return found


def graph(cosines: Array, shares: Array, alpha: float) -> Array:
    """Row i: argmin over the simplex of α‖a − p‖² − Σ_j a_j cos_ij."""
    rows = [simplex_by_scipy(alpha * np.eye(len(shares)), -2 * alpha * shares - own) for own in cosines]
    return np.stack(rows)
