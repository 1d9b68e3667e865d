"""FedC²I with the mixing on the server: no client ever receives another's model. Ours, not the paper's.

In FedC²I every client receives all models. Here the server mixes for each, and a client receives its own mixed model
and two means, of all bodies and of all heads. It cannot measure leave-one-out losses then, for any such mean would show
it the model that is left out. It uploads a *statement* beside its model instead (see `math.first_order`):

    l, g        the loss of (θ̄, φ_m) and its gradient with respect to θ̄
    l_c, g_c    for each class the loss of (θ_m, φ_m with the mean row φ̄_c) and its gradient with respect to that row

over all its training data. From these the server computes first-order losses l + ⟨g, θ̄ − θ_i⟩/(M−1) and
l_c + ⟨g_c, φ̄_c − φ_{i,c}⟩/(M−1), and from them λ_m and Λ_m as FedC²I does.

θ̄ and φ̄ in the statement are those that the client received last, one round old, so that no second exchange is needed;
in the first round they are the model it started from. θ_i, and θ̄ in the differences, are the present ones.

What this hides, and what not. From clients that follow the protocol, a peer's model stays hidden as long as there are
more unknown models than equations. A client knows the mean, its mix and, if they are sent for reports
(``tell_weights``), the weights of its mix. With two clients the mean alone gives the other model away; with three, the
mean and the mix with its weights do. A mix with nearly all weight on one peer nearly is its model, and a client that
lies in its statement can bring that about. The *server* learns more than in FedC²I: a gradient over the whole training
data at a point it knows and, class by class, the mean feature of the client's errors, from which samples or class
counts of a small client might be reconstructed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedc2i.core.options import convert, option
from fedc2i.core.params import VALID, Params, mix, relay, select
from fedc2i.methods.base import Download, Method, Site, Uploads
from fedc2i.methods.fedc2i import WEIGHTS, check_gammas, weigh
from fedc2i.methods.math.first_order import body_products, body_statement, head_rows, row_statement, stated_losses
from fedc2i.methods.math.gamma import Gamma
from fedc2i.methods.math.influence import equal_share
from fedc2i.methods.math.tags import BUFFER, HEAD, tag, tagged
from fedc2i.training.local import Batch

STATEMENT = "statement/"
MEAN = "mean/"


class _Clock(NamedTuple):
    """What an adaptive γ reads."""

    round: int
    rounds: int


@dataclass(frozen=True)
class FedC2IServer(Method):
    """Influence by first-order statements; bodies and rows of the head mixed on the server."""

    name = "fedc2i-server"
    title = "FedC²I (server mixes)"
    about = "fedc2i mixed on the server, from losses and gradients that clients state; no peer's model is sent"
    keeps_uploads = True

    gamma: float | Gamma = option(  # noqa: RUF009  (a field, of a type that ruff does not know to be immutable)
        5.0, "sensitivity γ to influence, at least 0; 0 is FedAvg; a number or an adaptive one"
    )
    gamma_class: float | Gamma | None = option(None, "γ of the influence matrix; none: the same")  # noqa: RUF009
    tell_weights: bool = option(True, "send a client its λ and Λ along, for reports")

    def __post_init__(self) -> None:
        check_gammas(self)
        object.__setattr__(self, "tell_weights", convert(self.tell_weights, bool, "tell_weights"))

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and the statement about the means it received last, or about its start if there are none yet."""
        model, mean = site.model, tagged(site.received, MEAN) or site.start
        own = super().upload(params, data, site)
        trained = sorted(select(own, model.body_names).keys() & set(model.trainable))
        at_mean = {**params, **select(mean, model.body_names)}
        loss, gradient = body_statement(site.logits, at_mean, trained, data)
        losses, gradients = row_statement(
            lambda x: site.features(params, x),
            lambda h: model.head(params, h),
            lambda h: model.head(mean, h),
            len(model.head_names) > 1,
            data,
        )
        statement = {"loss": loss, "gradient": gradient, "class_losses": losses, "class_gradients": gradients}
        if isinstance(self.gamma, Gamma) or isinstance(self.gamma_class, Gamma):  # the server knows no end
            statement["rounds"] = torch.full_like(site.position, site.rounds)
        buffers = own.keys() - set(trained) - set(model.head_names)
        return {
            **tag(tag(own, model.head_names, HEAD), buffers, BUFFER),
            **{STATEMENT + name: tensor for name, tensor in statement.items()},
        }

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The two means for all; for each its mixed model and, for reports, its weights."""
        said, heads, buffers = (tagged(uploads.tensors, prefix) for prefix in (STATEMENT, HEAD, BUFFER))
        trained = sorted(name for name in uploads.tensors if not name.startswith((STATEMENT, HEAD, BUFFER)))
        models = relay({**select(uploads.tensors, trained), **buffers, **heads})
        valid = models.pop(VALID)
        heads = select(models, heads)
        bodies = {name: rows for name, rows in models.items() if name not in heads}

        rounds = int(said["rounds"].max()) if "rounds" in said else 1
        clock, share = _Clock(uploads.round, rounds), equal_share(valid, said["loss"])
        keep = torch.where(valid, torch.diag(torch.ones_like(share)), share[:, None])  # (i, m): its own, if it is sound
        products = body_products(said["gradient"], bodies, trained)
        vector = self._weights(stated_losses(said["loss"], products, valid), self.gamma, valid, clock, keep)
        products = torch.einsum("icn,mcn->imc", head_rows(heads), said["class_gradients"])
        gamma = self.gamma if self.gamma_class is None else self.gamma_class
        matrix = self._weights(stated_losses(said["class_losses"], products, valid), gamma, valid, clock, keep)

        personal = {name: torch.tensordot(vector.mT.to(rows), rows, 1) for name, rows in bodies.items()}
        personal |= {name: torch.einsum("imc,ic...->mc...", matrix.to(rows), rows) for name, rows in heads.items()}
        if self.tell_weights:
            personal |= dict(zip(WEIGHTS, (vector.mT.contiguous(), matrix.transpose(0, 1).contiguous()), strict=True))
        means = {MEAN + name: mean for name, mean in mix(share, models).items()}
        return Download(means, personal, uploads.clients), state

    def _weights(self, losses: Tensor, gamma: float | Gamma, valid: Tensor, clock: _Clock, keep: Tensor) -> Tensor:
        """Losses ``(K, K)`` or ``(K, K, C)``, first i then m, to weights that sum to one over i."""
        weights, _ = weigh(losses.flatten(1), gamma, valid, clock)  # to γ, a client is a column as a class is
        weights = weights.reshape(losses.shape)
        instead = keep.reshape(*keep.shape, *[1] * (losses.ndim - 2))
        return torch.where(weights.sum(0) > 0, weights, instead)

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """What the server mixed for it; the mean of all mixed models for a client the server has nothing of yet."""
        start, _ = super().personalise(own, batch, site)
        known = site.position >= 0
        told = {name: torch.where(known, site.received[name], torch.nan) for name in WEIGHTS if name in site.received}
        return start, told
