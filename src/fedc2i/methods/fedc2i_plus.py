"""FedC²I⁺, and three baselines with the same extras. Ours, not the paper's.

FedC²I⁺ is FedC²I with influence measured on 256 samples instead of 32, and with two extras in local training that
belong to no method: ``anchor=0.1`` and ``average=true``, see `Method`. What such extras bring, they may bring to any
method, so the controls are baselines with the very same extras: ``fedavg-plus`` is ``fedavg:anchor=0.1,average=true``.
In FedProx the anchor and the proximal term have the same target, so their strengths add up: μ = 0.01 + 0.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedc2i.core.options import option
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedprox import FedProx
from fedc2i.methods.fedrep import FedRep


@dataclass(frozen=True, kw_only=True)
class _Extras(Method):
    """What all four have; named first among a preset's bases, so that its defaults are the ones that count."""

    anchor: float = option(0.1, "strength μ of a pull towards the model the local run started from", low=0)
    average: bool = option(True, "keep and send the mean of the models over the second half of the local steps")


@dataclass(frozen=True)
class FedC2IPlus(_Extras, FedC2I):
    """FedC²I on more samples, with the extras."""

    name = "fedc2i-plus"
    title = "FedC²I⁺"
    about = "fedc2i measured on 256 samples, with anchored and averaged local training; not the paper's"

    influence_samples: int | Literal["all"] = option(
        256, "samples that influence is measured on, or all there are", low=1
    )


@dataclass(frozen=True)
class FedAvgPlus(_Extras, FedAvg):
    """FedAvg with the extras."""

    name = "fedavg-plus"
    title = "FedAvg + extras"
    about = "a control for fedc2i-plus: FedAvg with the same anchored and averaged local training"


@dataclass(frozen=True)
class FedProxPlus(_Extras, FedProx):
    """FedProx with the extras; the anchor adds to its μ."""

    name = "fedprox-plus"
    title = "FedProx + extras"
    about = "a control for fedc2i-plus: FedProx with the same anchored and averaged local training"


@dataclass(frozen=True)
class FedRepPlus(_Extras, FedRep):
    """FedRep with the extras, in each of its two phases."""

    name = "fedrep-plus"
    title = "FedRep + extras"
    about = "a control for fedc2i-plus: FedRep with the same anchored and averaged local training"
