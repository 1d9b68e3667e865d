"""Ditto: a private model beside the global one, tied to it by a proximal term.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021. Client m trains

    w_m   on CE from the received w, as FedAvg does; only this is sent
    v_m   on CE + (μ/2)·‖v − w‖², w the received one throughout; this predicts

The authors write λ for μ. Both models see the same batches, as in the authors' code, and share no parameter, so one
optimiser over both takes the steps of two.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

_PRIVATE = "private."


@dataclass(frozen=True)
class Ditto(FedAvg):
    """FedAvg, and a private model ``private.*`` that is pulled towards what it yields; twice FedAvg's computation."""

    name = "ditto"
    title = "Ditto"
    about = "a private model pulled towards the global one"
    headline = "trained"

    mu: float = option(1.0, "strength of the pull towards the global model (the paper's λ); 0 is Local", low=0)

    def setup(self, params: Params, model: Model) -> Params:
        """Adds the private model, first a copy of the global one."""
        return {**params, **{_PRIVATE + name: tensor.clone() for name, tensor in params.items()}}

    def untrained(self, model: Model) -> frozenset[str]:
        """The private model's buffers."""
        names = (*model.body_names, *model.head_names)
        return frozenset(_PRIVATE + name for name in names if name not in model.trainable)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE of the global model, CE of the private one, and its proximal term."""
        private = _private(params, site.model)
        logits = site.logits(private, batch.x)
        loss = super().loss(params, batch, site) + batch.mean(F.cross_entropy(logits, batch.y, reduction="none"))
        for name in sorted(site.model.trainable):
            loss = loss + self.mu / 2 * (private[name] - site.start[name]).square().sum()
        return loss

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        """By the private model, which an exchange does not change: both evaluation points agree."""
        return site.logits(_private(params, site.model), x)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """By w: the global model at ``received``, the client's copy after its local run at ``trained``."""
        return {"global": site.logits(params, x)}


def _private(params: Params, model: Model) -> Params:
    """v_m under the model's own names."""
    return {name: params[_PRIVATE + name] for name in (*model.body_names, *model.head_names)}
