"""FedRep's local run as the paper words it: a module, two optimisers, one part frozen at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def local_run(
    net: nn.Sequential,
    x: Tensor,
    y: Tensor,
    head_batches: Sequence[Tensor],
    body_batches: Sequence[Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
) -> dict[str, Tensor]:
    """Trains ``net``, whose last layer is its head, in place on scaled images."""
    body, head = net[:-1], net[-1]
    stepper = optimizer(head.parameters())
    body.eval()
    for index in head_batches:
        with torch.no_grad():
            features = body(x[index])
        stepper.zero_grad()
        F.cross_entropy(head(features), y[index]).backward()
        stepper.step()
    stepper = optimizer(body.parameters())
    net.train()
    for index in body_batches:
        stepper.zero_grad()
        F.cross_entropy(net(x[index]), y[index]).backward()
        stepper.step()
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
