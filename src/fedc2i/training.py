"""Local training: a few epochs of one client on its own data, and the same steps lifted over many clients at once.

`train` is the plain form: one client, ordinary autograd. `train_stacked` runs the very same loss for all clients in one
go with ``torch.func.vmap``; clients with fewer samples stop early, padded samples carry no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedc2i.errors import UserError
from fedc2i.influence import weighted_mean
from fedc2i.options import check_at_least
from fedc2i.params import Params, Stacked


class Batch(NamedTuple):
    """Labelled images: ``x`` ``(B, 3, H, W)`` uint8, ``y`` ``(B,)`` labels, ``w`` ``(B,)`` weights, 0 for padding."""

    x: Tensor
    y: Tensor
    w: Tensor

    def take(self, index: Tensor) -> Batch:
        """The samples at ``index``."""
        return Batch(self.x[index], self.y[index], self.w[index])

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value per sample ``(B,)``; padding does not count."""
        return weighted_mean(values, self.w)


@dataclass(frozen=True)
class Training:
    """How every client trains, whatever the method; the defaults are the paper's.

    Attributes:
        epochs: local epochs a round, at least 1.
        batch_size: samples a step, at least 1.
        optimizer: ``adam`` or ``sgd``; a fresh one every round.
        lr: learning rate, above 0.
        weight_decay: L2 penalty, at least 0.
        momentum: of ``sgd``, in [0, 1).
        drop_last: leave out an epoch's last batch if it is not full (never its only batch).
    """

    epochs: int = 2
    batch_size: int = 32
    optimizer: str = "adam"
    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.0
    drop_last: bool = False

    def __post_init__(self) -> None:
        check_at_least(self, 1, "epochs", "batch_size")
        check_at_least(self, 0, "weight_decay")
        if self.optimizer not in ("adam", "sgd"):
            raise UserError(f"optimizer must be adam or sgd, got '{self.optimizer}'")
        if not 0 < self.lr < float("inf"):
            raise UserError(f"lr must be above 0, got {self.lr}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must be in [0, 1), got {self.momentum}")
        if self.momentum and self.optimizer != "sgd":
            raise UserError(f"momentum={self.momentum} is for optimizer=sgd, not {self.optimizer}")

    def new_optimizer(self, params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """A fresh optimiser over ``params``; fused, which is the fastest form on CPU and GPU."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(params, self.lr, self.momentum, weight_decay=self.weight_decay, fused=True)
        return torch.optim.Adam(params, self.lr, weight_decay=self.weight_decay, fused=True)


def draw_epochs(samples: int, training: Training, generator: torch.Generator) -> list[list[Tensor]]:
    """For every epoch its batches, each a tensor of sample indices, shuffled anew every epoch."""
    size = training.batch_size
    epochs = []
    for _ in range(training.epochs):
        order = torch.randperm(samples, generator=generator)
        batches = [order[low : low + size] for low in range(0, samples, size)]
        if training.drop_last and len(batches) > 1 and len(batches[-1]) < size:
            batches.pop()
        epochs.append(batches)
    return epochs


def train(
    loss: Callable[[Params, Batch], Tensor],
    params: Params,
    trainable: Sequence[str],
    data: Batch,
    batches: Sequence[Tensor],
    training: Training,
) -> Params:
    """One optimiser's worth of steps for one client.

    Args:
        loss: what a step minimises.
        params: the start; it is not changed.
        trainable: names that are trained; the others stay, except running statistics that the loss updates.
        data: all training samples of the client.
        batches: indices of each step's samples.
        training: optimiser and its settings.
    """
    if not trainable:  # e.g. the body of a model whose backbone is frozen
        return params
    free = {name: params[name].detach().clone().requires_grad_() for name in trainable}
    fixed = {name: tensor.detach().clone() for name, tensor in params.items() if name not in free}
    leaves = list(free.values())
    optimizer = training.new_optimizer(leaves)
    everything = {name: free.get(name, fixed.get(name)) for name in params}
    for index in batches:
        with torch.enable_grad():  # whatever the caller has switched off
            value = loss(everything, data.take(index.to(data.y.device)))  # type: ignore[arg-type]
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        optimizer.step()
    return {name: tensor.detach() for name, tensor in everything.items() if tensor is not None}


def train_stacked(
    loss: Callable[[Params, Batch, Any], Tensor],
    params: Stacked,
    trainable: Sequence[str],
    data: Batch,
    batches: Sequence[Sequence[Tensor]],
    training: Training,
    context: Any,
    context_dims: Any,
) -> Stacked:
    """`train` for K clients at once, with stacked parameters; agrees with it to float tolerance.

    Args:
        loss: as in `train`, with the client's slice of ``context`` as third argument.
        params: the K starts, every tensor ``(K, ...)``.
        trainable: names that are trained.
        data: the K training sets padded to one length, ``x`` ``(K, N, 3, H, W)``.
        batches: for every client the indices of its steps; clients may have different numbers of steps.
        training: optimiser and its settings.
        context: whatever else the loss needs, a nest of tensors.
        context_dims: for each of them 0 if it has a client axis, None if it is the same for all.
    """
    if not trainable:
        return params
    free = {name: params[name].detach().clone() for name in trainable}
    fixed = {name: tensor.detach().clone() for name, tensor in params.items() if name not in free}
    optimizer = training.new_optimizer(list(free.values()))

    def value(own_free: Params, own_fixed: Params, batch: Batch, own_context: Any) -> tuple[Tensor, Params]:
        mine = {name: own_free[name] if name in own_free else own_fixed[name] for name in params}
        return loss(mine, batch, own_context), own_fixed

    step = vmap(grad(value, has_aux=True), in_dims=(0, 0, 0, context_dims), randomness="different")
    steps = [len(own) for own in batches]
    finished: dict[str, list[Tensor]] = {name: list(tensor) for name, tensor in params.items()}
    for s in range(max(steps)):
        batch = _gather(data, [own[s] if s < len(own) else own[0][:0] for own in batches])
        gradients, fixed = step(free, fixed, batch, context)
        for name, leaf in free.items():
            leaf.grad = gradients[name]
        optimizer.step()
        for k in (k for k, count in enumerate(steps) if count == s + 1):  # padded steps after this would move it on
            for name in params:
                finished[name][k] = (free[name] if name in free else fixed[name])[k].detach().clone()
    return {name: torch.stack(rows) for name, rows in finished.items()}


def _gather(data: Batch, index: Sequence[Tensor]) -> Batch:
    """One batch a client, padded with weightless samples to the longest."""
    length = max(len(own) for own in index)
    padded = torch.zeros(len(index), length, dtype=torch.int64)
    weight = torch.zeros(len(index), length)
    for k, own in enumerate(index):
        padded[k, : len(own)] = own
        weight[k, : len(own)] = 1
    device = data.y.device
    padded = padded.to(device)
    client = torch.arange(len(index), device=device)[:, None]
    return Batch(data.x[client, padded], data.y[client, padded], weight.to(device, data.w.dtype))


def pad(sets: Sequence[Batch]) -> Batch:
    """K batches of unequal length to one with a client axis; what is filled up has weight 0."""
    length = max(len(own.y) for own in sets)

    def fill(tensor: Tensor) -> Tensor:
        if len(tensor) == length:
            return tensor
        return torch.cat([tensor, tensor.new_zeros((length - len(tensor), *tensor.shape[1:]))])

    return Batch(*(torch.stack([fill(part) for part in parts]) for parts in zip(*sets, strict=True)))
