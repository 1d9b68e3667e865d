"""FedRoD: a generic head that is shared and a personal head that adds to it.

Chen, Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022; the version
without hyper-network. With features h, shared head G, private head P_m and n_c local samples of class c,

    g = G(h)                         generic logits, trained with (θ, G) on CE(g + γ log n, y), the balanced softmax
    g + P_m(h)                       personal logits, P_m alone trained on CE(stop(g) + P_m(stop(h)), y)

Both losses are one scalar here. Each reaches parameters that the other does not, so the step of an optimiser that
treats every number by itself (Adam, SGD) is that of two optimisers in turn, with h and g computed once before both.
A class that the client lacks has log n = −∞; log of the smallest float stands in for it (about −87).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedRoD(FedAvg):
    """FedAvg of body and generic head by balanced softmax, with a private residual head."""

    name = "fedrod"
    title = "FedRoD"
    about = "a shared, class-balanced head plus a private head on top"
    headline = "trained"

    gamma_bsm: float = option(1.0, "strength γ of the balanced softmax; 0 is plain cross entropy", low=0)

    def setup(self, params: Params, model: Model) -> Params:
        """Adds the private head, ``personal.weight`` and perhaps ``personal.bias``, first a copy of the generic one."""
        return {**params, **{_personal(name): params[name].clone() for name in model.head_names}}

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """Balanced softmax for the shared model plus CE for the private head, gradients kept apart."""
        features, generic = self._forward(params, batch.x, site)
        tiny = torch.finfo(generic.dtype).tiny
        log_counts = site.counts.to(generic.dtype).clamp(min=tiny).log()
        balanced = F.cross_entropy(generic + self.gamma_bsm * log_counts, batch.y, reduction="none")
        personal = generic.detach() + self._personal_logits(params, features.detach(), site)
        return batch.mean(balanced + F.cross_entropy(personal, batch.y, reduction="none"))

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        """g + P_m(h)."""
        features, generic = self._forward(params, x, site)
        return generic + self._personal_logits(params, features, site)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """The generic head alone; at ``received`` that is the global model."""
        return {"generic": self._forward(params, x, site)[1]}

    def _forward(self, params: Params, x: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        features = site.features(params, x)
        return features, site.model.head(params, features)

    def _personal_logits(self, params: Params, features: Tensor, site: Site) -> Tensor:
        return site.model.head({name: params[_personal(name)] for name in site.model.head_names}, features)


def _personal(name: str) -> str:
    """The private counterpart of a head's tensor: ``fc3.weight`` to ``personal.weight``."""
    return f"personal.{name.rpartition('.')[2]}"
