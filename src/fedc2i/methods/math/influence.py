"""Leave-one-out losses and the influence they give: the maths of FedC²I as pure functions of tensors.

Paper: Y. Tan, G. Long, J. Jiang, C. Zhang, "Influence-Oriented Personalized Federated Learning".

Notation: K models are received, C classes, B samples in the client's batch with weights ``w`` (0 marks padding).
The influence of model i on this client is large when the loss *without* i is large:

    λ_i      = l_{-i}^γ    / Σ_j l_{-j}^γ           the influence vector  (K,)
    Λ_{i,c}  = l_{-i,-c}^γ / Σ_j l_{-j,-c}^γ        the influence matrix  (K, C), one distribution a column

Nothing here branches on the values of a tensor, so every function can be lifted over clients with ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from fedc2i.core.params import Params, Stacked, uniform
from fedc2i.training.local import weighted_mean

SMALLEST_LOSS = 1e-12
AT_ONCE = 2**18  # class-level margins in a block: it fits a cache, and on a GPU many clients' blocks fit its memory


def sharp_cross_entropy(logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Mean cross entropy, precise however small; logits ``(B, C)``, labels and sample weights ``(B,)``.

    Influence is a *ratio* of losses that approach zero as clients fit their data. The usual log-softmax rounds a loss
    below 1e-7 to nothing in single precision; softplus(logsumexp_{k≠y}(z_k − z_y)) keeps its relative precision.
    """
    margins = logits - logits.gather(1, y[:, None])
    others = margins.masked_fill(_is_label(y, logits.shape[1]), -torch.inf).logsumexp(1)
    return weighted_mean(F.softplus(others), w)


def leave_one_out(total: Params, one: Params, count: Tensor) -> Params:
    """The mean of ``count`` models without one of them, θ^{-i} = (S − θ_i)/(count − 1), from their sum S.

    With a single model there is nothing left to average; its (meaningless) result is finite and never used.
    """
    others = (count - 1).clamp(min=1)
    return {name: (total[name] - one[name]) / others.to(one[name].dtype) for name in one}


def client_losses(loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor) -> Tensor:
    """l_{-i} for every received body: the client's loss with the mean of all other bodies.

    Args:
        loss: the client's loss on its batch as a function of a body (its own head is inside).
        bodies: the K received bodies, every tensor ``(K, ...)``; those not valid must be zero.
        valid: ``(K,)`` booleans, the models that take part.

    Returns:
        ``(K,)`` losses; entries of models that are not valid mean nothing.
    """
    total = {name: tensor.sum(0) for name, tensor in bodies.items()}
    count = valid.sum()
    losses = []
    for i in range(valid.shape[0]):
        without = leave_one_out(total, {name: tensor[i] for name, tensor in bodies.items()}, count)
        losses.append(loss(without))
    return torch.stack(losses)


def first_order_losses(
    loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor, differentiable: Iterable[str]
) -> Tensor:
    """`client_losses` to first order in the distance of θ^{-i} from θ̄, the mean of all valid bodies.

    Arguments are those of `first_order_changes`.

    Returns:
        ``(K,)`` losses; entries of models that are not valid mean nothing. None is finite if the loss at θ̄ is not.
    """
    return changed_losses(*first_order_changes(loss, bodies, valid, differentiable))


def changed_losses(at_mean: Tensor, changes: Tensor) -> Tensor:
    """Losses from the one at the mean, l, and changes δ_i to first order; tensors that broadcast.

    l_{-i} ≈ l + δ_i where the loss grows and l·exp(δ_i/l) where it falls: equal to first order, and positive however
    far a body is from the mean. Over real runs the influence is on average as near to the exact one as by either form
    for all i, or nearer (``python -m benchmarks.first_order``).
    """
    falls = (changes.clamp(max=0) / at_mean.clamp(min=SMALLEST_LOSS)).exp()
    return at_mean * falls + changes.clamp(min=0)


def first_order_changes(
    loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor, differentiable: Iterable[str]
) -> tuple[Tensor, Tensor]:
    """The loss at the mean θ̄ of K bodies, and how it changes to first order when one of them is left out.

    θ^{-i} = θ̄ + (θ̄ − θ_i)/(K − 1), so one gradient serves all: δ_i = ⟨∇l(θ̄), θ̄ − θ_i⟩/(K − 1).

    Args:
        loss: as in `client_losses`, and differentiable.
        bodies: as in `client_losses`.
        valid: as in `client_losses`.
        differentiable: the names that count. The others stay at their mean, and what leaving model i out does to them
            is neglected: torch has no derivative with respect to BatchNorm's running statistics.

    Returns:
        The loss, a number, and the changes ``(K,)``, which sum to zero over the valid models.
    """
    count = valid.sum()
    mean = {name: tensor.sum(0) / count.clamp(min=1).to(tensor.dtype) for name, tensor in bodies.items()}
    free = {name: mean[name] for name in differentiable}
    gradient, at_mean = grad_and_value(lambda some: loss({**mean, **some}))(free)
    products = torch.zeros_like(valid, dtype=at_mean.dtype)  # ⟨∇l(θ̄), θ_i⟩
    for name in free:
        # As the weight of a linear layer the stack is never copied, not even for the lifted gradients of many clients.
        products = products + F.linear(gradient[name].flatten(), bodies[name].flatten(1))
    return at_mean, (products.sum() / count.clamp(min=1) - products) / (count - 1).clamp(min=1)


def class_losses(own: Tensor, peers: Tensor, y: Tensor, w: Tensor, valid: Tensor) -> Tensor:
    """l_{-i,-c}: the loss when row c of the client's classifier is the mean of all rows c but client i's.

    A classifier is linear, so replacing a row changes one logit, and the logit of a mean of rows is the mean of logits.
    All K·C losses follow from the logits of the K classifiers on one set of features. With
    r_{b,c} = logsumexp over k ≠ c of the own logits,

        l_{-i,-c} = mean_b( logaddexp(r_{b,c}, z^{-i}_{b,c}) − (z^{-i}_{b,c} if y_b = c else own_{b,y_b}) ).

    Args:
        own: ``(B, C)`` logits of the client's own classifier.
        peers: ``(K, B, C)`` logits of the received classifiers.
        y: ``(B,)`` labels.
        w: ``(B,)`` sample weights.
        valid: ``(K,)`` booleans, the models that take part, or ``(K, C)``, the rows that do.

    Returns:
        ``(K, C)`` losses; entries that are not valid mean nothing.
    """
    valid = valid.reshape(valid.shape[0], -1)  # (K, 1 or C)
    peers = torch.where(valid[:, None], peers, 0.0)
    return _class_losses(own, peers.sum(0), lambda some: peers[some].transpose(0, 1), y, w, valid)


def class_losses_of_heads(
    own: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, w: Tensor, valid: Tensor
) -> Tensor:
    """`class_losses` of K linear heads on one set of features; their logits are never in memory all at once.

    Args:
        own: ``(B, C)`` logits of the client's own classifier.
        features: ``(B, d)`` what the heads see.
        weight: ``(K, C, d)``; rows that are not valid must be zero.
        bias: ``(K, C)``, if the heads have one; entries that are not valid must be zero.
        y: ``(B,)`` labels.
        w: ``(B,)`` sample weights.
        valid: ``(K,)`` booleans, the models that take part, or ``(K, C)``, the rows that do.
    """

    def logits(some: slice) -> Tensor:
        rows, start = weight[some].flatten(0, 1), None if bias is None else bias[some].flatten()
        return F.linear(features, rows, start).reshape(len(features), -1, weight.shape[1])

    total = F.linear(features, weight.sum(0), None if bias is None else bias.sum(0))
    return _class_losses(own, total, logits, y, w, valid.reshape(valid.shape[0], -1))


def _class_losses(
    own: Tensor, total: Tensor, peers: Callable[[slice], Tensor], y: Tensor, w: Tensor, valid: Tensor
) -> Tensor:
    """`class_losses` from the sum of the peers' logits ``(B, C)`` and, for some models, their logits ``(B, k, C)``.

    Both cases of the formula are softplus, of margin m = z^{-i} − r:  r + softplus(m), and softplus(−m) where y_b = c.
    """
    w = w.to(own.dtype)
    others = (valid.sum(0) - 1).clamp(min=1).to(own.dtype)  # (1 or C,)
    label = _is_label(y, own.shape[1])
    sign = 1 - 2 * label.to(own.dtype)  # (B, C)
    # Measured from the target's logit, small losses are sums of small terms and keep their relative precision.
    target = own.gather(1, y[:, None])  # (B, 1)
    rest = logsumexp_without_each(own - target)  # (B, C)
    start = sign * (total / others - target - rest)
    slope = -sign / others
    fixed = w @ torch.where(label, 0.0, rest)  # (C,)
    size = max(1, AT_ONCE // max(1, own.numel()))
    sums = []
    for low in range(0, valid.shape[0], size):
        margins = torch.addcmul(start[:, None], slope[:, None], peers(slice(low, low + size)))  # (B, k, C)
        sums.append((w @ F.softplus(margins).flatten(1)).reshape(-1, own.shape[1]))  # (k, C)
    return (torch.cat(sums) + fixed) / w.sum().clamp(min=1)


def _is_label(y: Tensor, classes: int) -> Tensor:
    return y[:, None] == torch.arange(classes, device=y.device)  # (B, C); one_hot cannot be lifted inside a gradient


def logsumexp_without_each(logits: Tensor) -> Tensor:
    """``r[b, c]`` = log Σ_{k≠c} exp(logits[b, k]), without ever subtracting exponentials.

    A running logsumexp from the left and one from the right meet at c: exact where ``log(S − e^{z_c})`` would cancel.
    """
    before = logits.logcumsumexp(1)[:, :-1]
    after = logits.flip(1).logcumsumexp(1).flip(1)[:, 1:]
    nothing = logits.new_full((logits.shape[0], 1), -torch.inf)
    return torch.logaddexp(torch.cat([nothing, before], 1), torch.cat([after, nothing], 1))


def influence(
    losses: Tensor, gamma: float | Tensor, valid: Tensor, not_finite: Literal["zero", "largest"] = "zero"
) -> Tensor:
    """Losses to weights: softmax over clients of γ·log(loss), in log space so that no power can overflow.

    Args:
        losses: ``(K,)`` or ``(K, C)`` leave-one-out losses.
        gamma: sensitivity, at least 0, one or ``(C,)``; 0 gives equal weights.
        valid: ``(K,)`` or ``(K, C)`` booleans; the others get weight 0.
        not_finite: what a loss that is not finite is worth: nothing, or as much as the largest number. The latter is
            the formula's limit: one huge model makes every loss overflow but its own, and must not win by that.

    Returns:
        Weights of the shape of ``losses`` that sum to one over clients. Where no loss is finite all weights are 0, and
        the caller decides what to keep.
    """
    logs, part = log_losses(losses, valid, not_finite)
    return softmax_over(part, gamma * logs)


def log_losses(losses: Tensor, valid: Tensor, not_finite: Literal["zero", "largest"]) -> tuple[Tensor, Tensor]:
    """Finite logarithms of the losses, and which of them take part: arguments and shapes as in `influence`."""
    if valid.ndim < losses.ndim:
        valid = valid[:, None].expand_as(losses)
    usable = valid & torch.isfinite(losses)
    losses = torch.where(usable, losses, torch.finfo(losses.dtype).max)
    part = usable if not_finite == "zero" else valid & usable.any(0)
    return losses.clamp(min=SMALLEST_LOSS).log(), part


def softmax_over(part: Tensor, scores: Tensor) -> Tensor:
    """Softmax over clients of those that take part; 0 for the others, and for all where nobody does."""
    weights = torch.where(part, scores, -torch.inf).softmax(0)
    return torch.where(part.any(0), weights, 0.0)  # nan after softmax where none takes part


def fill_empty(weights: Tensor, fallback: Tensor) -> Tensor:
    """``weights`` ``(K,)`` or ``(K, C)``, with columns that sum to nothing replaced by ``fallback`` ``(K,)``."""
    if weights.ndim > 1:
        fallback = fallback[:, None].expand_as(weights)
    return torch.where(weights.sum(0) > 0, weights, fallback)


def equal_share(valid: Tensor, like: Tensor) -> Tensor:
    """``(K,)`` equal weights over the valid models; over all of them if none is valid."""
    share = valid.to(like.dtype) / valid.sum().clamp(min=1)
    return torch.where(valid.any(), share, uniform(valid.shape[0], like))
