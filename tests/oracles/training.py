"""One client's local run as any tutorial writes it: a module, a fresh torch optimiser, a loop over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def local_run(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: Sequence[Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    pull: float = 0.0,
) -> dict[str, Tensor]:
    """Trains ``net`` in place on scaled images; ``pull`` is FedProx's μ, added to the gradient as μ(w − w_start)."""
    net.train()
    start = [p.detach().clone() for p in net.parameters()]
    stepper = optimizer([p for p in net.parameters() if p.requires_grad])
    for index in batches:
        stepper.zero_grad()
        F.cross_entropy(net(x[index]), y[index]).backward()
        for p, origin in zip(net.parameters(), start, strict=True):
            if p.grad is not None:
                p.grad += pull * (p.detach() - origin)
        stepper.step()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
