"""FedProto: clients exchange class prototypes instead of models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: Federated Prototype Learning across Heterogeneous Clients",
AAAI 2022. With h the features before the last layer,

    p_{m,c} = mean of h(x) over client m's samples of class c          up
    P_c     = mean of p_{m,c} over the clients that have class c        down
    loss    = CE + ld · ‖h(x) − P_y‖²/d, mean over the batch

A sample whose class has no P_c, and every sample in round 1, adds nothing to the second term. Prototypes come from one
pass in evaluation mode after training; the authors' code and the libraries average features while the weights still
move. The mean over clients is unweighted as in the authors' code; ``weighting=counts`` is the paper's formula.
The paper predicts by the nearest P_c, PFLlib too, FL-bench by the classifier; the classifier is the headline here,
as for every other method, and the other prediction is scored beside it. An absent client's latest prototypes stay in
the mean (the libraries drop them): a class that only absent clients have keeps its prototype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.errors import UserError
from fedc2i.core.options import check_at_least, check_choice, option
from fedc2i.core.params import Params, mix, select
from fedc2i.methods.base import Download, Method, Site, Uploads
from fedc2i.methods.math.prototypes import average, nearness, prototypes
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedProto(Method):
    """Private models held together by shared class prototypes."""

    name = "fedproto"
    title = "FedProto"
    about = "class prototypes are shared, models stay private"
    keeps_uploads = True

    ld: float = option(1.0, "weight of the distance to the shared prototypes, at least 0")
    weighting: Literal["uniform", "counts"] = option(
        "uniform", "weights of the mean: equal, or by samples of the class (which sends class counts)"
    )
    inference: Literal["classifier", "prototype"] = option(
        "classifier", "predict by the classifier or by the nearest shared prototype; the other is scored too"
    )
    share_model: bool = option(False, "average the models as well: FedAvg with the prototype loss, not the paper's")

    def __post_init__(self) -> None:
        check_at_least(self, 0, "ld")
        check_choice(self, "weighting", "inference")
        if not isinstance(self.share_model, bool):
            raise UserError(f"share_model must be true or false, got '{self.share_model}'")
        if self.share_model:
            object.__setattr__(self, "title", "FedProto + FedAvg")  # tables must not take it for the paper's method

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the distance of every feature to its class's prototype."""
        if "prototypes" not in site.received:
            return super().loss(params, batch, site)
        features = site.features(params, batch.x)
        away = (features - site.received["prototypes"][batch.y]).square().mean(1)
        away = torch.where(site.received["known"][batch.y], away, 0)
        logits = site.model.head(params, features)
        return batch.mean(F.cross_entropy(logits, batch.y, reduction="none") + self.ld * away)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """Prototypes with the classes they are of, or how many samples of each; the model only if it is shared."""
        means, counts = prototypes(lambda x: site.features(params, x), data, site.model.classes)
        sent = {"prototypes": means}
        sent |= {"class_counts": counts} if self.weighting == "counts" else {"class_present": counts > 0}
        return {**super().upload(params, data, site), **sent} if self.share_model else sent

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """The mean prototype of every class; of shared models, the mean of this round's."""
        tensors = uploads.tensors
        members = tensors["class_counts" if self.weighting == "counts" else "class_present"]
        means, known = average(tensors["prototypes"], members.to(torch.float32))
        models = select(tensors, lambda name: name not in ("prototypes", "class_counts", "class_present"))
        shared = {**mix(self.weights(uploads), models), "prototypes": means, "known": known}
        return Download(shared=shared, clients=uploads.clients), state

    def weights(self, uploads: Uploads) -> Tensor:
        """``(K,)`` weights of the models' mean: of those sent this round, or of all cached ones if none was."""
        samples = uploads.samples.to(torch.float32)
        weights = samples if self.weighting == "counts" else torch.ones_like(samples)
        fresh = (uploads.ages == 0).to(samples.device)
        weights = torch.where(fresh, weights, 0) if bool(fresh.any()) else weights
        return weights / weights.sum()

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        """By the classifier or the nearest prototype."""
        return self._predict(self.inference, params, x, site)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        """The one of the two that is not the main one."""
        other: Literal["classifier", "prototype"] = "prototype" if self.inference == "classifier" else "classifier"
        return {other: self._predict(other, params, x, site)}

    def _predict(self, way: Literal["classifier", "prototype"], params: Params, x: Tensor, site: Site) -> Tensor:
        """Logits ``(B, C)``; before any prototype has come, the classifier's either way."""
        features = site.features(params, x)
        if way == "classifier" or "prototypes" not in site.received:
            return site.model.head(params, features)
        return nearness(features, site.received["prototypes"], site.received["known"])
