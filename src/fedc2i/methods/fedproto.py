"""FedProto: clients exchange class prototypes instead of models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022. With h the features before the last layer,

    p_{m,c} = mean of h(x) over client m's samples of class c          up
    P_c     = mean of p_{m,c} over the clients that have class c        down
    loss    = CE + ld · ‖h(x) − P_y‖²/d, mean over the batch

A sample whose class has no P_c, and every sample in round 1, adds nothing to the second term. Prototypes come from one
pass in evaluation mode after training. The mean over clients is unweighted as in the authors' code;
``weighting=counts`` is the paper's formula. The paper predicts by the nearest P_c; the classifier is the headline here,
as for every other method, and the other prediction is scored beside it. An absent client's latest prototypes stay in
the mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params
from fedc2i.methods.base import Method, Site
from fedc2i.methods.math.prototypes import Prototypes, average, prototypes
from fedc2i.methods.messages import Download, Message, Uploads
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class ClassFeatures(Message):
    """What a client sends: prototypes ``(C, d)``, and ``(C,)`` which classes it has, or how many samples of each."""

    prototypes: Tensor
    class_present: Tensor | None = None
    class_counts: Tensor | None = None


@dataclass(frozen=True)
class FedProto(Method):
    """Private models held together by shared class prototypes."""

    name = "fedproto"
    title = "FedProto"
    about = "class prototypes are shared, models stay private"
    keeps_uploads = True

    ld: float = option(1.0, "weight of the distance to the shared prototypes", low=0)
    weighting: Literal["uniform", "counts"] = option(
        "uniform", "weights of the mean: equal, or by samples of the class (which sends class counts)"
    )

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the distance of every feature to its class's prototype."""
        return prototype_loss(params, batch, site, self.ld)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """Prototypes with the classes they are of, or how many samples of each."""
        means, counts = prototypes(lambda x: site.features(params, x), data, site.model.classes)
        by_counts = self.weighting == "counts"
        return ClassFeatures(means, None if by_counts else counts > 0, counts if by_counts else None).flat()

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The mean prototype of every class."""
        sent = ClassFeatures.read(uploads.tensors)
        members = sent.class_present if sent.class_counts is None else sent.class_counts
        assert members is not None
        means = average(sent.prototypes, members.to(torch.float32))
        return Download(means.flat(), clients=uploads.clients), state

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """By the nearest shared prototype; by the classifier before any has come."""
        shared, features = Prototypes.find(site.received), site.features(params, x)
        return {"prototype": site.model.head(params, features) if shared is None else nearness(features, shared)}


def prototype_loss(params: Params, batch: Batch, site: Site, ld: float) -> Tensor:
    """CE plus ``ld`` times the distance to the shared prototypes; CE alone before any has come."""
    shared, features = Prototypes.find(site.received), site.features(params, batch.x)
    losses = F.cross_entropy(site.model.head(params, features), batch.y, reduction="none")
    return batch.mean(losses if shared is None else losses + ld * shared.distances(features, batch.y))


def nearness(features: Tensor, shared: Prototypes) -> Tensor:
    """Scores ``(B, C)`` of features ``(B, d)``, minus the mean squared distance: the largest is the nearest prototype.

    A class that has no prototype scores below all that have, and stays finite.
    """
    scores = -(features[:, None] - shared.prototypes).square().mean(2)
    lowest = torch.where(shared.known, scores, torch.inf).amin(1, keepdim=True)
    return torch.where(shared.known, scores, lowest - 1)
