"""Median: FedAvg with the coordinate-wise median in place of the mean, a reference for robust aggregation.

Yin, Chen, Ramchandran, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018.
Every number of the global model is the median of the clients' numbers at its place, so less than half of the clients,
whatever they send, cannot push it out of the range of the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedc2i.core.params import Params
from fedc2i.methods.base import Method
from fedc2i.methods.messages import Download, Uploads


@dataclass(frozen=True)
class Median(Method):
    """w ← median_m w_m, number by number; running statistics of BatchNorm too."""

    name = "median"
    title = "Median"
    about = "one global model, the coordinate-wise median of all clients' models"
    headline = "received"

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The median model, to everyone."""
        shared = {name: middle(rows) for name, rows in uploads.tensors.items()}
        return Download(shared=shared, clients=uploads.clients), state


def middle(rows: Tensor) -> Tensor:
    """The median over the first axis of ``(K, ...)``; with an even K the mean of the two in the middle."""
    ordered, count = rows.sort(dim=0).values, len(rows)
    low, high = ordered[(count - 1) // 2], ordered[count // 2]
    return low if count % 2 else (low + high) / 2
