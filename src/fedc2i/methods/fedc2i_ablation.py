"""FedC²I with parts of it taken away: the three variants of the paper's ablation study.

The paper does not say what happens to the head where only λ is measured; here λ mixes the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedc2i.core.params import Params, mix
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.influence import Influence
from fedc2i.methods.messages import Peers
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedC2IClient(FedC2I):
    """Only client-level influence: λ mixes body and head."""

    name = "fedc2i-client"
    title = "FedC²I-λ"
    about = "the paper's ablation of fedc2i: the whole model mixed by client-level influence"

    def matrix(self, own: Params, peers: Peers, batch: Batch, site: Site) -> Influence:
        """Not measured."""
        return Influence(peers.equal_weights(batch.w))

    def mixed(self, own: Params, peers: Peers, vector: Tensor, matrix: Tensor) -> Params:
        """Σ_i λ_i (θ_i, φ_i)."""
        return {**own, **mix(vector, peers.models)}


@dataclass(frozen=True)
class FedC2IClassGlobal(FedC2I):
    """Only class-level influence: Λ mixes rows of the head, bodies are averaged as in FedAvg."""

    name = "fedc2i-class-global"
    title = "FedC²I-Λ/g"
    about = "the paper's ablation of fedc2i: heads mixed by class-level influence, bodies averaged"

    def vector(self, own: Params, peers: Peers, batch: Batch, site: Site) -> Influence:
        """Not measured."""
        return Influence(peers.equal_weights(batch.w))


@dataclass(frozen=True)
class FedC2IClassLocal(FedC2IClassGlobal):
    """Only class-level influence: Λ mixes rows of the head, bodies stay private."""

    name = "fedc2i-class-local"
    title = "FedC²I-Λ/l"
    about = "the paper's ablation of fedc2i: heads mixed by class-level influence, bodies private"

    def exchange(self, own: Params, peers: Peers, batch: Batch, site: Site) -> tuple[Params, dict[str, Tensor]]:
        """With its own body; a client that cannot measure starts from the mean."""
        start, report = super().exchange(own, peers, batch, site)
        _, can_measure = self.measured_with(own, peers)
        body = {name: torch.where(can_measure, own[name], start[name]) for name in peers.bodies}
        return {**start, **body}, report
