"""Multi-Krum: FedAvg over the models that lie closest together, a reference for robust aggregation.

Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017. Of n models, f of which may be an attacker's, each has the score

    s_i = Σ ‖w_i − w_j‖² over the n − f − 2 models w_j nearest to it,

and the global model is the mean of the ``keep`` models with the lowest scores; ``keep`` = 1 is Krum. Models stand for
the paper's gradients: in a round all clients start from the same one. The paper's guarantee needs n > 2f + 2; where it
does not hold, scores are over one neighbour at least and one model at least is kept. Of two models the mean is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedc2i.core.options import option
from fedc2i.core.params import Stacked
from fedc2i.methods.base import Method
from fedc2i.methods.median import middle
from fedc2i.methods.messages import Uploads


@dataclass(frozen=True)
class MultiKrum(Method):
    """The mean of the models with the nearest neighbours; ties go to the first in table order."""

    name = "multi-krum"
    title = "Multi-Krum"
    about = "one global model, the mean of the clients' models that lie closest together"
    headline = "received"

    attackers: int = option(1, "how many clients f may be attackers", low=0)
    keep: int = option(0, "how many models the mean is over, 1 is Krum; 0: all but f", low=0)

    def weights(self, uploads: Uploads) -> Tensor:
        """``(K,)`` equal weights of the models that are kept, 0 for the others."""
        count = len(uploads.clients)
        if count < 3:
            return super().weights(uploads)
        scores = krum_scores(squared_distances(uploads.tensors), self.attackers)
        kept = min(self.keep or max(1, count - self.attackers), count)
        best = scores.argsort(stable=True)[:kept]
        return torch.zeros(count, device=scores.device).index_fill(0, best, 1 / kept)


def squared_distances(models: Stacked) -> Tensor:
    """``(K, K)`` ‖w_i − w_j‖², in double precision.

    Taken from products of the models minus their coordinate-wise median: near which the honest ones lie, so that a huge
    model among them costs the distances of the others no precision.
    """
    centred = [(rows - middle(rows)).reshape(len(rows), -1).to(torch.float64) for rows in models.values()]
    gram = torch.stack([rows @ rows.mT for rows in centred]).sum(0)
    squares = gram.diagonal()
    return (squares + squares[:, None] - 2 * gram).clamp(min=0)


def krum_scores(distances: Tensor, attackers: int) -> Tensor:
    """``(K,)`` s_i from squared distances ``(K, K)``."""
    count = len(distances)
    others = distances.masked_fill(torch.eye(count, dtype=torch.bool, device=distances.device), torch.inf)
    return others.sort(dim=1).values[:, : max(1, count - attackers - 2)].sum(1)
