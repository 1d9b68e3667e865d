"""Local training: the control without any collaboration."""

from __future__ import annotations

from dataclasses import dataclass

from fedc2i.core.params import Params
from fedc2i.methods.base import Method, Site
from fedc2i.methods.messages import Download, Uploads
from fedc2i.training.local import Batch


@dataclass(frozen=True)
class Local(Method):
    """Every client trains alone; same start, batches and optimiser restarts as the others."""

    name = "local"
    title = "Local"
    about = "every client trains alone"

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        """Nothing."""
        return {}

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Nothing."""
        return Download(clients=uploads.clients), state
