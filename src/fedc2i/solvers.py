"""Small quadratic programmes, solved exactly: the aggregation weights of FedPAC, FedIC, pFedGraph and FedCALM.

K is a number of clients, so the problems are tiny; what matters is that they are solved to the end, also when matrices
are singular, clients are duplicates of each other, or everything is zero. All arithmetic is in double precision, and
results do not change when a problem is multiplied by a positive constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_Array = np.ndarray[Any, np.dtype[np.float64]]

TOLERANCE = 1e-10  # of the optimality conditions, for a problem scaled so that its largest coefficient is 1
_WARM_UP = 100  # projected gradient steps, all problems at once, before each is finished by its own active set
_SWEEPS = 20  # of coordinate ascent, likewise


def project_simplex(points: Tensor) -> Tensor:
    """The nearest point (L2) of the probability simplex, for each of ``(..., K)`` points; float64."""
    points = points.to(torch.float64)
    ordered = points.sort(-1, descending=True).values
    ranks = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    excess = (ordered.cumsum(-1) - 1) / ranks
    support = (ordered > excess).sum(-1, keepdim=True).clamp(min=1)
    return (points - excess.gather(-1, support - 1)).clamp(min=0)


def simplex_qp(quadratic: Tensor, linear: Tensor | None = None) -> Tensor:
    """argmin over the probability simplex of αᵀQα + bᵀα.

    A few accelerated projected gradient steps find most of the support; a primal active-set method, which ends after
    finitely many steps, finishes from there. Weights outside the support are exactly 0.

    Args:
        quadratic: ``(..., K, K)`` symmetric positive semidefinite Q, possibly singular.
        linear: ``(..., K)`` b; none is 0.

    Returns:
        ``(..., K)`` float64 weights; optimality conditions hold to `TOLERANCE`, relative to the largest coefficient.
    """
    q = quadratic.to(torch.float64)
    q = (q + q.mT) / 2
    b = torch.zeros_like(q[..., 0]) if linear is None else linear.to(torch.float64).expand(q.shape[:-1])
    size = torch.maximum(q.abs().amax((-1, -2)), b.abs().amax(-1))
    size = torch.where(size > 0, size, 1.0)
    q, b = q / size[..., None, None], b / size[..., None]
    start = _warm_up(q, b).reshape(-1, q.shape[-1]).cpu().numpy()
    problems = zip(q.reshape(-1, *q.shape[-2:]).cpu().numpy(), b.reshape(-1, b.shape[-1]).cpu().numpy(), strict=True)
    finished = [
        _finish(2 * own_q, own_b, own, np.inf, True) for (own_q, own_b), own in zip(problems, start, strict=True)
    ]
    return torch.from_numpy(np.stack(finished)).reshape(b.shape).to(q.device)


def _warm_up(q: Tensor, b: Tensor) -> Tensor:
    """Accelerated projected gradient from equal weights; ``(..., K)``."""
    step = 1 / (2 * torch.linalg.matrix_norm(q, 2)).clamp(min=1e-6)[..., None]
    weights = ahead = torch.full_like(b, 1 / b.shape[-1])
    for t in range(_WARM_UP):
        previous = weights
        weights = project_simplex(ahead - step * (2 * (q @ ahead[..., None])[..., 0] + b))
        ahead = weights + t / (t + 3) * (weights - previous)
    return weights


def combination_weights(variances: Tensor, points: Tensor) -> Tensor:
    """For every client m the α on the simplex that minimises Σ_i α_i² V_i + ‖z_m − Σ_i α_i z_i‖².

    Args:
        variances: ``(K,)`` V.
        points: ``(K, P)`` z.

    Returns:
        ``(K, K)`` float64, row m the weights of client m.
    """
    points = points.to(torch.float64)
    points = points - points.mean(0)  # the programme sees differences only; small numbers keep them precise
    gram = points @ points.mT
    gaps = gram.diagonal()[:, None, None] - gram[:, :, None] - gram[:, None, :] + gram  # ⟨z_m − z_j, z_m − z_k⟩
    return simplex_qp(gaps + torch.diag(variances.to(torch.float64)))


def box_qp(gram: Tensor, linear: Tensor, upper: float) -> Tensor:
    """argmax over 0 ≤ λ ≤ upper of bᵀλ − ½λᵀGλ.

    A few sweeps of cyclic coordinate ascent, λ_i ← clip(λ_i + (b − Gλ)_i / G_ii, 0, upper), which are slow only where
    rows are near parallel; the active-set method finishes from there.

    Args:
        gram: ``(K, K)`` symmetric positive semidefinite G, possibly singular.
        linear: ``(K,)`` b.
        upper: the bound, above 0.

    Returns:
        ``(K,)`` float64; optimality conditions hold to `TOLERANCE`, relative to the largest coefficient.
    """
    g: _Array = gram.to(torch.float64).cpu().numpy() * upper  # in units of the bound
    b: _Array = linear.to(torch.float64).cpu().numpy()
    size = max(np.abs(g).max(), np.abs(b).max()) or 1.0
    g, b = g / size, b / size
    share = np.where(b > 0, 1.0, 0.0)  # of the bound; all that counts in a row of zeros
    for _ in range(_SWEEPS):
        for i in np.flatnonzero(np.diag(g) > 0):
            share[i] = np.clip(share[i] + (b[i] - g[i] @ share) / g[i, i], 0, 1)
    return torch.from_numpy(upper * _finish(g, -b, share, 1.0, False)).to(linear.device)


def _finish(h: _Array, b: _Array, x: _Array, upper: float, on_simplex: bool) -> _Array:
    """argmin of ½xᵀHx + bᵀx over 0 ≤ x ≤ upper, if asked with Σx = 1, from a feasible x: a primal active-set method.

    Each step goes to the optimum of the face that x is on, or to a bound of it; from a face's optimum, the coordinate
    with the steepest descent leaves its bound. Faces do not come back, as the objective falls.
    """
    for _ in range(100 + 20 * len(b)):
        slope = h @ x + b
        slope -= x @ slope if on_simplex else 0.0  # less the price of the constraint
        free = (x > 0) & (x < upper)
        if not free.any() or np.abs(slope[free]).max() <= TOLERANCE:
            gain = np.maximum(np.where(x < upper, -slope, 0), np.where(x > 0, slope, 0)) * ~free
            if gain.max() <= TOLERANCE:
                break
            free[np.argmax(gain)] = True
        index = np.flatnonzero(free)
        direction, length = _descent(h[np.ix_(index, index)], slope[index], on_simplex)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(direction < 0, -x[index] / direction, (upper - x[index]) / direction)
        room[direction == 0] = np.inf
        length = min(length, room.min())
        if not 0 < length < np.inf:
            break  # what is left is rounding
        moved = np.clip(x[index] + length * direction, 0, upper)
        hit = room <= length * (1 + 1e-12)
        x[index] = np.where(hit, np.where(direction < 0, 0.0, upper), moved)
        if on_simplex:
            x /= x.sum()
    return x


def _descent(h: _Array, slope: _Array, on_simplex: bool) -> tuple[_Array, float]:
    """The way to a face's optimum and how far it is: 1, or infinity along a direction without curvature."""
    centre = np.eye(len(h)) - (1 / len(h) if on_simplex else 0)
    curvature, axes = np.linalg.eigh(centre @ h @ centre)
    along = axes.T @ (centre @ slope)
    curved = curvature > 1e-15
    flat = ~curved & (np.abs(along) > TOLERANCE / 10)
    if flat.any():
        return -centre @ axes[:, flat] @ along[flat], np.inf
    return -centre @ axes[:, curved] @ (along[curved] / curvature[curved]), 1.0
