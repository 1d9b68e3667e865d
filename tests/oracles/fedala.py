"""FedALA's local aggregation with modules and ordinary autograd: the chain rule by hand, one tensor at a time."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def aggregate(
    net: nn.Module,
    own: dict[str, Tensor],
    received: dict[str, Tensor],
    weights: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    epochs: int,
    eta: float,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The mixed model and the learnt weights; ``weights`` names the tensors that are mixed."""
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    net = copy.deepcopy(net).eval()

    def load() -> None:
        state = dict(received)
        for name, weight in weights.items():
            state[name] = weight * received[name] + (1 - weight) * own[name]
        net.load_state_dict(state)

    load()
    for _ in range(epochs):
        for x, y in batches:
            net.zero_grad()
            F.cross_entropy(net(x), y).backward()
            slopes = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            for name, weight in weights.items():
                step = slopes[name] * (received[name] - own[name])
                weights[name] = torch.minimum(torch.maximum(weight - eta * step, torch.tensor(0.0)), torch.tensor(1.0))
            load()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}, weights
