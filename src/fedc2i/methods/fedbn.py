"""FedBN: FedAvg that leaves normalisation layers private.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
For every tensor of a normalisation layer (scale, shift, running mean and variance) client m keeps its own; all others
are averaged, w ← Σ_m p_m w_m, with p_m = 1/M as in the authors' code, which scores clients after the exchange
(``received``).

Which layers these are is decided by their type (BatchNorm, InstanceNorm, LayerNorm, GroupNorm). The authors' code and
the libraries go by names that contain ``bn``; PFLlib moves parameters only, so its statistics are private under every
method.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, select
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.models.named import NAMES
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of everything but normalisation layers."""

    name = "fedbn"
    title = "FedBN"
    about = "FedAvg with private normalisation layers; needs a model that has some"

    def setup(self, params: Params, model: Model) -> Params:
        """The unchanged model.

        Raises:
            UserError: if it has no normalisation layer: that would be FedAvg under another name.
        """
        if not model.norm_names:
            allowed = ", ".join(name for name in NAMES if name.endswith("-bn"))
            raise UserError(
                f"fedbn: model '{model.name}' has no normalisation layers; use one that has, e.g. {allowed}"
            )
        return params

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model without its normalisation layers."""
        private = set(site.model.norm_names)
        return select(super().upload(params, data, site), lambda name: name not in private)
