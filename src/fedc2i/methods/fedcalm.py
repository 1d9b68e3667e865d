"""FedCALM: the server resolves conflicts between clients' updates, layer by layer.

Zheng, Hu, Yang, Zheng, Xu, Wang, "FedCALM: Conflict-aware Layer-wise Mitigation for Selective Aggregation in Deeper
Personalized Federated Learning", CVPR 2025. **A reconstruction**: we had neither code nor full text. The two stages
that the abstract names are filled in as one third party writes them. Per parameter tensor, with Δ_i = θ_i − θ:

1. Conflict-free update: v_i = Δ_i; for j ≠ i in order, where ⟨v_i, Δ_j⟩ < 0, v_i ← v_i − ⟨v_i, Δ_j⟩/‖Δ_j‖² Δ_j; their
   mean is Δ⊥.
2. Conflict-aware update: d = argmin ½‖d − Δ⊥‖² + C Σ ξ_i subject to ⟨d, Δ_i⟩ ≥ margin_i − ξ_i, ξ_i ≥ 0. Its dual is
   max over 0 ≤ λ ≤ C of bᵀλ − ½λᵀGλ with G_ij = ⟨Δ_i, Δ_j⟩, b_i = margin_i − ⟨Δ⊥, Δ_i⟩, and d = Δ⊥ + Σ λ_i Δ_i.
3. θ ← θ + d, with ‖d‖ capped at max_i ‖Δ_i‖.

Two things differ from the third party on purpose. Its margin ε‖Δ_i‖ depends on the learning rate, as ⟨d, Δ_i⟩ shrinks
with the square of an update's size; ours, ε‖Δ_i‖‖Δ⊥‖, asks for a cosine (``margin=printed`` is theirs). And it takes
five gradient steps where we solve the dual to the end. The cap is ours too: with small updates the printed margin
drives all λ to C and d to M + 1 updates. d is a combination of the Δ_i throughout, so G is all that is computed with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params, mix, select
from fedc2i.methods.base import Download, Method, Phase, Site, Uploads
from fedc2i.methods.fedrep import FedRep
from fedc2i.methods.math.quadratic_program import box_qp
from fedc2i.methods.messages import Parts, marked
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

    base: Literal["fedavg", "fedrep"] = option(
        "fedavg", "what is shared: the whole model, or the body with private heads"
    )
    epsilon: float = option(0.1, "margin ε: how far the update must go along every client's", low=0)
    margin: Literal["cosine", "printed"] = option("cosine", "margin ε‖Δ_i‖‖Δ⊥‖, or ε‖Δ_i‖ as a third party prints it")
    slack: float = option(1.0, "price C of not reaching a client's margin; small tolerates conflict", above=0)

    def __post_init__(self) -> None:
        if self.base == "fedrep":
            object.__setattr__(self, "title", "FedCALM + FedRep")  # tables must tell them apart

    def phases(self, epochs: int) -> Sequence[Phase]:
        """As FedAvg, or as FedRep: the head, then the body."""
        return FedRep().phases(epochs) if self.base == "fedrep" else super().phases(epochs)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, or its body; what is not trained is only averaged."""
        model = super().upload(params, data, site)
        if self.base == "fedrep":
            model = select(model, site.model.body_names)
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
        margins = self.epsilon * norms * (_length(free, gram) if self.margin == "cosine" else 1.0)
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
