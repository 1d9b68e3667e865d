"""FedAvg: the mean of all models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.methods.base import Method
from fedc2i.methods.messages import Uploads


@dataclass(frozen=True)
class FedAvg(Method):
    """w ← Σ_m p_m w_m with p_m = 1/M, or n_m/N.

    Its ``trained`` point, the global model after one local run, is the control for every personalised method.
    """

    name = "fedavg"
    title = "FedAvg"
    about = "one global model, the mean of all clients' models"
    headline: ClassVar[Literal["received", "trained"]] = "received"
    needs_only_mean = True

    weighting: Literal["uniform", "samples"] = option("uniform", "weights of the mean: equal, or by sample count")

    def weights(self, uploads: Uploads) -> Tensor:
        """``(K,)`` p_m."""
        if self.weighting == "uniform":
            return super().weights(uploads)
        samples = uploads.samples.to(torch.float32)
        return samples / samples.sum()
