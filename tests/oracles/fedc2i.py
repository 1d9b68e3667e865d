"""FedC²I the slow and obvious way: float64, explicit loops over clients i and classes c, whole forward passes.

Shares no code with the package. A model is a ``state_dict``; every loss is that of an ordinary module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

State = dict[str, Tensor]
Build = Callable[[], nn.Module]


def double(state: State) -> State:
    return {name: tensor.double() for name, tensor in state.items()}


def loss(build: Build, state: State, x: Tensor, y: Tensor) -> float:
    """Mean cross entropy of the module with these weights."""
    net = build().double()
    net.load_state_dict(double(state))
    net.eval()
    with torch.no_grad():
        return float(F.cross_entropy(net(x.double()), y))


def mean_without(tensors: Sequence[Tensor], i: int) -> Tensor:
    """A fresh mean over all but number i."""
    others = [tensor.double() for j, tensor in enumerate(tensors) if j != i]
    return sum(others[1:], others[0]) / len(others)


def client_losses(
    build: Build, head: Sequence[str], models: Sequence[State], own: State, x: Tensor, y: Tensor
) -> Tensor:
    """l_{-i}: the body is the mean of all others' bodies, the head is the client's own."""
    losses = []
    for i in range(len(models)):
        state = dict(own)
        for name in own:
            if name not in head:
                state[name] = mean_without([model[name] for model in models], i)
        losses.append(loss(build, state, x, y))
    return torch.tensor(losses, dtype=torch.float64)


def class_losses(
    build: Build,
    head: Sequence[str],
    models: Sequence[State],
    own: State,
    x: Tensor,
    y: Tensor,
    takes_part: Tensor | None = None,
) -> Tensor:
    """l_{-i,-c}: row c of the own head is literally replaced by the mean of all other rows c.

    ``takes_part`` ``(M, C)`` says which rows count; the entry of one that does not is nan.
    """
    classes = own[head[0]].shape[0]
    if takes_part is None:
        takes_part = torch.ones(len(models), classes, dtype=torch.bool)
    losses = torch.full((len(models), classes), torch.nan, dtype=torch.float64)
    for c in range(classes):
        members = [i for i in range(len(models)) if takes_part[i, c]]
        for place, i in enumerate(members):
            if len(members) == 1:
                losses[i, c] = 1.0  # nobody else: whatever the loss, the weight is 1
                continue
            state = {name: tensor.double().clone() for name, tensor in own.items()}
            for name in head:
                state[name][c] = mean_without([models[j][name][c] for j in members], place)
            losses[i, c] = loss(build, state, x, y)
    return losses


def by_powers(losses: Tensor, gamma: float) -> Tensor:
    """l^γ / Σ l^γ down each column; rows that are nan get nothing."""
    powers = torch.nan_to_num(losses.double() ** gamma, nan=0.0)
    return powers / powers.sum(0)


def mixed_body(models: Sequence[State], head: Sequence[str], vector: Tensor) -> State:
    """θ̄ = Σ_i λ_i θ_i."""
    names = [name for name in models[0] if name not in head]
    return {name: sum(vector[i] * models[i][name].double() for i in range(len(models))) for name in names}


def mixed_head(models: Sequence[State], head: Sequence[str], matrix: Tensor) -> State:
    """φ̄_c = Σ_i Λ_{i,c} φ_{i,c}, weight row and bias entry alike."""
    result = {}
    for name in head:
        rows = []
        for c in range(models[0][name].shape[0]):
            rows.append(sum(matrix[i, c] * models[i][name][c].double() for i in range(len(models))))
        result[name] = torch.stack(rows)
    return result


@dataclass
class Problem:
    """A client's exchange in miniature: M received models, of which one is its own, and a batch."""

    build: Build
    head: tuple[str, ...]
    models: list[State]
    position: int
    x: Tensor
    y: Tensor

    @property
    def own(self) -> State:
        return self.models[self.position]

    @classmethod
    def draw(
        cls,
        clients: int,
        classes: int,
        bias: bool = True,
        samples: int = 6,
        labels: Sequence[int] | None = None,
        position: int = 1,
        spread: float = 1.0,
        seed: int = 0,
    ) -> Problem:
        """Random models of 5 inputs and 4 features; ``labels`` are the classes that the batch has."""

        def build() -> nn.Module:
            return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, classes, bias=bias))

        generator = torch.Generator().manual_seed(seed)
        shapes = {name: tensor.shape for name, tensor in build().state_dict().items()}
        models = [
            {
                name: spread * torch.randn(shape, generator=generator, dtype=torch.float64)
                for name, shape in shapes.items()
            }
            for _ in range(clients)
        ]
        allowed = torch.tensor(list(range(classes)) if labels is None else list(labels))
        y = allowed[torch.randint(len(allowed), (samples,), generator=generator)]
        x = torch.randn(samples, 5, generator=generator, dtype=torch.float64)
        head = ("2.weight", "2.bias") if bias else ("2.weight",)
        return cls(build, head, models, position % clients, x, y)

    def client_losses(self) -> Tensor:
        return client_losses(self.build, self.head, self.models, self.own, self.x, self.y)

    def class_losses(self, body: State | None = None, takes_part: Tensor | None = None) -> Tensor:
        own = {**self.own, **(body or {})}
        return class_losses(self.build, self.head, self.models, own, self.x, self.y, takes_part)

    def mixed_body(self, vector: Tensor) -> State:
        return mixed_body(self.models, self.head, vector)

    def mixed_head(self, matrix: Tensor) -> State:
        return mixed_head(self.models, self.head, matrix)
