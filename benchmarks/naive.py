"""The influence step as one would write it from the paper: a full forward pass for every client, and for every row.

For client m and its batch, with the models of all M clients at hand:

    l_{-i}      the loss with the body averaged over all clients but i                        M passes
    l_{-i,-c}   the loss with row c of the classifier averaged over all clients but i         M·C passes

Nothing is shared between passes: parameters are averaged anew, loaded, and the whole batch goes through the whole net.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

State = dict[str, Tensor]
HEAD = ("fc3.weight", "fc3.bias")


@torch.no_grad()
def without_client(net: nn.Module, own: State, models: Sequence[State], i: int, x: Tensor, y: Tensor) -> float:
    """l_{-i}: everything but the classifier is the mean of the others'."""
    others = [model for j, model in enumerate(models) if j != i]
    body = {name: torch.stack([model[name] for model in others]).mean(0) for name in own if name not in HEAD}
    net.load_state_dict({**own, **body})
    return F.cross_entropy(net(x), y).item()


@torch.no_grad()
def without_row(net: nn.Module, own: State, models: Sequence[State], i: int, c: int, x: Tensor, y: Tensor) -> float:
    """l_{-i,-c}: row c of the classifier is the mean of the others'."""
    others = [model for j, model in enumerate(models) if j != i]
    state = {**own, **{name: own[name].clone() for name in HEAD}}
    for name in HEAD:
        state[name][c] = torch.stack([model[name][c] for model in others]).mean(0)
    net.load_state_dict(state)
    return F.cross_entropy(net(x), y).item()


class Sampled(NamedTuple):
    """Some of the passes: which, their values, how long they took, and how many there are in all."""

    which: Tensor
    values: Tensor
    spent: float
    total: int

    @property
    def seconds(self) -> float:
        """Of all passes: measured if all were made, else in proportion."""
        return self.spent * self.total / len(self.which)

    def __str__(self) -> str:
        done = len(self.which)
        return "all" if done == self.total else f"sampled {done} of {self.total}"


def sample(one_pass: Callable[[int], float], total: int, seconds: float) -> Sampled:
    """Passes in random order until the time is up or all are made; one before that to warm up."""
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    one_pass(order[0])
    which, values = [], []
    began = time.perf_counter()
    for number in order:
        which.append(number)
        values.append(one_pass(number))
        if time.perf_counter() - began > seconds:
            break
    return Sampled(torch.tensor(which), torch.tensor(values), time.perf_counter() - began, total)
