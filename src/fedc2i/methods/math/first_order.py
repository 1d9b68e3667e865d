"""What a client can state about its losses so that a server can tell, to first order, what leaving others out does.

A leave-one-out mean would show a client the model that is left out: θ_i = Mθ̄ − (M−1)θ^{-i}. But θ^{-i} is
θ̄ + (θ̄ − θ_i)/(M−1), so a loss l and its gradient g at θ̄ are all that a server, which knows every θ_i, needs for

    l_{-i} ≈ l + ⟨g, θ̄ − θ_i⟩/(M−1),

and likewise for each row of the head. Notation as in `math.influence`; a client's functions can be lifted with vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, Stacked
from fedc2i.methods.math.influence import changed_losses, logsumexp_without_each, sharp_cross_entropy
from fedc2i.methods.math.prototypes import AT_ONCE
from fedc2i.training.local import Batch

NOT_MEASURED = -1.0  # stands for a loss that is not finite, which no server would accept


def body_statement(
    logits: Callable[[Params, Tensor], Tensor], params: Params, names: Sequence[str], data: Batch
) -> tuple[Tensor, Tensor]:
    """The loss over all of ``data`` at ``params`` and its gradient with respect to ``names``, flat, in that order.

    Args:
        logits: of a model and images.
        params: the model.
        names: which of its tensors; perhaps none.
        data: the client's samples; a few at a time are in memory.
    """
    free = {name: params[name] for name in names}

    def total(some: Params, part: Batch) -> Tensor:
        return sharp_cross_entropy(logits({**params, **some}, part.x), part.y, part.w) * part.w.sum().clamp(min=1)

    loss, gradients = data.w.new_zeros(()), {name: torch.zeros_like(tensor) for name, tensor in free.items()}
    for part in _parts(data):
        more, value = grad_and_value(total)(free, part) if free else ({}, total({}, part))
        loss, gradients = loss + value, {name: gradients[name] + more[name] for name in free}
    flat = torch.cat([loss.new_zeros(0), *(gradients[name].flatten() for name in names)])
    return _sound(loss / _count(data), flat / _count(data))


def row_statement(
    features: Callable[[Tensor], Tensor],
    own: Callable[[Tensor], Tensor],
    mean: Callable[[Tensor], Tensor],
    bias: bool,
    data: Batch,
) -> tuple[Tensor, Tensor]:
    """For each class c the loss when row c of the own head is the mean row, and its gradient with respect to that row.

    Replacing a row changes one logit of a sample; see `influence.class_losses`.

    Args:
        features: images to h(x) ``(B, d)``.
        own: features to the own head's logits ``(B, C)``.
        mean: features to the mean head's.
        bias: whether the head has one; its entry is then the last of a row.
        data: the client's samples; a few at a time are in memory.

    Returns:
        Losses ``(C,)`` and gradients ``(C, d)``, or ``(C, d + 1)``.
    """
    losses, gradients = [], []
    for part in _parts(data):
        h = features(part.x)
        logits, w = own(h), part.w.to(h.dtype)
        label = part.y[:, None] == torch.arange(logits.shape[1], device=h.device)  # (B, C)
        sign = 1 - 2 * label.to(h.dtype)
        target = logits.gather(1, part.y[:, None])
        rest = logsumexp_without_each(logits - target)
        margins = sign * (mean(h) - target - rest)
        losses.append(w @ (torch.where(label, 0.0, rest) + F.softplus(margins)))
        inputs = torch.cat([h, torch.ones_like(h[:, :1])], 1) if bias else h
        gradients.append((w[:, None] * sign * margins.sigmoid()).mT @ inputs)
    return _sound(torch.stack(losses).sum(0) / _count(data), torch.stack(gradients).sum(0) / _count(data))


def head_rows(head: Stacked) -> Tensor:
    """Heads of K clients, weight ``(K, C, d)`` and perhaps bias ``(K, C)``, as rows ``(K, C, d)``, or one longer."""
    parts = sorted(head.values(), key=lambda tensor: -tensor.ndim)
    return torch.cat([tensor.reshape(*tensor.shape[:2], -1) for tensor in parts], 2)


def body_products(gradients: Tensor, bodies: Stacked, names: Sequence[str]) -> Tensor:
    """⟨g_m, θ_i⟩ ``(K, K)``, i first, of flat gradients ``(K, P)`` with respect to ``names``, in that order."""
    total, low = gradients.new_zeros(len(gradients), len(gradients)), 0
    for name in names:
        models = bodies[name].flatten(1)
        total = total + models @ gradients[:, low : low + models.shape[1]].mT
        low += models.shape[1]
    return total


def stated_losses(losses: Tensor, products: Tensor, valid: Tensor) -> Tensor:
    """Leave-one-out losses of every client, to first order.

    Args:
        losses: ``(K,)`` of each client m at the mean, or ``(K, C)`` with each row of its head at the mean.
        products: ``(K, K)`` or ``(K, K, C)``, first i then m: ⟨g_m, θ_i⟩; those of models that are not valid are 0.
        valid: ``(K,)`` booleans, the models that take part.

    Returns:
        l_{-i} of client m in the shape of ``products``; nan where m could measure nothing.
    """
    count = valid.sum()
    changes = (products.sum(0) / count.clamp(min=1) - products) / (count - 1).clamp(min=1)
    return torch.where(losses < 0, torch.nan, changed_losses(losses, changes))


def _parts(data: Batch) -> Iterator[Batch]:
    for low in range(0, len(data.y), AT_ONCE):
        yield Batch(*(own[low : low + AT_ONCE] for own in data))


def _count(data: Batch) -> Tensor:
    return data.w.sum().clamp(min=1)


def _sound(losses: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with `NOT_MEASURED` and no gradient where something is not finite: of losses ``()`` or ``(C,)``."""
    sound = torch.isfinite(losses) & torch.isfinite(gradients).all(-1)
    return torch.where(sound, losses, NOT_MEASURED), torch.where(sound[..., None], gradients, 0.0)
