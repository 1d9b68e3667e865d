"""FedC²I: every client mixes the others' models by their measured influence on it.

Tan, Long, Jiang, Zhang, "Influence-Oriented Personalized Federated Learning". The server relays all models. Client m
draws one batch, measures its loss without one model at a time,

    l_{-i}       with the mean of all bodies but θ_i
    l_{-i,-c}    with row c of its own head replaced by the mean of all rows φ_{j,c} but φ_{i,c}

and starts its next round from

    θ̄_m = Σ_i λ_i θ_i                λ_i     = l_{-i}^γ    / Σ_j l_{-j}^γ       the influence vector (client level)
    φ̄_{m,c} = Σ_i Λ_{i,c} φ_{i,c}    Λ_{i,c} = l_{-i,-c}^γ / Σ_j l_{-j,-c}^γ    the influence matrix (class level)

The printed equation for φ̄ has φ_{m,c} on its right-hand side, which would change nothing; φ_{i,c} is meant. What is
measured with is the model that the client sent, in evaluation mode; its own model is among the i.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params, finite, mix, select
from fedc2i.methods.base import Method, Probe, Site
from fedc2i.methods.math.influence import Gamma, Influence, class_losses, client_losses, sharp_cross_entropy, weigh
from fedc2i.methods.messages import Download, Peers, Uploads, relay
from fedc2i.models.model import scale
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedC2I(Method):
    """Bodies mixed by the influence vector λ, rows of the head by the influence matrix Λ."""

    name = "fedc2i"
    title = "FedC²I"
    about = "bodies mixed by client-level, classifier rows by class-level influence"
    keeps_uploads = True

    gamma: float | Gamma = option(5.0, "sensitivity γ; 0 is FedAvg; a number or an adaptive one", low=0)  # noqa: RUF009
    gamma_class: float | Gamma | None = option(None, "γ of the influence matrix; none: the same", low=0)  # noqa: RUF009
    influence: Literal["exact", "first-order"] = option(
        "exact", "client-level losses: one forward pass for each model, or one gradient for all (for many clients)"
    )
    influence_samples: int | Literal["all"] = option(32, "samples that influence is measured on", low=1)
    influence_split: Literal["train", "validation"] = option("train", "where these samples come from")

    @property
    def probe(self) -> Probe:
        """One batch a round, shared by both levels."""
        return Probe(self.influence_samples, self.influence_split, gradient=self.influence == "first-order")

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone."""
        return Download(shared=relay(uploads.tensors), clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Measures influence on one batch and mixes the received models by it."""
        assert batch is not None
        return self.exchange(own, site.peers, batch, site)

    def exchange(self, own: Params, peers: Peers, batch: Batch, site: Site) -> tuple[Params, dict[str, Tensor]]:
        """The client's next model from its peers', and what it measured."""
        if not peers.models:  # no upload was usable yet
            return own, {}
        batch = batch._replace(x=scale(batch.x, own[site.model.head_names[0]].dtype))  # once, not for every pass
        sent, can_measure = self.measured_with(own, peers)
        vector, matrix = (level(sent, peers, batch, site) for level in (self.vector, self.matrix))  # λ (K,), Λ (K, C)
        if not peers.bodies and vector.losses is not None and matrix.losses is not None:
            vector = vector._replace(weights=matrix.weights.mean(1))  # λ has nothing to mix: reports show Λ's mean
        vector, matrix = (level.settled(can_measure, peers.valid) for level in (vector, matrix))
        mixed = self.mixed(own, peers, vector.weights, matrix.weights)
        start = {name: torch.where(peers.valid.any(), tensor, own[name]) for name, tensor in mixed.items()}
        return start, {
            "left_out": ~peers.valid,
            **vector.report("gamma", "client_losses", "influence_vector"),
            **matrix.report("gamma_class", "class_losses", "influence_matrix"),
        }

    def measured_with(self, own: Params, peers: Peers) -> tuple[Params, Tensor]:
        """The model that a client measures with, and whether it can: if it was sent, and all its numbers are finite."""
        return own, (peers.position >= 0) & finite({name: tensor[None] for name, tensor in own.items()})[0]

    def vector(self, own: Params, peers: Peers, batch: Batch, site: Site) -> Influence:
        """λ: how much every body is worth to this client."""

        def loss(body: Params) -> Tensor:
            return sharp_cross_entropy(site.logits({**own, **body}, batch.x), batch.y, batch.w)

        if self.influence == "exact":
            losses = client_losses(loss, peers.bodies, peers.valid)  # l_{-i}
        else:
            from fedc2i.methods.math.first_order import first_order_losses

            losses = first_order_losses(loss, peers.bodies, peers.valid, select(peers.bodies, site.model.trainable))
        return self.weigh(losses, self.gamma, peers, site)  # λ_i ∝ l_{-i}^γ

    def matrix(self, own: Params, peers: Peers, batch: Batch, site: Site) -> Influence:
        """Λ: how much every row of every head is worth to this client."""
        features = site.features(own, batch.x)
        logits, (weight, bias) = site.model.head(own, features), site.model.split_head(peers.heads)
        losses = class_losses(logits, features, weight, bias, batch.y, batch.w, peers.valid)  # l_{-i,-c}
        gamma = self.gamma if self.gamma_class is None else self.gamma_class
        return self.weigh(losses, gamma, peers, site)  # Λ_{i,c} ∝ l_{-i,-c}^γ

    def weigh(self, losses: Tensor, gamma: float | Gamma, peers: Peers, site: Site) -> Influence:
        """Losses ``(K,)`` or ``(K, C)`` to influence; all of it is the client's own where no loss is finite."""
        weights, used = weigh(losses, gamma, peers.valid, site.progress)
        return Influence(weights, losses, used).or_else(peers.own_weights(losses))

    def mixed(self, own: Params, peers: Peers, vector: Tensor, matrix: Tensor) -> Params:
        """θ̄ = Σ_i λ_i θ_i and φ̄_c = Σ_i Λ_{i,c} φ_{i,c}."""
        return {**own, **mix(vector, peers.bodies), **mix(matrix, peers.heads)}
