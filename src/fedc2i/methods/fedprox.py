"""FedProx: FedAvg whose clients are held near the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedProx(FedAvg):
    """Local loss CE + (μ/2)·‖w − w_received‖², the *squared* norm over trainable parameters."""

    name = "fedprox"
    title = "FedProx"
    about = "FedAvg with a proximal term in the local loss"

    mu: float = option(0.01, "strength of the pull towards the received model", low=0)

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the proximal term."""
        loss = super().loss(params, batch, site)
        for name in sorted(site.model.trainable):
            loss = loss + self.mu / 2 * (params[name] - site.start[name]).square().sum()
        return loss
