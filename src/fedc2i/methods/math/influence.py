"""The maths of FedC²I as pure functions of tensors: leave-one-out losses, γ, and the influence they give.

Paper: Y. Tan, G. Long, J. Jiang, C. Zhang, "Influence-Oriented Personalized Federated Learning".

Notation: K models are received, C classes, B samples in the client's batch with weights ``w`` (0 marks padding);
``valid`` ``(K,)`` says which models take part. The influence of model i on this client is large when the loss *without*
i is large:

    λ_i      = l_{-i}^γ    / Σ_j l_{-j}^γ           the influence vector  (K,)
    Λ_{i,c}  = l_{-i,-c}^γ / Σ_j l_{-j,-c}^γ        the influence matrix  (K, C), one distribution a column

Nothing here branches on the values of a tensor, so every function can be lifted over clients with ``torch.func.vmap``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  (the name torch's own documentation uses)

from fedc2i.core.params import Params, Stacked, row, uniform
from fedc2i.training.local import weighted_mean

Progress = Callable[[], float]  # how much of a run is done; only who needs it asks

SMALLEST_LOSS = 1e-12
AT_ONCE = 2**18  # class-level margins in a block: it fits a cache, and on a GPU many clients' blocks fit its memory
SMALLEST, LARGEST = 1e-6, 1e6  # of perplexity's γ; beyond, the rounding of single-precision losses would decide
STEPS = 50  # halvings of log γ between them: exact to 3e-14


def sharp_cross_entropy(logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Mean cross entropy, precise however small; logits ``(B, C)``, labels and sample weights ``(B,)``.

    Influence is a *ratio* of losses that approach zero as clients fit their data. The usual log-softmax rounds a loss
    below 1e-7 to nothing in single precision; softplus(logsumexp_{k≠y}(z_k − z_y)) keeps its relative precision.
    """
    margins = logits - logits.gather(1, y[:, None])
    others = margins.masked_fill(is_label(y, logits.shape[1]), -torch.inf).logsumexp(1)
    return weighted_mean(F.softplus(others), w)


def client_losses(loss: Callable[[Params], Tensor], bodies: Stacked, valid: Tensor) -> Tensor:
    """l_{-i} ``(K,)``: the loss with the mean of all bodies but i's, θ^{-i} = (S − θ_i)/(K − 1) with S = Σ_j θ_j.

    ``loss`` is the client's on its batch as a function of a body. ``bodies`` are ``(K, ...)``, zero where not valid;
    losses of those mean nothing, nor does that of a single model.
    """
    total = {name: tensor.sum(0) for name, tensor in bodies.items()}
    others = (valid.sum() - 1).clamp(min=1)
    losses = []
    for i in range(valid.shape[0]):
        body = row(bodies, i)
        losses.append(loss({name: (total[name] - body[name]) / others.to(body[name].dtype) for name in body}))
    return torch.stack(losses)


def class_losses(
    own: Tensor, features: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, w: Tensor, valid: Tensor
) -> Tensor:
    """l_{-i,-c} ``(K, C)``: the loss when row c of the client's head is the mean of all rows c but client i's.

    A head is linear, so replacing a row changes one logit, and the logit of a mean of rows is the mean of logits. All
    K·C losses follow from the logits of the K heads on one set of features. With
    r_{b,c} = logsumexp over k ≠ c of the own logits,

        l_{-i,-c} = mean_b( logaddexp(r_{b,c}, z^{-i}_{b,c}) − (z^{-i}_{b,c} if y_b = c else own_{b,y_b}) ).

    Both cases are softplus of the margin m = z^{-i} − r: r + softplus(m), and softplus(−m) where y_b = c. The logits of
    all heads are never in memory at once.

    Args:
        own: ``(B, C)`` logits of the client's own head.
        features: ``(B, d)`` what the heads see.
        weight: ``(K, C, d)``; those of models that are not valid must be zero.
        bias: ``(K, C)``, if the heads have one; those of models that are not valid must be zero.
        y: ``(B,)`` labels.
        w: ``(B,)`` sample weights.
        valid: ``(K,)`` booleans; losses of the others mean nothing.
    """
    w, classes = w.to(own.dtype), own.shape[1]
    others = (valid.sum() - 1).clamp(min=1).to(own.dtype)
    label = is_label(y, classes)
    sign = 1 - 2 * label.to(own.dtype)  # (B, C)
    # Measured from the target's logit, small losses are sums of small terms and keep their relative precision.
    target = own.gather(1, y[:, None])  # (B, 1)
    rest = logsumexp_without_each(own - target)  # (B, C)
    total = F.linear(features, weight.sum(0), None if bias is None else bias.sum(0))  # (B, C)
    start = sign * (total / others - target - rest)
    slope = -sign / others
    fixed = w @ torch.where(label, 0.0, rest)  # (C,)
    size = max(1, AT_ONCE // max(1, own.numel()))
    sums = []
    for low in range(0, valid.shape[0], size):
        some = slice(low, low + size)
        biases = None if bias is None else bias[some].flatten()
        logits = F.linear(features, weight[some].flatten(0, 1), biases).reshape(len(features), -1, classes)
        margins = torch.addcmul(start[:, None], slope[:, None], logits)  # (B, k, C)
        sums.append((w @ F.softplus(margins).flatten(1)).reshape(-1, classes))  # (k, C)
    return (torch.cat(sums) + fixed) / w.sum().clamp(min=1)


def is_label(y: Tensor, classes: int) -> Tensor:
    """``(B, C)`` booleans; one_hot cannot be lifted inside a gradient."""
    return y[:, None] == torch.arange(classes, device=y.device)


def logsumexp_without_each(logits: Tensor) -> Tensor:
    """``r[b, c]`` = log Σ_{k≠c} exp(logits[b, k]), without ever subtracting exponentials.

    A running logsumexp from the left and one from the right meet at c: exact where ``log(S − e^{z_c})`` would cancel.
    """
    before = logits.logcumsumexp(1)[:, :-1]
    after = logits.flip(1).logcumsumexp(1).flip(1)[:, 1:]
    nothing = logits.new_full((logits.shape[0], 1), -torch.inf)
    return torch.logaddexp(torch.cat([nothing, before], 1), torch.cat([after, nothing], 1))


def influence(losses: Tensor, gamma: float | Tensor, valid: Tensor) -> Tensor:
    """Losses ``(K,)`` or ``(K, C)`` to weights that sum to one over clients: softmax of γ·log(loss), never overflowing.

    γ is at least 0, one or ``(C,)``; 0 gives equal weights. A model that is not valid, or whose loss is not finite,
    gets weight 0. Where no loss is finite all weights are 0, and the caller decides what to keep.
    """
    logs, part = _log_losses(losses, valid)
    return _softmax_over(part, gamma * logs)


def _log_losses(losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Finite logarithms of the losses, and which of them take part."""
    part = valid.reshape(-1, *[1] * (losses.ndim - 1)) & torch.isfinite(losses)
    losses = torch.where(part, losses, torch.finfo(losses.dtype).max)
    return losses.clamp(min=SMALLEST_LOSS).log(), part


def _softmax_over(part: Tensor, scores: Tensor) -> Tensor:
    """Softmax over clients of those that take part; 0 for the others, and for all where nobody does."""
    weights = torch.where(part, scores, -torch.inf).softmax(0)
    return torch.where(part.any(0), weights, 0.0)  # nan after softmax where none takes part


class Gamma(str):
    """An adaptive γ, which the paper leaves to future work; written as the text that makes it, such as ``ramp(10)``.

    ramp(γ)        γ·t/(T − 1) in round t = 0..T − 1: FedAvg at first, full sensitivity in the last round
    scaled(γ)      γ·(M − 1)/4 for M models: leaving one of M out moves their mean by 1/(M − 1), and the losses with it;
                   γ itself for the paper's five clients, and ``scaled`` is ``scaled(5)``
    perplexity(k)  the γ that gives weights of k effective models, exp(entropy) = k, to each client and each class;
                   with a share, perplexity(40%), k is that share of the models
    """

    kind: str
    amount: float
    is_share: bool
    allowed: ClassVar[str] = (
        "ramp(number from 0) | scaled(number from 0) | perplexity(number from 1 or share up to 100%, such as 40%)"
    )

    def __new__(cls, text: str) -> Self:
        """From ``"ramp(10)"``; a `ValueError` if it is something else, or its number is out of range."""
        found = re.fullmatch(r"\s*(ramp|scaled|perplexity)\s*\(([^()%]*)(%?)\s*\)\s*", text)
        if found is None:
            raise ValueError(f"γ must be {cls.allowed}, got '{text}'")
        kind, amount, share = found[1], float(found[2]) + 0.0, found[3]  # + 0.0: no negative zero
        least = 1.0 if kind == "perplexity" else 0.0
        in_range = 0 < amount <= 100 if share else least <= amount < math.inf
        if not in_range or (share and kind != "perplexity"):
            raise ValueError(f"γ must be {cls.allowed}, got '{text}'")
        short = f"{amount:g}"
        made = super().__new__(cls, f"{kind}({short if float(short) == amount else repr(amount)}{share})")
        made.kind, made.amount, made.is_share = kind, amount, bool(share)
        return made

    @classmethod
    def parse(cls, value: Any) -> Gamma:
        """From text or such an object, as the options of a method are read; raises ValueError for anything else."""
        if not isinstance(value, str):
            raise ValueError(value)
        return cls("scaled(5)" if value.strip() == "scaled" else value)

    def weights(self, losses: Tensor, valid: Tensor, done: Progress) -> tuple[Tensor, Tensor]:
        """Losses to weights as in `influence`, and the γ used, ``()`` or ``(C,)``; only a ramp asks for `progress`."""
        if self.kind == "perplexity":
            return self._by_perplexity(losses, valid)
        if self.kind == "scaled":
            gamma = self.amount * (valid.sum() - 1).clamp(min=0).to(losses.dtype) / 4
        else:
            gamma = losses.new_full((), self.amount * done())
        return influence(losses, gamma, valid), gamma.expand(losses.shape[1:])

    def _by_perplexity(self, losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Bisects log γ in each column, a fixed number of times, since entropy falls as γ rises.

        With no more than k models γ is 0. Where the largest losses are equal, no γ may concentrate the weights on k
        models: the largest γ is used.
        """
        logs, part = _log_losses(losses, valid)
        logs = logs.double()
        top = torch.where(part, logs, -torch.inf).amax(0)
        below = torch.where(part, logs - top, 0.0)  # differences, lest γ magnify the rounding of what all share
        count = part.sum(0).to(logs.dtype)
        wanted = (count * (self.amount / 100)).clamp(min=1.0) if self.is_share else torch.full_like(count, self.amount)
        low, high = torch.full_like(top, math.log(SMALLEST)), torch.full_like(top, math.log(LARGEST))
        for _ in range(STEPS):
            middle = (low + high) / 2
            flat = _effective(middle.exp() * below, part) > wanted
            low, high = torch.where(flat, middle, low), torch.where(flat, high, middle)
        gamma = torch.where(count > wanted, ((low + high) / 2).exp(), 0.0)
        return _softmax_over(part, (gamma * below).to(losses.dtype)), gamma.to(losses.dtype)


def _effective(scores: Tensor, part: Tensor) -> Tensor:
    """exp(entropy) of softmax(scores) over those that take part, of scores at most 0: ``(K, ...)`` to ``(...)``."""
    powers = torch.where(part, scores.exp(), 0.0)
    total = powers.sum(0)
    return total * (-(powers * scores).sum(0) / total).exp()


def progress(round: int, rounds: int) -> float:
    """How much of a run is done: 0 in round 1, 1 in the last."""
    return (round - 1) / (rounds - 1) if rounds > 1 else 1.0


def weigh(losses: Tensor, gamma: float | Gamma, valid: Tensor, done: Progress) -> tuple[Tensor, Tensor | None]:
    """Losses ``(K,)`` or ``(K, C)`` to weights, and the γ ``()`` or ``(C,)`` that an adaptive one came to."""
    if isinstance(gamma, Gamma):
        return gamma.weights(losses, valid, done)
    return influence(losses, gamma, valid), None


def equal_share(valid: Tensor, like: Tensor) -> Tensor:
    """``(K,)`` equal weights over the valid models; over all of them if none is valid."""
    share = valid.to(like.dtype) / valid.sum().clamp(min=1)
    return torch.where(valid.any(), share, uniform(valid.shape[0], like))


class Influence(NamedTuple):
    """One level of influence.

    Attributes:
        weights: ``(K,)`` or ``(K, C)``.
        losses: the leave-one-out losses of the same shape; none if they were not measured.
        gamma: ``()`` or ``(C,)`` what an adaptive γ came to; none if γ is a number.
    """

    weights: Tensor
    losses: Tensor | None = None
    gamma: Tensor | None = None

    def or_else(self, fallback: Tensor) -> Influence:
        """With ``fallback`` ``(K,)`` in columns of weights that sum to nothing."""
        if self.weights.ndim > 1:
            fallback = fallback[:, None].expand_as(self.weights)
        return self._replace(weights=torch.where(self.weights.sum(0) > 0, self.weights, fallback))

    def settled(self, can_measure: Tensor, valid: Tensor) -> Influence:
        """Equal weights for a client that cannot measure; γ for each entry, nan where nothing was measured."""
        columns = [1] * (self.weights.ndim - 1)
        equal = equal_share(valid, self.weights).reshape(-1, *columns)
        measured = can_measure & valid[:, None] if columns else can_measure
        gamma = None if self.gamma is None else torch.where(measured, self.gamma, torch.nan)
        return Influence(torch.where(can_measure, self.weights, equal), self.losses, gamma)

    def report(self, gamma: str, losses: str, weights: str) -> dict[str, Tensor]:
        """By these names; nothing if it was not measured."""
        if self.losses is None:
            return {}
        adaptive = {} if self.gamma is None else {gamma: self.gamma}
        return {**adaptive, losses: self.losses, weights: self.weights}
