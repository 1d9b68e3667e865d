"""FedIC: prototypes and classifier rows are shared inside clusters of clients, found for every class.

Zheng, Song, Hu, Zheng, Yang, Xu, Zhao, Pu, Fang, Wang, "Intra-Class Unbiased Prototype Aggregation and Classifier
Collaboration for Personalized Federated Learning", AAAI 2026. **A reconstruction**: we had neither code nor full
text. The abstract says that prototypes are clustered inside each class, aggregated inside clusters only, and that
classifiers of one cluster are combined by their predictive gain; for the last we take FedPAC's quadratic programme.

For class c, over the clients that have it, S is the cluster of client m (first partition of FINCH, by cosine):

    P_m,c = Σ_{i∈S} n_i,c p_i,c / Σ_{i∈S} n_i,c                                the prototype client m is drawn to
    φ̄_m,c = Σ_{i∈S} α_i φ_i,c                                                  its row (and bias entry) of the head
    α = argmin over the simplex of  Σ_i α_i² V_i,c + ‖p_m,c − Σ_i α_i p_i,c‖²,  V_i,c = (E‖h‖² − ‖p_i,c‖²) / n_i,c

and bodies are averaged. Local loss CE + λ·MSE(h(x), P_m,y). A cluster of one keeps its row, as does a client for a
class it has no samples of. Statistics are taken from the model just trained, in evaluation mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, mix
from fedc2i.methods.base import Method, Phase, Site
from fedc2i.methods.fedpac import FedPAC, Statistics, class_statistics
from fedc2i.methods.math.prototypes import Prototypes
from fedc2i.methods.math.quadratic_program import combination_weights
from fedc2i.methods.messages import Download, Parts, Uploads, marked
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedIC(FedPAC):
    """FedPAC inside the clusters of each class."""

    name = "fedic"
    title = "FedIC"
    about = "prototypes and classifier rows combined inside clusters of clients, class by class"
    reconstruction = (
        "FedIC is a reconstruction from its abstract: FINCH clusters of class prototypes, and FedPAC's quadratic "
        "programme inside them."
    )

    alternate: bool = option(False, "train the head first, then the body, as FedPAC does, instead of both together")

    def phases(self, epochs: int) -> Sequence[Phase]:
        """All together, or as FedPAC."""
        return super().phases(epochs) if self.alternate else (Phase(epochs),)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, its prototypes, class counts, and one scalar a class."""
        means, squares, counts = class_statistics(params, data, site)
        sent = Statistics(means, site.counts, (squares - means.square().sum(1)).clamp(min=0) / counts.clamp(min=1))
        return {**marked(Method.upload(self, params, data, site), site.model.head_names), **sent.flat()}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The mean body for all; prototypes and rows of the head from its clusters for each."""
        sent, parts = Statistics.read(uploads.tensors), Parts.read(uploads.tensors, Statistics)
        columns = [sent.prototypes, sent.variance[..., None], sent.class_counts[..., None]]
        table = torch.cat([column.to(torch.float64) for column in columns], -1).transpose(0, 1).cpu()  # one transfer
        points, variances, counts = table[..., :-2], table[..., -2], table[..., -1]  # (C, K, d), (C, K), (C, K)
        same = first_neighbours(cosine_similarity(points), counts > 0)  # (C, K, K)
        members = torch.where((counts > 0)[..., None], same, True) * counts[:, None]  # without it: all who have it
        share = members / members.sum(-1, keepdim=True).clamp(min=1)
        alpha = combination_weights(variances, points, same)
        both = torch.stack([share, alpha]).permute(0, 2, 3, 1).contiguous()
        share, weights = both.to(sent.prototypes)  # (K, K, C) each, in one transfer
        heads = {name: torch.einsum("mkc,kc...->mc...", weights, rows) for name, rows in parts.head.items()}
        known = (sent.class_counts.sum(0) > 0).repeat(len(uploads.clients), 1)  # (K, C)
        means = Prototypes(torch.einsum("mkc,kcd->mcd", share, sent.prototypes), known)
        personal = {**heads, **means.flat(), "influence_matrix": weights}
        return Download(mix(self.weights(uploads), parts.rest), personal, uploads.clients), state


def cosine_similarity(points: Tensor) -> Tensor:
    """``(..., K, d)`` points to ``(..., K, K)`` cosines, float64; a point at the origin has cosine 0 with all."""
    units = F.normalize(points.to(torch.float64), dim=-1, eps=torch.finfo(torch.float64).tiny)
    return units @ units.mT


def first_neighbours(similarity: Tensor, present: Tensor) -> Tensor:
    """The first partition of FINCH: everyone is linked to its nearest neighbour; clusters are what hangs together.

    Sarfraz, Sharma, Stiefelhagen, "Efficient Parameter-free Clustering Using First Neighbor Relations", CVPR 2019.
    Ties go to the lower index, so the result is deterministic; two present clients are always one cluster.

    Similarities are ``(..., K, K)``, ``present`` ``(..., K)`` says who takes part. The result ``(..., K, K)`` says who
    is in one cluster with whom; clients that are not present are in none.
    """
    alone = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
    pairs = present[..., None] & present[..., None, :] & ~alone
    nearest = similarity.masked_fill(~pairs, -torch.inf).argmax(-1)
    links = F.one_hot(nearest, similarity.shape[-1]).to(torch.bool) & pairs
    same = links | links.mT | torch.diag_embed(present)
    for _ in range(max(1, links.shape[-1] - 1).bit_length()):  # connected components: squares of the adjacency matrix
        reach = same.to(torch.float32)
        same = (reach @ reach) > 0
    return same
