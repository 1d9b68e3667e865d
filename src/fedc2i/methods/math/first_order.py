"""Leave-one-out losses to first order: one gradient at the mean instead of a forward pass for each model.

Leaving model i out of K moves their mean θ̄ to θ^{-i} = θ̄ + (θ̄ − θ_i)/(K − 1), so with l the loss at θ̄ and g its
gradient

    l_{-i} ≈ l + δ_i,    δ_i = ⟨g, θ̄ − θ_i⟩/(K − 1).

Notation as in `math.influence`; every function can be lifted with vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, Stacked
from fedc2i.methods.math.influence import SMALLEST_LOSS
from fedc2i.training.local import gradient_and_value


def first_order_losses(
    loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor, differentiable: Iterable[str]
) -> Tensor:
    """`client_losses` to first order, ``(K,)``; none is finite if the loss at θ̄ is not."""
    return changed_losses(*first_order_changes(loss, bodies, valid, differentiable))


def first_order_changes(
    loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor, differentiable: Iterable[str]
) -> tuple[Tensor, Tensor]:
    """The loss at the mean θ̄ of K bodies, ``()``, and the changes δ ``(K,)``; arguments as of `client_losses`.

    Names that are not ``differentiable`` stay at their mean, and what leaving model i out does to them is neglected:
    torch has no derivative with respect to BatchNorm's running statistics.
    """
    count = valid.sum()
    mean = {name: tensor.sum(0) / count.clamp(min=1).to(tensor.dtype) for name, tensor in bodies.items()}
    free = {name: mean[name] for name in differentiable}
    gradient, at_mean = gradient_and_value(lambda some: loss({**mean, **some}), free)
    products = torch.zeros_like(valid, dtype=at_mean.dtype)  # ⟨g, θ_i⟩
    for name in free:
        # As the weight of a linear layer the stack is never copied, not even for the lifted gradients of many clients.
        products = products + F.linear(gradient[name].flatten(), bodies[name].flatten(1))
    return at_mean, changes(products, valid)


def changes(products: Tensor, valid: Tensor) -> Tensor:
    """δ from ⟨g, θ_i⟩, both ``(K, ...)`` with i first; those of models that are not valid must be 0."""
    count = valid.sum()
    return (products.sum(0) / count.clamp(min=1) - products) / (count - 1).clamp(min=1)


def changed_losses(at_mean: Tensor, changes: Tensor) -> Tensor:
    """Losses from l, the one at the mean, and changes δ; tensors that broadcast.

    l_{-i} ≈ l + δ_i where the loss grows and l·exp(δ_i/l) where it falls: equal to first order, and positive however
    far a body is from the mean. Over real runs the influence is on average as near to the exact one as by either form
    for all i, or nearer (``python -m benchmarks.first_order``).
    """
    falls = (changes.clamp(max=0) / at_mean.clamp(min=SMALLEST_LOSS)).exp()
    return at_mean * falls + changes.clamp(min=0)
