"""FedRep: one body for all, a head for each.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021. The server averages bodies, θ ← Σ_m p_m θ_m; heads φ_m never leave. A local run alternates:

    φ_m ← argmin_φ CE(θ, φ)        head epochs, body frozen and in evaluation mode
    θ_m ← step on CE(θ, φ_m)       body epochs, head frozen

The epochs of a local run are shared out, so that FedRep trains as long as every other method; the authors' scripts use
ten and five, and further head epochs after the last round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fedc2i.core.options import option
from fedc2i.core.params import Params, select
from fedc2i.methods.base import Phase, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class FedRep(FedAvg):
    """FedAvg of the bodies; what the authors score is the mean body under the client's own head (``received``)."""

    name = "fedrep"
    title = "FedRep"
    about = "a shared body and private heads, trained in turn"

    body_epochs: int = option(
        1, "how many of the local epochs train the body, the last ones; the head has one at least", low=1
    )

    def phases(self, epochs: int) -> Sequence[Phase]:
        """Head, then body; a single epoch cannot be shared out and trains both at once."""
        if epochs == 1:
            return (Phase(1),)
        body = min(self.body_epochs, epochs - 1)
        return Phase(epochs - body, "head"), Phase(body, "body")

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """The body."""
        return select(super().upload(params, data, site), site.model.body_names)
