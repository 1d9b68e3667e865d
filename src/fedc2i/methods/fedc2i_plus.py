"""FedC²I⁺: FedC²I with shared class prototypes, and a guard that keeps a client from harm. It is ours, not the paper's.

In addition to its model a client sends the mean feature of each of its classes; the server returns their mean P_c, and
local training pulls features towards it as in FedProto:

    loss = CE + ld · ‖h(x) − P_y‖²/d, mean over the batch

After the exchange a client has three models: θ_1, which it has trained; θ_2, from which that training started; and θ_3,
FedC²I's mixture of all models. The next round starts from a mean of the three,

    start = Σ_k β_k θ_k,    β = Σ_a a · p(a),    p(a) = softmax_a(−n·L(a) − κ·a_3)

where a runs over the seven points of `DESIGN`: each model, each mean of two, and the mean of all three. L(a) is the
loss of Σ_k a_k θ_k on n samples that the client did not train on, at the best of a few temperatures: confidence alone
decides nothing. So p is a posterior, under a prior that asks for evidence of κ nats before the others' models replace
one's own. A client to which they are of no use keeps its own; one whose training only overfits keeps its start.

These samples are the client's validation data. A client without such data holds out a part of its training data in the
first half of the rounds; then it trains on all of them, and p stays at the moving mean of those it measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.options import option
from fedc2i.core.params import Params, select, unprefixed
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedproto import ClassFeatures, prototype_loss
from fedc2i.methods.math.influence import Gamma
from fedc2i.methods.math.prototypes import average, prototypes, spread
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch

DESIGN = (  # the points a: shares of the trained model, of its start, and of the mixture
    *((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    *((1 / 2, 1 / 2, 0.0), (1 / 2, 0.0, 1 / 2), (0.0, 1 / 2, 1 / 2)),
    (1 / 3, 1 / 3, 1 / 3),
)
CAUTION = 4.0  # κ
TEMPERATURES = (1.0, 2.0, 4.0, 8.0)
MEMORY = 0.8  # weight of the earlier p in the moving mean
PROTOTYPE_SAMPLES = 256  # that a client's prototypes are means of, at most
POSTERIOR = "guard.posterior"  # private: the moving mean of p, below 0 before the first
_START = "guard.start."  # private: the model that the last local training started from
_UNKNOWN = -1.0
_WORST = 1e9  # in place of a loss that is not a number


@dataclass(frozen=True)
class FedC2IPlus(FedC2I):
    """FedC²I with prototypes and a guard."""

    name = "fedc2i-plus"
    title = "FedC²I⁺"
    about = "fedc2i with class prototypes, and a guard for sites that may not lose to training alone; not the paper's"

    gamma: float | Gamma = option(  # noqa: RUF009  (a field, of a type that ruff does not know to be immutable)
        Gamma("scaled(5)"), "sensitivity γ; 0 is FedAvg; a number or an adaptive one", low=0
    )
    influence: Literal["exact", "first-order"] = option(
        "first-order", "client-level losses: one forward pass for each model, or one gradient for all"
    )
    influence_samples: int | Literal["all"] = option(
        64, "samples that influence is measured on, or all there are", low=1
    )
    ld: float = option(1.0, "weight of the distance to the shared prototypes; 0: none are sent", low=0)
    guard: bool = option(True, "start from a mean of own, earlier and mixed model, by their loss on held-out samples")
    held_out: float = option(
        0.1, "share of its training data that a client without validation data holds out", above=0, below=1
    )

    @property
    def holds_out(self) -> float:
        """The share of samples that the guard needs."""
        return self.held_out if self.guard else 0.0

    def setup(self, params: Params, model: Model) -> Params:
        """With the guard's private parts."""
        return {**params, POSTERIOR: torch.full((len(DESIGN),), _UNKNOWN), **_copy(params)} if self.guard else params

    def untrained(self, model: Model) -> frozenset[str]:
        """Only `personalise` changes the guard's parts."""
        names = (*model.body_names, *model.head_names)
        return super().untrained(model) | {POSTERIOR, *(_START + name for name in names)}

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        """CE plus the distance of every feature to its class's prototype."""
        return prototype_loss(params, batch, site, self.ld)

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The model, and class prototypes with the classes they are of."""
        model = super().upload(params, data, site)
        if not self.ld:
            return model
        some = spread(data, site.counts.sum(), PROTOTYPE_SAMPLES)
        means, counts = prototypes(lambda x: site.features(params, x), some, site.model.classes)
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
        """The mean of the trained model, its start and FedC²I's mixture, by what they lose on held-out samples."""
        mixture, measured = super().personalise(own, batch, site)
        if not self.guard or not measured:
            return mixture, measured
        names = (*site.model.body_names, *site.model.head_names)
        models = [select(own, names), unprefixed(_START, own), select(mixture, names)]
        posterior, kept = self.posterior(models, own[POSTERIOR], site)
        shares = posterior @ _design(posterior)  # β
        start = _mean(shares, models)
        return {**mixture, **start, **_copy(start), POSTERIOR: kept}, {**measured, "guard": shares}

    def posterior(self, models: Sequence[Params], before: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        """p of this round ``(7,)``, and the moving mean of those measured so far, which was ``before``."""
        samples = site.held_out
        assert samples is not None
        points = _design(samples.w)
        losses = torch.stack([_loss(_mean(shares, models), samples, site) for shares in points])  # n·L(a)
        found = torch.softmax(-losses - CAUTION * points[:, 2], 0)
        known, measured = before[0] >= 0, samples.w.sum() > 0
        mean = torch.where(known, MEMORY * before + (1 - MEMORY) * found, found)
        return torch.where(known & ~measured, before, found), torch.where(measured, mean, before)


def _loss(params: Params, samples: Batch, site: Site) -> Tensor:
    """Cross entropy at the best of the `TEMPERATURES`, summed over the samples."""
    logits = site.logits(params, samples.x)
    sums = [(F.cross_entropy(logits / t, samples.y, reduction="none") * samples.w).sum() for t in TEMPERATURES]
    return torch.stack(sums).nan_to_num(nan=_WORST).amin(0)


def _design(like: Tensor) -> Tensor:
    """`DESIGN` as a tensor ``(7, 3)``, made on the device: a CUDA graph cannot hold a copy from the host."""
    rows = [torch.stack([torch.full((), share, dtype=like.dtype, device=like.device) for share in a]) for a in DESIGN]
    return torch.stack(rows)


def _mean(shares: Tensor, models: Sequence[Params]) -> Params:
    """Σ_k shares_k θ_k; counters, which have no mean, from the first."""

    def mean(tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([share.to(own.dtype) * own for share, own in zip(shares, tensors, strict=True)]).sum(0)

    return {
        name: mean([model[name] for model in models]) if own.is_floating_point() else own
        for name, own in models[0].items()
    }


def _copy(params: Params) -> Params:
    """A model under the names of the private copy."""
    return {_START + name: tensor.clone() for name, tensor in params.items()}
