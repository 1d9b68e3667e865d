"""Local training of one client: a few epochs on its own data, with ordinary autograd.

The stacked executor of `fedc2i.engine` takes the same steps for many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.training.settings import TrainingSettings


def weighted_mean(values: Tensor, w: Tensor) -> Tensor:
    """Mean of ``values`` ``(B,)`` over the samples; padding has weight 0."""
    return (values * w).sum() / w.sum().clamp(min=1)


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


def draw_epochs(samples: int, training: TrainingSettings, generator: torch.Generator) -> list[list[Tensor]]:
    """For every epoch its batches, each a tensor of sample indices, shuffled again every epoch."""
    size = training.batch_size
    epochs = []
    for _ in range(training.epochs):
        order = torch.randperm(samples, generator=generator)
        epochs.append([order[low : low + size] for low in range(0, size * training.batches(samples), size)])
    return epochs


def train(
    loss: Callable[[Params, Batch], Tensor],
    params: Params,
    trainable: Sequence[str],
    data: Batch,
    batches: Sequence[Tensor],
    training: TrainingSettings,
    average: bool = False,
) -> Params:
    """Trains one client with a fresh optimiser.

    Args:
        loss: what a step minimises.
        params: the start, which is not changed.
        trainable: names to train; of the others, only running statistics that the loss updates change.
        data: all training samples of the client.
        batches: indices of each step's samples.
        training: optimiser and its settings.
        average: return the mean over the second half of n steps, those from ⌊n/2⌋ + 1 to n, instead of the last
            parameters; for trained names only.
    """
    if not trainable:  # e.g. the body of a model whose backbone is frozen
        return params
    free = {name: params[name].detach().clone().requires_grad_() for name in trainable}
    fixed = {name: tensor.detach().clone() for name, tensor in params.items() if name not in free}
    leaves = list(free.values())
    optimiser = training.new_optimiser(leaves)
    everything = {name: free.get(name, fixed.get(name)) for name in params}
    means = {name: tensor.detach().clone() for name, tensor in free.items()} if average else {}
    for step, index in enumerate(batches, 1):
        with torch.enable_grad():  # the caller may have switched gradients off
            value = loss(everything, data.take(index.to(data.y.device)))  # type: ignore[arg-type]
        optimiser.step(torch.autograd.grad(value, leaves, allow_unused=True))
        if step > len(batches) // 2:
            for name, mean in means.items():
                mean.lerp_(free[name].detach(), 1 / (step - len(batches) // 2))
    return {name: means.get(name, tensor.detach()) for name, tensor in everything.items() if tensor is not None}


def pad(sets: Sequence[Batch]) -> Batch:
    """K batches of unequal length to one with a client axis; padding has weight 0."""
    length = max(len(own.y) for own in sets)

    def fill(tensor: Tensor) -> Tensor:
        if len(tensor) == length:
            return tensor
        return torch.cat([tensor, tensor.new_zeros((length - len(tensor), *tensor.shape[1:]))])

    return Batch(*(torch.stack([fill(part) for part in parts]) for parts in zip(*sets, strict=True)))
