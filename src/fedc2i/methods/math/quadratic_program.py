"""Small quadratic programmes, solved exactly: the aggregation weights of FedPAC, FedIC, pFedGraph and FedCALM.

K is a number of clients, so the problems are tiny; what matters is that they are solved to the end, also when matrices
are singular, clients are duplicates of each other, or everything is zero. All arithmetic is in double precision, and on
the CPU, many problems at once: their steps are too small to be worth a launch on a GPU each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_Array = np.ndarray[Any, np.dtype[np.float64]]
_Mask = np.ndarray[Any, np.dtype[np.bool_]]

TOLERANCE = 1e-10  # of the optimality conditions, for a problem scaled so that its largest coefficient is 1
_FEW = 16  # clients; with more, first-order steps to start from cost less than they save the active set: measured
_WARM_UP = 100  # such steps, of projected gradient
_SWEEPS = 20  # such sweeps, of coordinate ascent
_AT_ONCE = 1 << 20  # numbers in the matrices worked on at once: bounds memory


def project_simplex(points: Tensor) -> Tensor:
    """The nearest point (L2) of the probability simplex, for each of ``(..., K)`` points; float64."""
    points = points.to(torch.float64)
    ordered = points.sort(-1, descending=True).values
    ranks = torch.arange(1, points.shape[-1] + 1, dtype=points.dtype, device=points.device)
    excess = (ordered.cumsum(-1) - 1) / ranks
    support = (ordered > excess).sum(-1, keepdim=True).clamp(min=1)
    return (points - excess.gather(-1, support - 1)).clamp(min=0)


def simplex_qp(quadratic: Tensor, linear: Tensor | None = None, members: Tensor | None = None) -> Tensor:
    """argmin over the probability simplex of αᵀQα + bᵀα, for many problems: leading axes are broadcast.

    Q is ``(..., K, K)``, positive semidefinite, possibly singular; b ``(..., K)``; ``members`` ``(..., K)`` says who
    may have weight, at least one. The float64 weights ``(..., K)`` are exactly 0 outside the support; optimality
    conditions hold to `TOLERANCE`, relative to the largest coefficient. A primal active-set method, which ends after
    finitely many steps, from equal weights; with many clients, from a few accelerated projected gradient steps.
    """
    clients = quadratic.shape[-1]
    q = quadratic.to("cpu", torch.float64)
    b = torch.zeros(clients, dtype=torch.float64) if linear is None else linear.to("cpu", torch.float64)
    who = torch.ones(clients, dtype=torch.bool) if members is None else members.cpu()
    batch = np.broadcast_shapes(q.shape[:-2], b.shape[:-1], who.shape[:-1])
    q, b, who = q.expand(1, *batch, -1, -1), b.expand(1, *batch, -1), who.expand(1, *batch, -1)
    chunks = np.array_split(np.arange(math.prod(batch)), 1 + q.numel() // _AT_ONCE)
    places = (np.unravel_index(chunk, (1, *batch)) for chunk in chunks)
    found = [_simplex_qp(q[place], b[place], who[place]) for place in places]
    return torch.cat(found).reshape(*batch, clients).to(quadratic.device)


def _simplex_qp(q: Tensor, b: Tensor, who: Tensor) -> Tensor:
    """The same for N problems, ``(N, K, K)``, ``(N, K)`` and ``(N, K)`` to ``(N, K)``."""
    order = who.sort(dim=1, descending=True, stable=True).indices[:, : int(who.sum(1).max())]  # members first
    own = who.gather(1, order)
    pairs = own[:, None] & own[:, :, None]
    q = torch.where(pairs, q[torch.arange(len(q))[:, None, None], order[:, :, None], order[:, None]], 0)
    q, b = (q + q.mT) / 2, torch.where(own, b.gather(1, order), 0)
    size = torch.maximum(q.abs().amax((1, 2)), b.abs().amax(1))
    size = torch.where(size > 0, size, 1.0)
    q, b = q / size[:, None, None], b / size[:, None]
    start = own.to(torch.float64) / own.sum(1, keepdim=True)
    if own.shape[1] > _FEW:
        start = _warm_up(q, b, own, start)
    found = _finish(2 * q.numpy(), b.numpy(), start.numpy(), ~own.numpy(), np.inf, True)
    return torch.zeros(who.shape, dtype=torch.float64).scatter(1, order, torch.from_numpy(found))


def _warm_up(q: Tensor, b: Tensor, who: Tensor, start: Tensor) -> Tensor:
    """Accelerated projected gradient; shapes as above."""
    step = 1 / (2 * torch.linalg.eigvalsh(q)[:, -1:]).clamp(min=1e-6)
    weights = ahead = start
    for t in range(_WARM_UP):
        previous = weights
        moved = ahead - step * (2 * (q @ ahead[..., None])[..., 0] + b)
        weights = project_simplex(moved.masked_fill(~who, -torch.inf))
        ahead = weights + t / (t + 3) * (weights - previous)
    return weights / weights.sum(1, keepdim=True)


def combination_weights(variances: Tensor, points: Tensor, same: Tensor | None = None) -> Tensor:
    """For every client m the α on the simplex that minimises Σ_i α_i² V_i + ‖z_m − Σ_i α_i z_i‖², as row m.

    V is ``(..., K)``, z ``(..., K, P)``, α ``(..., K, K)``. ``same`` ``(..., K, K)`` holds clusters to combine inside;
    who is in none keeps to itself, and without it all are one cluster.
    """
    points, clients = points.to(torch.float64), points.shape[-2]
    if same is None:
        centre = points.mean(-2, keepdim=True)
    else:
        centre = same.to(torch.float64) @ points / same.sum(-1, keepdim=True).clamp(min=1)
    away = points - centre  # the programme sees differences only; small numbers keep them precise
    small = torch.cat([away @ away.mT, variances[..., None]], -1).cpu()  # one transfer
    gram, diagonal = small[..., :-1], torch.diag_embed(small[..., -1])
    members = None if same is None else same.cpu() | torch.eye(clients, dtype=torch.bool)
    quadratic = gram + diagonal  # as Σα = 1: ‖z_m − Σ_i α_i z_i‖² = αᵀGα − 2G_mα + G_mm
    return simplex_qp(quadratic[..., None, :, :], -2 * gram, members).to(points.device)


def box_qp(gram: Tensor, linear: Tensor, upper: float) -> Tensor:
    """argmax over 0 ≤ λ ≤ upper of bᵀλ − ½λᵀGλ, ``(..., K)``, for many problems; precision as of `simplex_qp`.

    G is ``(..., K, K)``, positive semidefinite, possibly singular; b ``(..., K)``. The active-set method; with many
    clients, from a few sweeps of cyclic coordinate ascent, λ_i ← clip(λ_i + (b − Gλ)_i / G_ii, 0, upper).
    """
    clients = linear.shape[-1]
    g: _Array = gram.to("cpu", torch.float64).numpy().reshape(-1, clients, clients) * upper  # in units of the bound
    b: _Array = linear.to("cpu", torch.float64).numpy().reshape(-1, clients)
    size = np.maximum(np.abs(g).max((1, 2)), np.abs(b).max(1))[:, None]
    size = np.where(size > 0, size, 1.0)
    g, b = g / size[..., None], b / size
    share = np.where(b > 0, 1.0, 0.0)  # of the bound; all that counts in a row of zeros
    if clients > _FEW:
        _ascend(g, b, share)
    found = upper * _finish(g, -b, share, np.zeros_like(b, dtype=bool), 1.0, False)
    return torch.from_numpy(found).reshape(linear.shape).to(linear.device)


def _ascend(g: _Array, b: _Array, share: _Array) -> None:
    """Coordinate ascent in place, on ``(N, K)`` shares of the bound."""
    curvature = np.diagonal(g, axis1=1, axis2=2)
    inverse = np.divide(1, curvature, out=np.zeros_like(b), where=curvature > 0)
    for _ in range(_SWEEPS):
        for i in range(b.shape[1]):
            slope = b[:, i] - (g[:, i] * share).sum(1)
            share[:, i] = np.clip(share[:, i] + slope * inverse[:, i], 0, 1)


def _finish(h: _Array, b: _Array, x: _Array, fixed: _Mask, upper: float, on_simplex: bool) -> _Array:
    """argmin of ½xᵀHx + bᵀx over 0 ≤ x ≤ upper, if asked with Σx = 1, from feasible x: a primal active-set method.

    Each step goes to the optimum of the face that x is on, or to a bound of it; from a face's optimum, the coordinate
    with the steepest descent leaves its bound. Faces do not come back, as the objective falls. H is ``(N, K, K)``, of N
    problems that step together until each is done; x ``(N, K)`` is overwritten; ``fixed`` ``(N, K)`` coordinates stay.
    """
    left = np.arange(len(x))  # the problems not done
    for _ in range(100 + 20 * b.shape[1]):
        own = x[left]
        slope = (h[left] @ own[..., None])[..., 0] + b[left]
        if on_simplex:
            slope -= (own * slope).sum(1, keepdims=True)  # less the price of the constraint
        free = (own > 0) & (own < upper)
        settled = np.abs(slope * free).max(1) <= TOLERANCE
        gain = np.maximum(np.where(own < upper, -slope, 0), np.where(own > 0, slope, 0)) * ~(free | fixed[left])
        done = settled & (gain.max(1) <= TOLERANCE)
        if done.all():
            break
        free[settled, gain.argmax(1)[settled]] = True
        left, own, slope, free = left[~done], own[~done], slope[~done], free[~done]
        direction, length = _descent(h[left], slope, free, on_simplex)
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.where(direction < 0, -own / direction, (upper - own) / direction)
        room[direction == 0] = np.inf
        length = np.minimum(length, room.min(1))
        moves = (length > 0) & (length < np.inf)  # else what is left is rounding
        left, own, direction, room, length = left[moves], own[moves], direction[moves], room[moves], length[moves, None]
        hit = room <= length * (1 + 1e-12)
        own = np.where(hit, np.where(direction < 0, 0.0, upper), np.clip(own + length * direction, 0, upper))
        x[left] = own / own.sum(1, keepdims=True) if on_simplex else own
    return x


def _descent(h: _Array, slope: _Array, free: _Mask, on_simplex: bool) -> tuple[_Array, _Array]:
    """The way to the optimum of a face, ``(N, K)``, and how far it is: 1, or infinity along one without curvature."""
    order = np.argsort(~free, axis=1, kind="stable")[:, : free.sum(1).max()]  # the face's coordinates first
    face = np.take_along_axis(free, order, 1)
    centre = np.eye(order.shape[1]) - (1 / face.sum(1)[:, None, None] if on_simplex else 0)
    centre = centre * face[:, None] * face[:, :, None]
    here = np.arange(len(h))[:, None, None]
    curvature, axes = np.linalg.eigh(centre @ h[here, order[:, :, None], order[:, None]] @ centre)
    along = (np.take_along_axis(slope, order, 1)[:, None] @ centre @ axes)[:, 0]
    curved = curvature > 1e-15
    flat = ~curved & (np.abs(along) > TOLERANCE / 10)
    endless = flat.any(1)
    part = np.where(endless[:, None], along * flat, along * curved / np.where(curved, curvature, 1))
    direction = np.zeros_like(slope)
    np.put_along_axis(direction, order, -(centre @ axes @ part[..., None])[..., 0], 1)
    return direction, np.where(endless, np.inf, 1.0)
