"""FedCALM for one layer, on vectors, one client after the other; the second stage as the primal problem for scipy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]


def conflict_free(updates: Array) -> Array:
    """The mean of every update with its conflicts projected away, in the order of clients."""
    clean = []
    for i, update in enumerate(updates):
        v = update.copy()
        for j, other in enumerate(updates):
            if j != i and v @ other < 0 and other @ other > 0:
                v = v - (v @ other) / (other @ other) * other
        clean.append(v)
    mean: Array = np.mean(clean, axis=0)
    return mean


def conflict_aware(free: Array, updates: Array, margins: Array, slack: float) -> Array:
    """argmin over d and ξ ≥ 0 of ½‖d − free‖² + C Σξ subject to ⟨d, Δ_i⟩ ≥ margin_i − ξ_i."""
    size, count = len(free), len(updates)
    result = minimize(
        lambda z: 0.5 * np.sum((z[:size] - free) ** 2) + slack * z[size:].sum(),
        np.concatenate([free, np.maximum(margins - updates @ free, 0)]),
        jac=lambda z: np.concatenate([z[:size] - free, np.full(count, slack)]),
        bounds=[(None, None)] * size + [(0, None)] * count,
        constraints={"type": "ineq", "fun": lambda z: updates @ z[:size] - margins + z[size:]},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    d: Array = result.x[:size]
    return d


def layer(updates: Array, epsilon: float, slack: float) -> Array:
    """d for one layer, capped."""
    norms = np.linalg.norm(updates, axis=1)
    free = conflict_free(updates)
    d = conflict_aware(free, updates, epsilon * norms * np.linalg.norm(free), slack)
    return d * min(1.0, norms.max() / max(np.linalg.norm(d), 1e-300))
