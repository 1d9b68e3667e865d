"""FedRoD with probabilities written out, sample by sample, and with two optimisers stepping in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def balanced_loss(logits: Tensor, y: Tensor, counts: Sequence[int], gamma: float) -> float:
    """Mean of −log( n_y^γ e^{z_y} / Σ_c n_c^γ e^{z_c} ); a class with n_c = 0 has no term in the sum."""
    total = 0.0
    for z, label in zip(logits.double().tolist(), y.tolist(), strict=True):
        shares = [n**gamma * math.exp(v) if n else 0.0 for v, n in zip(z, counts, strict=True)]
        total -= math.log(shares[label] / sum(shares))
    return total / len(y)


def personal_loss(logits: Tensor, y: Tensor) -> float:
    """Mean of −log softmax."""
    return balanced_loss(logits, y, [1] * logits.shape[1], 1.0)


def local_run(
    body: nn.Module,
    generic: nn.Linear,
    personal: nn.Linear,
    x: Tensor,
    y: Tensor,
    counts: Tensor,
    batches: Sequence[Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> None:
    """Step 1 on (θ, G), then step 2 on P, every batch, in place."""
    shared = optimizer([*body.parameters(), *generic.parameters()])
    private = optimizer(personal.parameters())
    log_counts = counts.double().clamp(min=1e-30).log().float()
    for index in batches:
        h = body(x[index])
        g = generic(h)
        shared.zero_grad()
        F.cross_entropy(g + log_counts, y[index]).backward()
        shared.step()
        private.zero_grad()
        F.cross_entropy(g.detach() + personal(h.detach()), y[index]).backward()
        private.step()
