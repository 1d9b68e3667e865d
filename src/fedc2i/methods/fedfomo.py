"""FedFomo: every client moves towards the models that do better than its own on held-out data.

Zhang, Sapra, Fidler, Yeung, Alvarez, "Personalized Federated Learning with First Order Model Optimization", ICLR 2021.
The server relays all models. Client i, with L_i its loss on its validation data (training data if it has none), takes

    w_ij ∝ max(0, (L_i(θ_i) − L_i(θ_j)) / ‖θ_j − θ_i‖),   Σ_j w_ij = 1
    start = θ_i + Σ_j w_ij (θ_j − θ_i)

and keeps θ_i if no model does better. θ_i is the model that the client's last local run *started* from, as in the
authors' published commands (NVlabs/FedFomo); the trained one is among the candidates θ_j. The authors' server sends a
few models and means of groups beside them; ours sends every client's model and no means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, Stacked, mix, row
from fedc2i.methods.base import Method, Probe, Site
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

_BEFORE = "before."


@dataclass(frozen=True)
class FedFomo(Method):
    """Weights by first-order gain on held-out data; the direct ancestor of FedC²I's influence vector."""

    name = "fedfomo"
    title = "FedFomo"
    about = "moves towards the models that do better on the client's held-out data"
    keeps_uploads = True

    influence_samples: int | Literal["all"] = option(
        "all", "held-out samples that models are compared on, or all", low=1
    )

    @property
    def probe(self) -> Probe:
        """Validation data, or training data where there is none."""
        return Probe(self.influence_samples, "held-out")

    def setup(self, params: Params, model: Model) -> Params:
        """Beside the model, a private copy of the one that the next local run starts from."""
        return {**params, **_as_before(params)}

    def untrained(self, model: Model) -> frozenset[str]:
        """The private copy."""
        return frozenset(_BEFORE + name for name in (*model.body_names, *model.head_names))

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone."""
        return Download(shared=relay(uploads.tensors), clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """The weighted step; a client whose model was never received, or is broken, starts from the mean.

        The report's ``influence_vector`` holds w_ij, and at the client's own place what they leave of 1.
        """
        assert batch is not None
        names = (*site.model.body_names, *site.model.head_names)
        peers, valid = site.peers, site.peers.valid
        if not peers.models:  # no upload was usable yet
            return own, {}
        base = {name: own[_BEFORE + name] for name in names}

        def loss(model: Params) -> Tensor:
            return batch.mean(F.cross_entropy(site.logits(model, batch.x), batch.y, reduction="none"))

        before = loss(base)
        losses = torch.stack([loss({**base, **row(peers.models, j)}) for j in range(len(valid))])
        gains = first_order_gains(before, losses, _distances(base, peers.models, site))
        gains = torch.where(valid, gains, 0.0)
        better = gains.sum() > 0
        weights = torch.where(better, gains / torch.where(better, gains.sum(), 1.0), peers.own.to(gains.dtype))
        lost = ~(peers.own & valid).any() | ~torch.isfinite(before)
        weights = torch.where(lost, peers.equal_weights(weights), weights)
        mixed = mix(weights, peers.models)
        moves = valid.any() & (better | lost)
        start = {name: torch.where(moves, mixed.get(name, base[name]), base[name]) for name in names}
        return {**own, **start, **_as_before(start)}, {"left_out": ~valid, "influence_vector": weights}


def _as_before(params: Params) -> Params:
    """A model under the names of the private copy."""
    return {_BEFORE + name: tensor.clone() for name, tensor in params.items()}


def _distances(base: Params, peers: Stacked, site: Site) -> Tensor:
    """‖θ_j − θ_i‖ ``(K,)`` over trained parameters."""
    names = [name for name in peers if name in site.model.trainable]
    return torch.stack([(peers[name] - base[name]).flatten(1).square().sum(1) for name in names]).sum(0).sqrt()


def first_order_gains(loss: Tensor, losses: Tensor, distances: Tensor) -> Tensor:
    """max(0, (L_i(θ_i) − L_i(θ_j)) / ‖θ_j − θ_i‖) for losses and distances ``(K,)``; 0 for a copy or a nan."""
    gains = (loss - losses) / torch.where(distances > 0, distances, torch.inf)
    return torch.where(torch.isfinite(gains), gains, 0.0).clamp(min=0)
