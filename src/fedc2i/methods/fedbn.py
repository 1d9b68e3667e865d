"""FedBN: FedAvg that leaves normalisation layers private.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
Client m keeps its own scale, shift and running statistics of every normalisation layer; all other tensors are averaged.
The authors score clients after the exchange (``received``). They find such layers by ``bn`` in a name; we, by type.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, select
from fedc2i.methods.base import Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.models.networks import NAMES
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedBN(FedAvg):
    """FedAvg of everything but normalisation layers."""

    name = "fedbn"
    title = "FedBN"
    about = "FedAvg with private normalisation layers; needs a model that has some"

    def setup(self, params: Params, model: Model) -> Params:
        """The unchanged model; one without a normalisation layer is refused, as it would make this FedAvg."""
        if not model.norm_names:
            if model.part is not None:
                text = model.trained_text
                told = f"fedbn: with train={text} no normalisation layer of model '{model.name}' trains"
                raise UserError(f"{told}; try train=all or last:N")
            allowed = ", ".join(name for name in NAMES if name.endswith("-bn"))
            told = f"fedbn: model '{model.name}' has no normalisation layers; use one that has, e.g. {allowed}"
            raise UserError(told)
        return params

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model without its normalisation layers."""
        private = set(site.model.norm_names)
        return select(super().upload(params, data, site), lambda name: name not in private)
