"""FedALA: every client learns, number by number, how much of the global model to take over.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning",
AAAI 2023. Server and local training are FedAvg's. Between them client m starts from

    θ̂ = θ_m + W ⊙ (θ − θ_m)       in the top p layers; W = 1, i.e. the received θ, in all below

and learns W, first 1, on a random share s of its data by steps W ← clip(W − η ∂CE/∂W, 0, 1). W stays with the client
from round to round. p, s and η are the paper's; what the authors score is θ̂ (``received``).

The authors learn W in the first exchange until its loss settles. A stop that depends on data cannot be lifted over
clients, so the number of epochs is fixed here, to the least that their rule allows. A layer is a module here, the head
being layer 1; the authors' code counts tensors. W is learnt in evaluation mode.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.core.options import option
from fedc2i.core.params import Params
from fedc2i.methods.base import Probe, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.training.local import Batch, gradient_and_value

_WEIGHT = "mixing."


@dataclass(frozen=True)
class FedALA(FedAvg):
    """FedAvg whose clients mix global and own top layers by learnt element-wise weights ``mixing.*``."""

    name = "fedala"
    title = "FedALA"
    about = "element-wise learnt mixing of global and own top layers"

    layers: int = option(1, "layers p that are mixed, counted from the head down", low=1)
    share: float = option(0.8, "share s of the training data that the weights are learnt on", above=0, high=1)
    eta: float = option(1.0, "learning rate η of the weights; 0 is FedAvg", low=0)
    start_epochs: int = option(11, "epochs of learning the weights in the first exchange", low=1)
    weight_epochs: int = option(1, "epochs of learning the weights in every later one", low=1)
    weight_batch: int = option(32, "samples in one step of learning the weights", low=1)

    def setup(self, params: Params, model: Model) -> Params:
        """Adds the weights, all one: what is received is taken over."""
        return {**params, **{_WEIGHT + name: torch.ones_like(params[name]) for name in self._mixed(model)}}

    def untrained(self, model: Model) -> frozenset[str]:
        """The weights: `personalise` learns them."""
        return frozenset(_WEIGHT + name for name in self._mixed(model))

    @property
    def probe(self) -> Probe:
        """All training data, in random order."""
        return Probe("all", gradient=True)

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Learns the weights and mixes by them."""
        assert batch is not None
        start, report = super().personalise(own, batch, site)
        names = self._mixed(site.model)
        gap = {name: start[name] - own[name] for name in names}

        def mixed(weights: Params) -> Params:
            return {**start, **{name: own[name] + weights[name] * gap[name] for name in names}}

        def loss(weights: Params, part: Batch) -> Tensor:
            return self.loss(mixed(weights), part, site)

        chosen = _first(batch, self.share)
        weights = {name: own[_WEIGHT + name] for name in names}
        for _ in range(self.start_epochs if site.round == 1 else self.weight_epochs):
            for low in range(0, len(chosen.y), self.weight_batch):
                part = Batch(*(tensor[low : low + self.weight_batch] for tensor in chosen))
                slope, _ = gradient_and_value(partial(loss, part=part), weights)
                weights = {name: (weights[name] - self.eta * slope[name]).clamp(0, 1) for name in names}
        return {**mixed(weights), **{_WEIGHT + name: weights[name] for name in names}}, report

    def _mixed(self, model: Model) -> list[str]:
        """Names of the trainable tensors in the top layers."""
        trainable = [name for name in (*model.body_names, *model.head_names) if name in model.trainable]
        modules = list(dict.fromkeys(name.rpartition(".")[0] for name in trainable))
        if self.layers > len(modules):
            raise UserError(f"layers must be 1..{len(modules)} for model '{model.name}', got {self.layers}")
        top = set(modules[-self.layers :])
        return [name for name in trainable if name.rpartition(".")[0] in top]


def _first(batch: Batch, share: float) -> Batch:
    """The first ``share`` of the samples, one at least; those after it, as padding does, get no weight."""
    count = (share * batch.w.sum()).round().clamp(min=1)
    longest = math.ceil(share * len(batch.y))
    place = torch.arange(longest, device=batch.w.device)
    w = batch.w[:longest] * (place < count)
    return Batch(batch.x[:longest], batch.y[:longest], w)
