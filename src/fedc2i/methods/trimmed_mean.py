"""Trimmed mean: FedAvg without the largest and smallest numbers at every place, a reference for robust aggregation.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
With β at least the share of attackers, none of what they send at one end counts, and what is left lies within the range
of the honest clients' numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Params, mix_tensor, uniform
from fedc2i.methods.base import Method
from fedc2i.methods.messages import Download, Uploads

_DIGITS = 9  # 0.1 · 30 is a little more than 3 in binary


@dataclass(frozen=True)
class TrimmedMean(Method):
    """At every place the mean of what is left when the β K largest and the β K smallest of K numbers are cut.

    β K is rounded up, so that one of four clients is cut at β = 0.2, and never so large that nothing is left: of two
    clients or fewer none is cut.
    """

    name = "trimmed-mean"
    title = "Trimmed mean"
    about = "one global model, the mean of all clients' models without the extremes of every coordinate"
    headline = "received"

    trim: float = option(0.2, "share β of the clients cut at each end of every coordinate", low=0, below=0.5)

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The trimmed mean, to everyone."""
        shared = {name: self._mean(rows) for name, rows in uploads.tensors.items()}
        return Download(shared=shared, clients=uploads.clients), state

    def _mean(self, rows: Tensor) -> Tensor:
        count = len(rows)
        cut = min(math.ceil(round(self.trim * count, _DIGITS)), (count - 1) // 2)
        kept = rows.sort(dim=0).values[cut : count - cut] if cut else rows
        return mix_tensor(uniform(len(kept), kept), kept)
