"""Leave-one-out losses and the influence they give: the maths of FedC²I as pure functions of tensors.

Paper: Y. Tan, G. Long, J. Jiang, C. Zhang, "Influence-Oriented Personalized Federated Learning".

Notation: K models are received, C classes, B samples in the client's batch with weights ``w`` (0 marks padding).
The influence of model i on this client is large when the loss *without* i is large:

    λ_i      = l_{-i}^γ    / Σ_j l_{-j}^γ           the influence vector  (K,)
    Λ_{i,c}  = l_{-i,-c}^γ / Σ_j l_{-j,-c}^γ        the influence matrix  (K, C), one distribution a column

Nothing here branches on the values of a tensor, so every function can be lifted over clients with ``torch.func.vmap``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from fedc2i.params import Params, Stacked, uniform

SMALLEST_LOSS = 1e-12


def sharp_cross_entropy(logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Mean cross entropy, precise however small; logits ``(B, C)``, labels and sample weights ``(B,)``.

    Influence is a *ratio* of losses that approach zero as clients fit their data. The usual log-softmax rounds a loss
    below 1e-7 to nothing in single precision; softplus(logsumexp_{k≠y}(z_k − z_y)) keeps its relative precision.
    """
    margins = logits - logits.gather(1, y[:, None])
    others = margins.masked_fill(_is_label(y, logits.shape[1]), -torch.inf).logsumexp(1)
    return weighted_mean(F.softplus(others), w)


def weighted_mean(values: Tensor, w: Tensor) -> Tensor:
    """Mean of ``values`` ``(B,)`` over the samples with weight; padding has none."""
    return (values * w).sum() / w.sum().clamp(min=1)


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
    valid = valid.reshape(valid.shape[0], 1, -1)  # (K, 1, 1 or C)
    peers = torch.where(valid, peers, 0.0)
    others = (valid.sum(0) - 1).clamp(min=1).to(own.dtype)  # (1, 1 or C)
    target = own.gather(1, y[:, None])  # (B, 1)
    # Measured from the target's logit, small losses are sums of small terms and keep their relative precision.
    swapped = (peers.sum(0) - peers) / others - target  # (K, B, C)
    rest = logsumexp_without_each(own - target)  # (B, C)
    label_row = F.softplus(rest - swapped)  # row y_b itself is replaced
    other_row = torch.logaddexp(rest, swapped)
    losses = torch.where(_is_label(y, own.shape[1]), label_row, other_row)  # (K, B, C)
    return (losses * w[:, None]).sum(1) / w.sum().clamp(min=1)


def _is_label(y: Tensor, classes: int) -> Tensor:
    return F.one_hot(y, classes).to(torch.bool)  # (B, C)


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
        gamma: sensitivity, at least 0; 0 gives equal weights.
        valid: ``(K,)`` or ``(K, C)`` booleans; the others get weight 0.
        not_finite: what a loss that is not finite is worth: nothing, or as much as the largest number. The latter is
            the formula's limit: one huge model makes every loss overflow but its own, and must not win by that.

    Returns:
        Weights of the shape of ``losses`` that sum to one over clients. Where no loss is finite all weights are 0, and
        the caller decides what to keep.
    """
    if valid.ndim < losses.ndim:
        valid = valid[:, None].expand_as(losses)
    usable = valid & torch.isfinite(losses)
    losses = torch.where(usable, losses, torch.finfo(losses.dtype).max)
    scores = gamma * losses.clamp(min=SMALLEST_LOSS).log()
    weights = torch.where(usable if not_finite == "zero" else valid, scores, -torch.inf).softmax(0)
    return torch.where(usable.any(0), weights, 0.0)  # nan after softmax where none is valid


def fill_empty(weights: Tensor, fallback: Tensor) -> Tensor:
    """``weights`` ``(K,)`` or ``(K, C)``, with columns that sum to nothing replaced by ``fallback`` ``(K,)``."""
    if weights.ndim > 1:
        fallback = fallback[:, None].expand_as(weights)
    return torch.where(weights.sum(0) > 0, weights, fallback)


def equal_share(valid: Tensor, like: Tensor) -> Tensor:
    """``(K,)`` equal weights over the valid models; over all of them if none is valid."""
    share = valid.to(like.dtype) / valid.sum().clamp(min=1)
    return torch.where(valid.any(), share, uniform(valid.shape[0], like))
