"""FedC²I and FedC²I⁺ that also report cheap measures of every other model, without any change to what they train.

With θ_i the model of client i, θ̄ the mean of all, l the client's own loss on held-out samples, and on training samples:

    rise        l(θ̄ without θ_i) − l(θ̄)           what leaving the model out of the mean does
    first order ⟨∇l(θ̄), θ̄ − θ_i⟩/(K − 1)          the same by one gradient at the mean
    pair gain   l(own) − l((own + θ_i)/2)           what meeting it half way does
    step        −⟨∇l(own), θ_i − own⟩               the same to first order: gradient agreement
    similarity  cos(θ_i − θ̄, own − θ̄)              of models alone
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, row
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_plus import FedC2IPlus
from fedc2i.training.local import Batch

PREFIX = "probe_"
MEASURES = ("rise", "first order", "pair gain", "step")


class _Probe(Method):
    """Adds diagnostics to a method that receives the models of others."""

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """As the method itself, with measures of every received model."""
        start, measured = super().personalise(own, batch, site)
        peers = site.peers
        if not peers.models or batch is None:
            return start, measured
        models = peers.models
        mine = {name: own[name] for name in models}
        mean = {name: tensor.mean(0) for name, tensor in models.items()}
        found = {"similarity": _similarity(models, mine, mean)}
        for where, samples in (("training", batch), ("held-out", site.held_out)):
            if samples is not None:
                known = samples.w.sum() > 0
                for name, values in _measures(models, mine, mean, own, samples, site).items():
                    found[f"{name}, {where}"] = torch.where(known, values, torch.nan)
        return start, {**measured, **{PREFIX + name: values for name, values in found.items()}}


@dataclass(frozen=True)
class ProbedC2I(_Probe, FedC2I):
    """FedC²I with further diagnostics; it holds no samples out, so there are none of held-out samples."""

    name = "fedc2i-probed"
    title = "FedC²I, probed"
    about = "fedc2i that reports further measures of influence; for experiments.agreement"


@dataclass(frozen=True)
class ProbedPlus(_Probe, FedC2IPlus):
    """FedC²I⁺ with further diagnostics."""

    name = "fedc2i-plus-probed"
    title = "FedC²I⁺, probed"
    about = "fedc2i-plus that reports further measures of influence; for experiments.agreement"


PROBED: Mapping[str, type[Method]] = {"fedc2i": ProbedC2I, "fedc2i-plus": ProbedPlus}


def _measures(models: Params, mine: Params, mean: Params, own: Params, samples: Batch, site: Site) -> dict[str, Tensor]:
    """Each ``(K,)``."""
    count = len(next(iter(models.values())))

    def loss(params: Params) -> Tensor:
        logits = site.logits({**own, **params}, samples.x)
        return samples.mean(F.cross_entropy(logits, samples.y, reduction="none"))

    floats = [name for name, tensor in mine.items() if tensor.is_floating_point()]
    slope = grad(lambda some: loss({**mine, **some}))({name: mine[name] for name in floats})
    at_middle = grad(lambda some: loss({**mean, **some}))({name: mean[name] for name in floats})
    at_mean, at_own = loss(mean), loss(mine)
    rise, first, pair, step = [], [], [], []
    for i in range(count):
        other = row(models, i)
        without = {name: mean[name] + (mean[name] - other[name]) / (count - 1) for name in mean}
        rise.append(loss(without) - at_mean)
        first.append(_product(at_middle, mean, other) / (count - 1))
        pair.append(at_own - loss({name: (mine[name] + other[name]) / 2 for name in mine}))
        step.append(_product(slope, mine, other))
    return dict(zip(MEASURES, map(torch.stack, (rise, first, pair, step)), strict=True))


def _product(slope: Params, here: Params, there: Params) -> Tensor:
    """−⟨slope, there − here⟩."""
    return torch.stack([(slope[name] * (here[name] - there[name])).sum() for name in slope]).sum()


def _similarity(models: Params, mine: Params, mean: Params) -> Tensor:
    away = torch.cat([(mine[name] - mean[name]).flatten() for name in mine])
    others = torch.cat([(models[name] - mean[name]).flatten(1) for name in mine], dim=1)
    return F.cosine_similarity(others, away[None], dim=1)
