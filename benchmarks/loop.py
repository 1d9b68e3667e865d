"""The reference: FedAvg as one would write it by hand in plain PyTorch, clients one after the other.

It imports nothing of this package. Data is in memory as scaled float tensors, the optimiser is `torch.optim.Adam` as it
comes, and every evaluation is one forward pass over a client's test images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

State = dict[str, Tensor]


class LeNet5(nn.Module):
    """The textbook net: 6 and 16 channels, 120 and 84 hidden units (or others)."""

    def __init__(
        self, classes: int = 10, side: int = 28, channels: Sequence[int] = (6, 16), hidden: Sequence[int] = (120, 84)
    ) -> None:
        super().__init__()
        final = ((side - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(3, channels[0], 5)
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5)
        self.fc1 = nn.Linear(channels[1] * final * final, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1])
        self.fc3 = nn.Linear(hidden[1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scaled images to logits."""
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


class LoopRound(NamedTuple):
    """One round: how long it took, and each client's accuracy after training and with the averaged model."""

    seconds: float
    trained: list[float]
    received: list[float]
    state: State


def train(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> None:
    """Two epochs of batches of 32."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        order = torch.randperm(len(y), generator=generator).to(y.device)
        for batch in order.split(32):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """In percent."""
    return 100 * (model(x).argmax(1) == y).float().mean().item()


def fedavg(
    clients: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    model: nn.Module,
    rounds: int,
    both_points: bool = True,
    draws: Callable[[int, int], torch.Generator] | None = None,
) -> Iterator[LoopRound]:
    """Federated averaging from the model's present weights.

    Args:
        clients: training images and labels, test images and labels of each, on the model's device.
        model: the one working module.
        rounds: how many.
        both_points: score the trained local models, too, not only the averaged one.
        draws: the generator of a client's batches by client and round; without it torch's global one.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number in range(1, rounds + 1):
        began = time.perf_counter()
        states, trained = [], []
        for m, (x, y, x_test, y_test) in enumerate(clients):
            model.load_state_dict(state)
            train(model, x, y, draws(m, number) if draws else None)
            if both_points:
                trained.append(accuracy(model, x_test, y_test))
            states.append({name: tensor.clone() for name, tensor in model.state_dict().items()})
        state = {name: torch.stack([own[name] for own in states]).mean(0) for name in state}
        model.load_state_dict(state)
        received = [accuracy(model, x_test, y_test) for _, _, x_test, y_test in clients]
        yield LoopRound(time.perf_counter() - began, trained, received, state)
