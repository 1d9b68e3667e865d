"""Small quadratic programmes handed to scipy, and their optimality conditions written out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

Array = NDArray[np.float64]


def simplex_by_scipy(q: Array, b: Array) -> Array:
    """argmin of αᵀQα + bᵀα over the simplex: the best of SLSQP from the middle and from every corner."""
    size = max(np.abs(q).max(), np.abs(b).max(), 1e-300)
    q, b, clients = q / size, b / size, len(b)
    found = [
        minimize(
            lambda a: a @ q @ a + b @ a,
            start,
            jac=lambda a: 2 * q @ a + b,
            bounds=[(0, 1)] * clients,
            constraints={"type": "eq", "fun": lambda a: a.sum() - 1, "jac": lambda a: np.ones(clients)},
            method="SLSQP",
            options={"ftol": 1e-15, "maxiter": 1000},
        )
        for start in (np.full(clients, 1 / clients), *np.eye(clients))
    ]
    best: Array = min(found, key=lambda result: result.fun).x
    return best


def simplex_residual(q: Array, b: Array, a: Array) -> float:
    """By how much a misses feasibility or optimality: slopes equal on its support, none lower outside."""
    slope = 2 * q @ a + b
    size = max(np.abs(q).max(), np.abs(b).max(), 1e-300)
    on_support = np.abs(slope - slope @ a)[a > 0].max() / size
    outside = (slope @ a - slope.min()) / size
    return float(max(on_support, outside, abs(a.sum() - 1), -a.min()))


def box_residual(g: Array, b: Array, x: Array, upper: float) -> float:
    """The same for max bᵀx − ½xᵀGx over the box: slope 0 inside, none pointing inwards at a bound."""
    slope = b - g @ x
    size = max(np.abs(g).max() * max(upper, 1), np.abs(b).max(), 1e-300)
    upwards, downwards = np.where(x < upper, slope, 0).max(), np.where(x > 0, -slope, 0).max()
    return float(max(upwards / size, downwards / size, -x.min(), x.max() - upper))
