"""FedFomo's weights and step for one client, on whole modules, one model after the other."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def flat(net: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean cross entropy."""
    with torch.no_grad():
        return float(F.cross_entropy(net(x), y))


def weights(base: nn.Module, candidates: list[nn.Module], x: Tensor, y: Tensor) -> list[float]:
    """max(0, loss saved per distance), divided by their sum; all 0 if no candidate does better."""
    gains = []
    for candidate in candidates:
        distance = float((flat(candidate) - flat(base)).norm())
        saved = loss_of(base, x, y) - loss_of(candidate, x, y)
        gains.append(max(0.0, saved / distance) if distance > 0 else 0.0)
    total = sum(gains)
    return [gain / total if total > 0 else 0.0 for gain in gains]


def step(base: nn.Module, candidates: list[nn.Module], by: list[float]) -> nn.Module:
    """base + Σ w_j (θ_j − base)."""
    moved = copy.deepcopy(base)
    with torch.no_grad():
        for own, start, *others in zip(
            moved.parameters(), base.parameters(), *(one.parameters() for one in candidates), strict=True
        ):
            for weight, other in zip(by, others, strict=True):
                own += weight * (other - start)
    return moved
