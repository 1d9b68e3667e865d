"""FedC²I with the mixing on the server: no client ever receives another's model. Ours, not the paper's.

The server mixes for each client, who receives its own mixed model and two means, of all bodies and of all heads. From
such means it cannot measure leave-one-out losses: they would show it the removed model, θ_i = Mθ̄ − (M−1)θ^{-i}. It
uploads a *statement* beside its model instead, over all its training data:

    l, g        the loss of (θ̄, φ_m) and its gradient with respect to θ̄
    l_c, g_c    for each class the loss of (θ_m, φ_m with the mean row φ̄_c) and its gradient with respect to that row

From these the server computes first-order losses l + ⟨g, θ̄ − θ_i⟩/(M−1) and l_c + ⟨g_c, φ̄_c − φ_{i,c}⟩/(M−1), and from
them λ_m and Λ_m as FedC²I does. θ̄ and φ̄ in the statement are those that the client received last, one round old (in
the first round, the model it started from); θ_i, and θ̄ in the differences, are the present ones.

What this hides, and what not: a peer's model stays hidden as long as there are more unknown models than equations. A
client knows the mean, its mix and, with ``tell_weights``, the weights of its mix. With two clients the mean alone gives
the other model away; with three, the mean and the mix with its weights do. A mix with nearly all weight on one peer
nearly is its model, and a client that lies in its statement can bring that about. The *server* learns more than in
FedC²I: a gradient over the whole training data and, class by class, the mean feature of the client's errors, from which
samples or class counts of a small client might be reconstructed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, Stacked, mix, prefixed, select, unprefixed
from fedc2i.methods.base import Method, Site
from fedc2i.methods.math.first_order import changed_losses, changes
from fedc2i.methods.math.influence import (
    Gamma,
    Progress,
    equal_share,
    is_label,
    logsumexp_without_each,
    progress,
    sharp_cross_entropy,
    weigh,
)
from fedc2i.methods.math.prototypes import AT_ONCE
from fedc2i.methods.messages import Download, Message, Parts, Uploads, marked, without_broken
from fedc2i.training.local import Batch, gradient_and_value

MEAN = "mean/"
WEIGHTS = ("influence_vector", "influence_matrix")
NOT_MEASURED = -1.0  # stands for a loss that is not finite, which no server would accept


@dataclass(frozen=True)
class Statement(Message):
    """What a client says of its losses; on the server with a leading axis K.

    Attributes:
        loss: ``()`` l, at the mean body.
        gradient: ``(P,)`` g, flat, over the body's trained tensors in alphabetical order.
        class_losses: ``(C,)`` l_c.
        class_gradients: ``(C, d)`` g_c, one longer if the head has a bias.
        rounds: ``()`` how many the run has; sent only for an adaptive γ, as the server does not know it.
    """

    prefix: ClassVar[str] = "statement/"

    loss: Tensor
    gradient: Tensor
    class_losses: Tensor
    class_gradients: Tensor
    rounds: Tensor | None = None


@dataclass(frozen=True)
class FedC2IServer(Method):
    """Influence by first-order statements; bodies and rows of the head mixed on the server."""

    name = "fedc2i-server"
    title = "FedC²I (server mixes)"
    about = "fedc2i mixed on the server, from losses and gradients that clients state; no peer's model is sent"
    keeps_uploads = True

    gamma: float | Gamma = option(5.0, "sensitivity γ; 0 is FedAvg; a number or an adaptive one", low=0)  # noqa: RUF009
    gamma_class: float | Gamma | None = option(None, "γ of the influence matrix; none: the same", low=0)  # noqa: RUF009
    tell_weights: bool = option(True, "send a client its λ and Λ along, for reports")

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and the statement about the means it received last, or about its start if there are none yet."""
        model, mean = site.model, unprefixed(MEAN, site.received) or site.start
        own = super().upload(params, data, site)
        trained = sorted(select(own, model.body_names).keys() & set(model.trainable))
        at_mean = {**params, **select(mean, model.body_names)}
        adapts = isinstance(self.gamma, Gamma) or isinstance(self.gamma_class, Gamma)
        statement = Statement(
            *body_statement(site.logits, at_mean, trained, data),
            *row_statement(
                lambda x: site.features(params, x),
                lambda h: model.head(params, h),
                lambda h: model.head(mean, h),
                len(model.head_names) > 1,
                data,
            ),
            torch.full_like(site.position, site.rounds) if adapts else None,
        )
        buffers = own.keys() - set(trained) - set(model.head_names)
        return {**marked(own, model.head_names, buffers), **statement.flat()}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The two means for all; for each its mixed model and, for reports, its weights."""
        said, parts = Statement.read(uploads.tensors), Parts.read(uploads.tensors, Statement)
        models, valid = without_broken({**parts.rest, **parts.buffers, **parts.head})
        heads = select(models, parts.head)
        bodies = select(models, lambda name: name not in heads)

        done = partial(progress, uploads.round, 1 if said.rounds is None else int(said.rounds.max()))
        share = equal_share(valid, said.loss)
        keep = torch.where(valid, torch.diag(torch.ones_like(share)), share[:, None])  # (i, m): its own, if it is sound
        products = body_products(said.gradient, bodies, sorted(parts.rest))
        vector = self._weights(stated_losses(said.loss, products, valid), self.gamma, valid, done, keep)
        products = torch.einsum("icn,mcn->imc", head_rows(heads), said.class_gradients)
        gamma = self.gamma if self.gamma_class is None else self.gamma_class
        matrix = self._weights(stated_losses(said.class_losses, products, valid), gamma, valid, done, keep)
        if not bodies:
            vector = matrix.mean(2)  # λ has nothing to mix: reports show Λ's mean

        personal = {name: torch.tensordot(vector.mT.to(rows), rows, 1) for name, rows in bodies.items()}
        personal |= {name: torch.einsum("imc,ic...->mc...", matrix.to(rows), rows) for name, rows in heads.items()}
        if self.tell_weights:
            personal |= dict(zip(WEIGHTS, (vector.mT.contiguous(), matrix.transpose(0, 1).contiguous()), strict=True))
        return Download(prefixed(MEAN, mix(share, models)), personal, uploads.clients), state

    def _weights(self, losses: Tensor, gamma: float | Gamma, valid: Tensor, done: Progress, keep: Tensor) -> Tensor:
        """Losses ``(K, K)`` or ``(K, K, C)``, first i then m, to weights that sum to one over i."""
        weights, _ = weigh(losses.flatten(1), gamma, valid, done)  # to γ, a client is a column as a class is
        weights = weights.reshape(losses.shape)
        instead = keep.reshape(*keep.shape, *[1] * (losses.ndim - 2))
        return torch.where(weights.sum(0) > 0, weights, instead)

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """What the server mixed for it; the mean of all mixed models for a client the server has nothing of yet."""
        start, _ = super().personalise(own, batch, site)
        weights = select(site.received, WEIGHTS)
        return start, {name: torch.where(site.position >= 0, own, torch.nan) for name, own in weights.items()}


def body_statement(
    logits: Callable[[Params, Tensor], Tensor], params: Params, names: Sequence[str], data: Batch
) -> tuple[Tensor, Tensor]:
    """The loss over all of ``data`` at ``params`` and its gradient with respect to ``names``, flat, in that order."""
    free = {name: params[name] for name in names}

    def total(some: Params, part: Batch) -> Tensor:
        return sharp_cross_entropy(logits({**params, **some}, part.x), part.y, part.w) * part.w.sum().clamp(min=1)

    loss, gradients = data.w.new_zeros(()), {name: torch.zeros_like(tensor) for name, tensor in free.items()}
    for part in _parts(data):
        more, value = gradient_and_value(partial(total, part=part), free)
        loss, gradients = loss + value, {name: gradients[name] + more[name] for name in free}
    flat = torch.cat([loss.new_zeros(0), *(gradients[name].flatten() for name in names)])
    count = data.w.sum().clamp(min=1)
    return _sound(loss / count, flat / count)


def row_statement(
    features: Callable[[Tensor], Tensor],
    own: Callable[[Tensor], Tensor],
    mean: Callable[[Tensor], Tensor],
    bias: bool,
    data: Batch,
) -> tuple[Tensor, Tensor]:
    """For each class c the loss when row c of the own head is the mean row, and its gradient with respect to that row.

    ``features`` maps images to h(x) ``(B, d)``, ``own`` and ``mean`` these to logits ``(B, C)`` of the two heads.
    Losses are ``(C,)``, gradients ``(C, d)`` or, if heads have a ``bias``, ``(C, d + 1)``. Replacing a row changes one
    logit of a sample; see `math.influence.class_losses`.
    """
    losses, gradients = [], []
    for part in _parts(data):
        h = features(part.x)
        logits, w = own(h), part.w.to(h.dtype)
        label = is_label(part.y, logits.shape[1])  # (B, C)
        sign = 1 - 2 * label.to(h.dtype)
        target = logits.gather(1, part.y[:, None])
        rest = logsumexp_without_each(logits - target)
        margins = sign * (mean(h) - target - rest)
        losses.append(w @ (torch.where(label, 0.0, rest) + F.softplus(margins)))
        inputs = torch.cat([h, torch.ones_like(h[:, :1])], 1) if bias else h
        gradients.append((w[:, None] * sign * margins.sigmoid()).mT @ inputs)
    count = data.w.sum().clamp(min=1)
    return _sound(torch.stack(losses).sum(0) / count, torch.stack(gradients).sum(0) / count)


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
    """Leave-one-out losses l_{-i} of every client m, to first order; nan where m could measure nothing.

    ``losses`` are ``(K,)``, of each client m at the mean, or ``(K, C)`` with each row of its head at the mean;
    ``products`` ``(K, K)`` or ``(K, K, C)``, first i then m: ⟨g_m, θ_i⟩, 0 for models that are not ``valid`` ``(K,)``.
    """
    return torch.where(losses < 0, torch.nan, changed_losses(losses, changes(products, valid)))


def _parts(data: Batch) -> Iterator[Batch]:
    for low in range(0, len(data.y), AT_ONCE):
        yield Batch(*(own[low : low + AT_ONCE] for own in data))


def _sound(losses: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with `NOT_MEASURED` and no gradient where something is not finite: of losses ``()`` or ``(C,)``."""
    sound = torch.isfinite(losses) & torch.isfinite(gradients).all(-1)
    return torch.where(sound, losses, NOT_MEASURED), torch.where(sound[..., None], gradients, 0.0)
