"""FedC²I⁺: FedC²I with shared class prototypes, and a guard that keeps a client from harm. It is ours, not the paper's.

Influence is measured on 256 samples. In addition to its model a client sends the mean feature of each of its classes;
the server returns their mean P_c, and local training pulls features towards it as in FedProto:

    loss = CE + ld · ‖h(x) − P_y‖²/d, mean over the batch

The next round starts between the client's own model and FedC²I's mixture of all models,

    start = α·mixture + (1 − α)·own,    α = Σ_a a·softmax_a(−n·L(a)),    a ∈ {0, ¼, ½, ¾, 1}

where L(a) is the loss of a·mixture + (1 − a)·own on n samples that the client did not train on: the posterior mean of a
under equal prior weights. So a client to which the others are of no use keeps its own model.

These samples are the client's validation data. A client without such data holds out a tenth of its training data in the
first half of the rounds; then it trains on all of them and keeps its α, a moving mean of those it measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, select
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedproto import ClassFeatures, prototype_loss
from fedc2i.methods.math.prototypes import average, prototypes
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # the values of a
MEMORY = 0.8  # weight of the earlier α in the moving mean
ALPHA = "guard.alpha"  # private: the moving mean of α, below 0 before the first
_UNKNOWN = -1.0
_WORST = 1e9  # in place of a loss that is not a number


@dataclass(frozen=True)
class FedC2IPlus(FedC2I):
    """FedC²I with prototypes and a guard."""

    name = "fedc2i-plus"
    title = "FedC²I⁺"
    about = "fedc2i with shared class prototypes and a guard against harm; not the paper's"

    influence_samples: int | Literal["all"] = option(
        256, "samples that influence is measured on, or all there are", low=1
    )
    ld: float = option(1.0, "weight of the distance to the shared prototypes; 0: none are sent", low=0)
    guard: bool = option(
        True, "start between the mixture and the client's own model, by their loss on held-out samples"
    )
    held_out: float = option(
        0.1, "share of its training data that a client without validation data holds out", above=0, below=1
    )

    @property
    def holds_out(self) -> float:
        """The share of samples that the guard needs."""
        return self.held_out if self.guard else 0.0

    def setup(self, params: Params, model: Model) -> Params:
        """With the private α."""
        return {**params, ALPHA: torch.tensor(_UNKNOWN)} if self.guard else params

    def untrained(self, model: Model) -> frozenset[str]:
        """Only `personalise` changes α."""
        return super().untrained(model) | {ALPHA}

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the distance of every feature to its class's prototype."""
        return prototype_loss(params, batch, site, self.ld)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and class prototypes with the classes they are of."""
        model = super().upload(params, data, site)
        if not self.ld:
            return model
        means, counts = prototypes(lambda x: site.features(params, x), data, site.model.classes)
        return {**model, **ClassFeatures(means, counts > 0).flat()}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays every model to everyone, with the mean prototype of every class."""
        models = select(uploads.tensors, lambda name: name not in ClassFeatures.names())
        shared = relay(models)
        if self.ld:
            sent = ClassFeatures.read(uploads.tensors)
            assert sent.class_present is not None
            shared |= average(sent.prototypes, sent.class_present.to(torch.float32)).flat()
        return Download(shared=shared, clients=uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """FedC²I's mixture, as far as it helps on held-out samples."""
        start, measured = super().personalise(own, batch, site)
        if not self.guard or not measured:
            return start, measured
        alpha, kept = self.shares(own, start, site)
        blend = {name: torch.lerp(own[name], start[name], alpha.to(own[name].dtype)) for name in _floats(start)}
        return {**start, **blend, ALPHA: kept}, {**measured, "guard": alpha}

    def shares(self, own: Params, mixture: Params, site: Site) -> tuple[Tensor, Tensor]:
        """α of this round, and the moving mean of those measured so far."""
        samples, before = site.held_out, own[ALPHA]
        assert samples is not None
        count = samples.w.sum()
        losses = torch.stack([self._loss(own, mixture, share, samples, site) for share in SHARES])  # L(a)
        shares = torch.linspace(0, 1, len(SHARES), dtype=losses.dtype, device=losses.device)  # no copy: CUDA graphs
        found = (shares * torch.softmax(-count * losses.nan_to_num(nan=_WORST), 0)).sum()
        mean = torch.where(before < 0, found, MEMORY * before + (1 - MEMORY) * found)
        frozen = torch.where(before < 0, 1.0, before)  # nothing was ever measured: FedC²I
        return torch.where(count > 0, found, frozen), torch.where(count > 0, mean, before)

    @staticmethod
    def _loss(own: Params, mixture: Params, share: float, samples: Batch, site: Site) -> Tensor:
        params = {**own, **{name: torch.lerp(own[name], mixture[name], share) for name in _floats(mixture)}}
        return samples.mean(F.cross_entropy(site.logits(params, samples.x), samples.y, reduction="none"))


def _floats(params: Params) -> list[str]:
    """What can lie between two models: not counters, and not α."""
    return [name for name, tensor in params.items() if name != ALPHA and tensor.is_floating_point()]
