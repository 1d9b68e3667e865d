"""Class prototypes, the mean feature of every class: N samples with features ``(N, d)``, weights ``w`` ``(N,)``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from fedc2i.methods.messages import Message
from fedc2i.training.local import Batch

AT_ONCE = 128  # images in one forward pass: bounds memory, whatever a client's size


@dataclass(frozen=True)
class Prototypes(Message):
    """What clients receive: prototypes ``(C, d)``, and ``(C,)`` booleans, which classes have one."""

    prototypes: Tensor
    known: Tensor

    def distances(self, features: Tensor, y: Tensor) -> Tensor:
        """``(B,)`` ‖h − P_y‖²/d of features ``(B, d)``; 0 for a sample whose class has no prototype."""
        away = (features - self.prototypes[y]).square().mean(1)
        return torch.where(self.known[y], away, 0)


def class_means(features: Tensor, y: Tensor, w: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """p_c = mean of the features of class c, ``(C, d)``, and how many samples it has, ``(C,)``; zero if none."""
    member = F.one_hot(y, classes).to(features.dtype) * w[:, None]  # (N, C)
    counts = member.sum(0)
    return member.T @ features / counts.clamp(min=1)[:, None], counts


def spread(data: Batch, count: Tensor, most: int) -> Batch:
    """At most ``most`` of the first ``count`` samples, at equal distances; all that is behind them is padding."""
    place = torch.arange(min(most, len(data.y)), device=data.y.device)
    return data.take(torch.where(count > most, place * count // most, place))


def prototypes(features: Callable[[Tensor], Tensor], data: Batch, classes: int) -> tuple[Tensor, Tensor]:
    """`class_means` over all of ``data``, a few images at a time; ``features`` maps images to h(x) ``(B, d)``."""
    parts = [
        class_means(features(data.x[low:high]), data.y[low:high], data.w[low:high], classes)
        for low, high in ((low, low + AT_ONCE) for low in range(0, len(data.y), AT_ONCE))
    ]
    counts = torch.stack([own for _, own in parts])  # (chunks, C)
    means = torch.stack([own for own, _ in parts])  # (chunks, C, d)
    total = counts.sum(0)
    return (means * counts[..., None]).sum(0) / total.clamp(min=1)[:, None], total


def average(means: Tensor, weights: Tensor) -> Prototypes:
    """P_c = Σ_k weights_{k,c} p_{k,c} / Σ_k weights_{k,c}: the prototypes ``(K, C, d)`` of K clients in one.

    Weights ``(K, C)`` are 0 where a client lacks the class; the prototype of a class that nobody has is zero.
    """
    total = weights.sum(0)
    known = total > 0
    share = weights / torch.where(known, total, 1)
    return Prototypes(torch.einsum("kc,kcd->cd", share.to(means.dtype), means), known)


def bounded(means: Tensor, present: Tensor) -> Tensor:
    """Prototypes ``(K, C, d)``, none longer than the median of its class over the clients that have it.

    So the mean is no longer than that, and a few dishonest clients cannot make features grow from round to round.
    ``present`` ``(K, C)`` says who has which class; of an even number of lengths the median is the lower middle one.
    """
    lengths = means.norm(dim=2)  # (K, C)
    usual = torch.where(present, lengths, torch.nan).nanquantile(0.5, 0, interpolation="lower")  # (C,)
    return means * torch.where(lengths > usual, usual / lengths, 1)[..., None]
