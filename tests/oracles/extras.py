"""A local run with an anchor and averaged iterates, with every iterate kept in a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812


def anchored_and_averaged(
    net: nn.Module,
    x: Tensor,
    y: Tensor,
    batches: Sequence[Tensor],
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    anchor: float,
    trained: Callable[[str], bool] = lambda name: True,
    start: dict[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Trains the parameters of ``net`` that are ``trained`` on scaled images, and leaves their mean in it.

    The anchor's gradient μ(w − w_start) is added by hand; ``start`` is the state of ``net`` if it is not said. Modes of
    layers (training or not) are the caller's.
    """
    start = {name: tensor.clone() for name, tensor in net.state_dict().items()} if start is None else start
    free = {name: parameter for name, parameter in net.named_parameters() if trained(name)}
    stepper = optimizer(free.values())
    iterates = []
    for index in batches:
        net.zero_grad()
        F.cross_entropy(net(x[index]), y[index]).backward()
        for name, parameter in free.items():
            parameter.grad += anchor * (parameter.detach() - start[name])
        stepper.step()
        iterates.append({name: parameter.detach().clone() for name, parameter in free.items()})
    half = iterates[len(iterates) // 2 :]
    means = {name: torch.stack([own[name] for own in half]).mean(0) for name in free}
    net.load_state_dict({**net.state_dict(), **means})
    return {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
