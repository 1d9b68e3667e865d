"""Adam and SGD by torch's fused functions, without ``torch.optim.Optimizer``.

That class imports torch's compiler when the first one is made, which takes seconds, and spends half of a small model's
update on bookkeeping. The numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

Kind = Literal["adam", "sgd"]


class Optimiser:
    """Updates ``params`` in place; all state is tensors on their device, so that a CUDA graph can hold an update."""

    def __init__(
        self, kind: Kind, params: Sequence[Tensor], lr: float, weight_decay: float = 0.0, momentum: float = 0.0
    ) -> None:
        self._kind = kind
        self._params = list(params)
        self._lr, self._weight_decay, self._momentum = lr, weight_decay, momentum
        self._means = [torch.zeros_like(tensor) for tensor in params] if kind == "adam" or momentum else []
        self._squares = [torch.zeros_like(tensor) for tensor in params] if kind == "adam" else []
        self._steps = [torch.zeros((), device=tensor.device) for tensor in params] if kind == "adam" else []

    def reset(self) -> None:
        """Sets all state to that of a new optimiser."""
        for tensor in (*self._means, *self._squares, *self._steps):
            tensor.zero_()

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """One update; a tensor without gradient does not change."""
        found = [k for k, gradient in enumerate(gradients) if gradient is not None]
        slopes = [gradient for gradient in gradients if gradient is not None]
        params, means, squares, steps = (
            [own[k] for k in found] if own else [] for own in (self._params, self._means, self._squares, self._steps)
        )
        if not slopes:
            return
        if self._kind == "adam":
            adam(
                params,
                slopes,
                means,
                squares,
                [],
                steps,
                fused=True,
                amsgrad=False,
                beta1=0.9,
                beta2=0.999,
                lr=self._lr,
                weight_decay=self._weight_decay,
                eps=1e-8,
                maximize=False,
            )
        else:
            sgd(
                params,
                slopes,
                list[Tensor | None](means) or [None] * len(params),
                fused=True,
                weight_decay=self._weight_decay,
                momentum=self._momentum,
                lr=self._lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
