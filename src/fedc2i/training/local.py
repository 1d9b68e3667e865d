"""Local training of one client: a few epochs on its own data, with ordinary autograd.

The stacked executor of `fedc2i.engine` takes the same steps for many clients at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd
from torch.overrides import TorchFunctionMode

from fedc2i.core.params import Params
from fedc2i.core.settings import TrainingSettings

_WIDE, _NARROW = 16, 3  # channels that a convolution reads, and the side of its kernel
_ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False, "fused": True}
_SGD: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False, "fused": True}


def weighted_mean(values: Tensor, w: Tensor) -> Tensor:
    """Mean of ``values`` ``(B,)`` over the samples; padding has weight 0."""
    return (values * w).sum() / w.sum().clamp(min=1)


class Batch(NamedTuple):
    """Labelled samples: ``x`` ``(B, ...)``, ``y`` ``(B,)`` labels, ``w`` ``(B,)`` weights, 0 for padding."""

    x: Tensor
    y: Tensor
    w: Tensor

    def take(self, index: Tensor) -> Batch:
        """The samples at ``index``."""
        return Batch(self.x[index], self.y[index], self.w[index])

    def mean(self, values: Tensor) -> Tensor:
        """The mean of one value per sample ``(B,)``; padding does not count."""
        return weighted_mean(values, self.w)


class Optimiser:
    """Adam and SGD by torch's fused functions; updates ``params`` in place, with the numbers of ``torch.optim``.

    ``torch.optim.Optimizer`` imports torch's compiler when the first one is made, which takes seconds, and spends half
    of a small model's update on bookkeeping. Here all state is tensors on the device: a CUDA graph can hold an update.
    """

    def __init__(self, training: TrainingSettings, params: Sequence[Tensor]) -> None:
        self._params, self._momentum = list(params), training.momentum
        self._is_adam = training.optimizer == "adam"
        self._rates: dict[str, Any] = {"lr": training.lr, "weight_decay": training.weight_decay}
        self._means = [torch.zeros_like(tensor) for tensor in params] if self._is_adam or self._momentum else []
        self._squares = [torch.zeros_like(tensor) for tensor in params] if self._is_adam else []
        self._steps = [torch.zeros((), device=tensor.device) for tensor in params] if self._is_adam else []

    def reset(self) -> None:
        """Sets all state to that of a new optimiser."""
        if state := [*self._means, *self._squares, *self._steps]:
            torch._foreach_zero_(state)

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One update; a tensor without gradient does not change."""
        found = [k for k, gradient in enumerate(gradients) if gradient is not None]
        slopes = [gradient for gradient in gradients if gradient is not None]
        params, means, squares, steps = (
            [own[k] for k in found] if own else [] for own in (self._params, self._means, self._squares, self._steps)
        )
        if self._is_adam and slopes:
            adam(params, slopes, means, squares, [], steps, **self._rates, **_ADAM)
        elif slopes:
            momenta = list[Tensor | None](means) or [None] * len(params)
            sgd(params, slopes, momenta, momentum=self._momentum, **self._rates, **_SGD)


def draw_epochs(samples: int, training: TrainingSettings, generator: torch.Generator) -> list[list[Tensor]]:
    """For every epoch its batches, each a tensor of sample indices, shuffled again every time through the samples."""
    size, once, wanted = training.batch_size, training.batches_once(samples), training.batches(samples)
    epochs = []
    for _ in range(training.epochs):
        batches: list[Tensor] = []
        while len(batches) < wanted:
            order = torch.randperm(samples, generator=generator)
            batches += [order[low : low + size] for low in range(0, size * once, size)]
        epochs.append(batches[:wanted])
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
    """Trains one client with a fresh optimiser, from ``params``, which are not changed.

    Only names in ``trainable`` are trained; of the others, running statistics that the loss updates change. With
    ``average``, trained names get the mean over the second half of n steps, those from ⌊n/2⌋ + 1 to n.
    """
    if not trainable:  # e.g. the body of a model whose backbone is frozen
        return params
    last = data.y.device.type == "cpu" and has_wide_convolutions(params)
    free = {name: laid_out(params[name], last).requires_grad_() for name in trainable}
    fixed = {name: laid_out(tensor, last) for name, tensor in params.items() if name not in free}
    leaves = list(free.values())
    optimiser = Optimiser(training, leaves)
    everything = {name: free[name] if name in free else fixed[name] for name in params}
    means = {name: tensor.detach().clone() for name, tensor in free.items()} if average else {}
    for step, index in enumerate(batches, 1):
        batch = data.take(index.to(data.y.device))
        with torch.enable_grad(), AnyLayout() if last else nullcontext():  # the caller may have switched gradients off
            value = loss(everything, batch._replace(x=laid_out(batch.x, last)) if last else batch)
        gradients = torch.autograd.grad(value, leaves, allow_unused=True)
        optimiser.step([like(gradient, leaf) for gradient, leaf in zip(gradients, leaves, strict=True)])
        if step > len(batches) // 2:
            for name, mean in means.items():
                mean.lerp_(free[name].detach(), 1 / (step - len(batches) // 2))
    found = {name: means.get(name, tensor.detach()) for name, tensor in everything.items()}
    return {name: tensor.contiguous() for name, tensor in found.items()}


def gradient_and_value(loss: Callable[[Params], Tensor], params: Params) -> tuple[Params, Tensor]:
    """The gradient of a loss at ``params``, and its value; inside vmap, too.

    Ordinary autograd where that is possible: the first use of ``torch.func.grad`` imports torch's compiler, which takes
    seconds and wants to write, and a site's sandbox lets nobody write.
    """
    if not params:
        return {}, loss(params)
    if torch._C._functorch.peek_interpreter_stack() is not None:  # within vmap
        return torch.func.grad_and_value(loss)(params)
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in params.items()}
    with torch.enable_grad():
        value = loss(leaves)
    used = value.requires_grad
    found = torch.autograd.grad(value, list(leaves.values()), allow_unused=True) if used else [None] * len(leaves)
    gradient = {
        name: torch.zeros_like(tensor) if own is None else own
        for (name, tensor), own in zip(params.items(), found, strict=True)
    }
    return gradient, value.detach()


def has_wide_convolutions(params: Params) -> bool:
    """Whether convolutions are faster with the channels last in memory: of 3x3 pixels and many channels."""
    return any(own.ndim == 4 and own.shape[1] >= _WIDE and own.shape[2] <= _NARROW for own in params.values())


def laid_out(tensor: Tensor, channels_last: bool) -> Tensor:
    """A copy; images and the weights of their convolutions with the channels last in memory, if asked for."""
    format = torch.channels_last if channels_last and tensor.ndim == 4 else torch.contiguous_format
    return tensor.detach().clone(memory_format=format)


def like(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient with its numbers in memory as those of the leaf, which the fused optimisers take for granted."""
    if gradient is None or gradient.stride() == leaf.stride():
        return gradient
    return torch.empty_like(leaf).copy_(gradient)


class AnyLayout(TorchFunctionMode):
    """Within this context a module's ``view`` works on images with the channels last in memory, too."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return any_layout(func, args, kwargs or {})


def any_layout(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an operation; ``view`` copies where the layout in memory demands it."""
    if func is Tensor.view and not kwargs and not isinstance(args[1], torch.dtype):
        return args[0].reshape(*args[1:])
    return func(*args, **kwargs)
