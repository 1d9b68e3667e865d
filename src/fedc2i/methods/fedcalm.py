"""FedCALM: the server resolves conflicts between clients' updates, layer by layer.

Zheng, Hu, Yang, Zheng, Xu, Wang, "FedCALM: Conflict-aware Layer-wise Mitigation for Selective Aggregation in Deeper
Personalized Federated Learning", CVPR 2025. **A reconstruction**: we had neither code nor full text. The two stages
that the abstract names are filled in as one third party writes them. Per parameter tensor, with Δ_i = θ_i − θ:

1. Conflict-free update: v_i = Δ_i; for j ≠ i in order, where ⟨v_i, Δ_j⟩ < 0, v_i ← v_i − ⟨v_i, Δ_j⟩/‖Δ_j‖² Δ_j; their
   mean is Δ⊥.
2. Conflict-aware update: d = argmin ½‖d − Δ⊥‖² + C Σ ξ_i subject to ⟨d, Δ_i⟩ ≥ ε‖Δ_i‖‖Δ⊥‖ − ξ_i, ξ_i ≥ 0. Its dual
   is max over 0 ≤ λ ≤ C of bᵀλ − ½λᵀGλ with G_ij = ⟨Δ_i, Δ_j⟩, b_i = ε‖Δ_i‖‖Δ⊥‖ − ⟨Δ⊥, Δ_i⟩, and d = Δ⊥ + Σ λ_i Δ_i.
3. θ ← θ + d, with ‖d‖ capped at max_i ‖Δ_i‖.

Three things differ from the third party on purpose: its margin ε‖Δ_i‖ depends on the learning rate, ours asks for a
cosine; it takes five gradient steps where we solve the dual to the end; the cap is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params, mix
from fedc2i.methods.base import Method, Site
from fedc2i.methods.math.quadratic_program import box_qp
from fedc2i.methods.messages import Download, Parts, Uploads, marked
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedCALM(Method):
    """Conflict-free, then conflict-aware updates of one global model."""

    name = "fedcalm"
    title = "FedCALM"
    about = "one global model whose update resolves conflicts between clients, layer by layer"
    reconstruction = (
        "FedCALM is a reconstruction from its abstract and one third party's formulas: projected updates, then a "
        "soft-margin quadratic programme, per layer."
    )

    epsilon: float = option(0.1, "margin ε: how far the update must go along every client's, as a cosine", low=0)
    slack: float = option(1.0, "price C of not reaching a client's margin; small tolerates conflict", above=0)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model; what is not trained is only averaged."""
        model = super().upload(params, data, site)
        return marked(model, buffers=model.keys() - set(site.model.trainable))

    def opening(self, params: Params) -> Params:
        """The global model θ."""
        return params

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """θ + d, tensor by tensor."""
        parts = Parts.read(uploads.tensors)
        shared = mix(self.weights(uploads), parts.buffers)
        updates = {name: (rows - state[name].to(rows)).flatten(1) for name, rows in parts.rest.items()}
        grams = [(rows := update.to(torch.float64)) @ rows.mT for update in updates.values()]
        found = self.coefficients(torch.stack(grams).cpu()).to(grams[0].device)  # too small to be solved on a GPU
        for (name, update), coefficients in zip(updates.items(), found, strict=True):
            origin = state[name].to(update)
            step = coefficients @ update.to(torch.float64)
            shared[name] = origin + step.to(update.dtype).reshape(origin.shape)
        return Download(shared=shared, clients=uploads.clients), {**state, **shared}

    def coefficients(self, gram: Tensor) -> Tensor:
        """The updates d as combinations of the Δ_i: ``(..., K)`` from G ``(..., K, K)``, both float64."""
        norms = gram.diagonal(dim1=-2, dim2=-1).sqrt()
        free = conflict_free(gram)
        margins = self.epsilon * norms * _length(free, gram)
        total = free + box_qp(gram, margins - _product(gram, free), self.slack)
        longest = norms.amax(-1, keepdim=True)
        cap = longest / torch.maximum(_length(total, gram), longest)
        return total * torch.where(longest > 0, cap, 0.0)  # 0 where nothing moved


def conflict_free(gram: Tensor) -> Tensor:
    """Δ⊥ as a combination of the Δ_i: ``(..., K)`` from G ``(..., K, K)``; conflicts go in the order of clients."""
    parts = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device).expand(gram.shape).clone()  # row i: v_i
    for j in range(gram.shape[-1]):
        square = gram[..., j, j, None]
        inner = _product(parts, gram[..., j])
        inner[..., j] = 0
        conflict = (inner < 0) & (square > 0)
        parts[..., j] -= torch.where(conflict, inner / square, 0.0)
    return parts.mean(-2)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """``(..., K, K)`` times ``(..., K)``."""
    return (matrix @ vector[..., None])[..., 0]


def _length(combination: Tensor, gram: Tensor) -> Tensor:
    """‖Σ_i c_i Δ_i‖, ``(..., 1)``."""
    return (combination * _product(gram, combination)).sum(-1, keepdim=True).clamp(min=0).sqrt()
