"""pFedGraph: the server infers who should work with whom, and mixes a model for every client.

Ye, Ni, Wu, Chen, Wang, "Personalized Federated Learning with Inferred Collaboration Graphs", ICML 2023; their code is
MediaBrain-SJTU/pFedGraph. With w_0 the common initial model and p the share of samples (equal in our protocol), client
i starts from w̄_i = Σ_j a_j w_j, its row of the collaboration graph being

    a = argmin over the simplex of  α ‖a − p‖² − Σ_j a_j cos(w_i − w_0, w_j − w_0),

where, as in the code, a cosine above 0.9 counts as 1. This is a projection of p + cos/(2α) onto the simplex, so it is
solved in closed form. From round 2 on the local loss is CE + λ (1 − cos(w, w̄_i)).

The paper's objective (its equation 1) draws the client to its aggregate; the code *adds* λ cos, which pushes it away.
We follow the paper. The code's graph spans a round's participants; ours the latest models of all clients, so that one
that sat out receives an up-to-date aggregate too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params, select
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.math.quadratic_program import project_simplex
from fedc2i.methods.messages import Download, Parts, Uploads, marked
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class PFedGraph(FedAvg):
    """A personal mean for each client by the similarity of updates; ``weighting`` sets p."""

    name = "pfedgraph"
    title = "pFedGraph"
    about = "a personal mean for each client, weighted by the similarity of updates"
    headline = "trained"
    keeps_uploads = True

    alpha: float = option(0.8, "how close weights stay to the shares p; large is FedAvg", above=0)
    lam: float = option(0.01, "strength λ of the pull to the personal mean", low=0)
    snap: float = option(0.9, "cosines above this count as 1; 1 leaves all as they are", low=-1)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE, and from round 2 on the cosine distance to the model the run started from."""
        loss = super().loss(params, batch, site)
        if not site.received or not self.lam:
            return loss
        names = sorted(site.model.trainable)
        now, then = (torch.cat([model[name].flatten() for name in names]) for model in (params, site.start))
        return loss + cosine_distance(now, then) * self.lam

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model; what is not trained has no part in the cosines."""
        model = super().upload(params, data, site)
        return marked(model, buffers=model.keys() - set(site.model.trainable))

    def opening(self, params: Params) -> Params:
        """w_0."""
        return params

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Every client's mean and, for reports, its row of the graph."""
        parts = Parts.read(uploads.tensors)
        updates = {name: rows - state[name].to(rows) for name, rows in parts.rest.items()}
        graph = collaboration(cosines(updates), self.weights(uploads), self.alpha, self.snap).to(torch.float32)
        models = {**parts.rest, **parts.buffers}
        personal = {name: torch.tensordot(graph.to(rows), rows, 1) for name, rows in models.items()}
        return Download(personal={**personal, "influence_vector": graph}, clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Its mean; the mean of all means for a client the server has not met yet."""
        start, _ = super().personalise(own, batch, site)
        return start, select(site.received, ["influence_vector"])


def cosine_distance(now: Tensor, then: Tensor) -> Tensor:
    """1 − cos of two vectors, with a precise gradient where they are near each other.

    With δ their difference, ‖w‖‖s‖ − ⟨w, s⟩ = ½(‖δ‖² − (‖w‖ − ‖s‖)²). The usual form has a gradient of rounding errors
    at the start of a run, where it should be zero, and Adam turns those into steps wherever CE has no gradient.
    """
    change = now - then
    one: Tensor = torch.linalg.vector_norm(now)
    two: Tensor = torch.linalg.vector_norm(then)
    longer = change @ (now + then) / (one + two).clamp(min=1e-12)  # ‖w‖ − ‖s‖
    return (change @ change - longer.square()) / (2 * one * two).clamp(min=1e-12)


def cosines(updates: Params) -> Tensor:
    """Cosines ``(K, K)`` between K stacked updates, all tensors taken as one vector; 0 with an update of zero."""
    gram = torch.stack([(rows := tensor.flatten(1).to(torch.float64)) @ rows.mT for tensor in updates.values()]).sum(0)
    norms = gram.diagonal().sqrt().clamp(min=torch.finfo(gram.dtype).tiny ** 0.5)
    return (gram / norms / norms[:, None]).clamp(-1, 1)


def collaboration(similarity: Tensor, shares: Tensor, alpha: float, snap: float) -> Tensor:
    """The graph ``(K, K)``, row i the weights of client i, from cosines ``(K, K)`` and shares ``(K,)``; float64."""
    itself = torch.eye(len(similarity), dtype=torch.bool, device=similarity.device)
    similarity = torch.where((similarity > snap) | itself, 1.0, similarity)
    return project_simplex(shares.to(torch.float64) + similarity / (2 * alpha))
