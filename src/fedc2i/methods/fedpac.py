"""FedPAC: features aligned to global prototypes, classifiers combined by a quadratic programme for each client.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023; their
code is JianXu95/FedPAC. With p_i,c the share of class c at client i, μ_i,c its mean feature under the *received* body,
h_i,c = p_i,c μ_i,c and n_i samples, client m gets the head φ̄_m = Σ_i α_i φ_i with weights for the whole head

    α = argmin over the simplex of  Σ_i α_i² V_i + Σ_c ‖h_m,c − Σ_i α_i h_i,c‖²
    V_i = (Σ_c p_i,c E‖h‖² − Σ_c p_i,c² ‖μ_i,c‖²) / n_i                        (variance, then bias, of the mixture)

the mean of all bodies, and global prototypes P_c, the count-weighted means of class features under the trained bodies.
Its local loss is CE + λ·MSE(h(x), P_y); a head epoch comes first, then body epochs.

As in the authors' code, a client that sat a round out keeps its head. Unlike it, the programme is solved exactly,
prototypes are taken in evaluation mode, the head has the learning rate of the body, and the head epoch is one of the E.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, mix, select
from fedc2i.methods.base import Phase, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.math.prototypes import Prototypes, average, prototypes
from fedc2i.methods.math.quadratic_program import combination_weights
from fedc2i.methods.messages import Download, Message, Parts, Uploads, marked
from fedc2i.training.local import Batch

WEIGHTS = ("influence_vector", "influence_matrix")  # what the server sends along for reports


@dataclass(frozen=True)
class Statistics(Message):
    """What a client sends beside its model.

    Attributes:
        prototypes: ``(C, d)`` mean features under the trained body.
        class_counts: ``(C,)`` samples.
        variance: V, ``()`` or, in FedIC, ``(C,)``.
        reference: ``(C, d)`` h_i,c, under the received body.
    """

    prototypes: Tensor
    class_counts: Tensor
    variance: Tensor
    reference: Tensor | None = None


@dataclass(frozen=True)
class FedPAC(FedAvg):
    """Prototype alignment and head combination; the body is FedAvg's."""

    name = "fedpac"
    title = "FedPAC"
    about = "features aligned to global prototypes, heads combined by a quadratic programme"
    headline = "trained"

    lam: float = option(1.0, "strength λ of the alignment to prototypes", low=0)
    head_epochs: int = option(1, "local epochs that train the head alone; the rest train the body", low=1)

    def phases(self, epochs: int) -> Sequence[Phase]:
        """Head epochs, then body epochs; both together where there is only one epoch."""
        head = min(self.head_epochs, epochs - 1)
        return (Phase(head, "head"), Phase(epochs - head, "body")) if head else (Phase(epochs),)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE, and from round 2 on the distance to the prototype of the sample's class, where there is one."""
        features = site.features(params, batch.x)
        loss = F.cross_entropy(site.model.head(params, features), batch.y, reduction="none")
        shared = Prototypes.find(site.received)
        if shared is not None:
            loss = loss + self.lam * shared.distances(features, batch.y)
        return batch.mean(loss)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, prototypes under it, class counts, and the two statistics of the programme."""
        means, _, _ = class_statistics(params, data, site)
        before, squares, counts = class_statistics(site.start, data, site)
        share = counts / counts.sum()
        variance = (share * squares - share.square() * before.square().sum(1)).sum() / counts.sum()
        sent = Statistics(means, site.counts, variance, share[:, None] * before)
        return {**marked(super().upload(params, data, site), site.model.head_names), **sent.flat()}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The mean body and global prototypes for all, a combined head for each."""
        sent, parts = Statistics.read(uploads.tensors), Parts.read(uploads.tensors, Statistics)
        assert sent.reference is not None
        means = average(sent.prototypes, sent.class_counts.to(torch.float32))
        weights = combination_weights(sent.variance, sent.reference.flatten(1)).to(torch.float32)
        heads = {name: torch.tensordot(weights.to(rows), rows, 1) for name, rows in parts.head.items()}
        shared = {**mix(self.weights(uploads), parts.rest), **means.flat()}
        return Download(shared, {**heads, "influence_vector": weights}, uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """The mean body with the combined head; its own head for a client that took no part in the round."""
        start, _ = super().personalise(own, batch, site)
        took_part = site.position >= 0
        head = {name: torch.where(took_part, start[name], own[name]) for name in site.model.head_names}
        weights = select(site.received, WEIGHTS)
        return {**start, **head}, {name: torch.where(took_part, w, torch.nan) for name, w in weights.items()}


def class_statistics(params: Params, data: Batch, site: Site) -> tuple[Tensor, Tensor, Tensor]:
    """Of every class the mean feature ``(C, d)``, the mean of its squared norm ``(C,)`` and the count ``(C,)``."""

    def with_square(x: Tensor) -> Tensor:
        features = site.features(params, x)
        return torch.cat([features, features.square().sum(1, keepdim=True)], 1)

    means, counts = prototypes(with_square, data, len(site.counts))
    return means[:, :-1], means[:, -1], counts
