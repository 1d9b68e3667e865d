"""The server's side of FedC²I without peers' models, the slow and obvious way: float64, loops, ordinary autograd.

Shares no code with the package. A model is a ``state_dict``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn import functional as F  # noqa: N812

from oracles.fedc2i import Build, State


def weights(
    build: Build,
    head: Sequence[str],
    models: Sequence[State],
    m: int,
    old_mean: State,
    x: Tensor,
    y: Tensor,
    gamma: float,
) -> tuple[Tensor, Tensor]:
    """λ ``(M,)`` and Λ ``(M, C)`` of client m, which has images x and measures at the mean it received last."""
    net, own, count = build().double().eval(), models[m], len(models)
    body = [name for name in own if name not in head]
    mean = {name: sum(model[name] for model in models) / count for name in own}

    at = {name: (old_mean[name] if name in body else own[name]).clone().requires_grad_() for name in own}
    loss = F.cross_entropy(functional_call(net, at, (x,)), y)
    slopes = torch.autograd.grad(loss, [at[name] for name in body])
    vector = torch.zeros(count, dtype=torch.float64)
    for i in range(count):
        away = sum(float((g * (mean[n] - models[i][n])).sum()) for n, g in zip(body, slopes, strict=True))
        vector[i] = first_order(loss.item(), away / (count - 1))

    classes = own[head[0]].shape[0]
    matrix = torch.zeros(count, classes, dtype=torch.float64)
    for c in range(classes):
        rows = {name: old_mean[name][c].clone().requires_grad_() for name in head}
        at = dict(own)
        for name in head:
            at[name] = torch.stack([rows[name] if k == c else own[name][k] for k in range(classes)])
        loss = F.cross_entropy(functional_call(net, at, (x,)), y)
        slopes = torch.autograd.grad(loss, [rows[name] for name in head])
        for i in range(count):
            away = sum(float((g * (mean[n][c] - models[i][n][c])).sum()) for n, g in zip(head, slopes, strict=True))
            matrix[i, c] = first_order(loss.item(), away / (count - 1))
    return vector**gamma / (vector**gamma).sum(), matrix**gamma / (matrix**gamma).sum(0)


def first_order(loss: float, change: float) -> float:
    """A loss that never falls to zero."""
    return loss + change if change >= 0 else loss * math.exp(change / loss)
