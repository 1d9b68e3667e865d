"""Your own method, compared with FedAvg and FedC²I: `python examples/own_method.py --rounds 10`.

Every client receives its own mean of all models, in which models near its own weigh more. A subclass of `Method`
says what differs from FedAvg and runs on every engine: client by client, on worker processes, stacked on a GPU, and
across real sites. On the command line: `fedc2i run examples/own_method.py:Near --set power=2`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import fedc2i


@dataclass(frozen=True)
class Near(fedc2i.Method):
    """Weights fall with the distance d between models, as (1 + d / mean distance)^-power; 0 is FedAvg."""

    name = "near"
    title = "Near"
    about = "a personal mean for each client, in which nearer models weigh more"
    keeps_uploads = True  # also uploads of clients that skipped a round

    power: float = fedc2i.option(2.0, "how fast weights fall with distance; 0 is FedAvg", low=0)

    def combine(self, uploads: fedc2i.Uploads, state: dict[str, Tensor]) -> tuple[fedc2i.Download, dict[str, Tensor]]:
        """On the server: turns K uploads ``(K, ...)`` into one row for each client."""
        flat = torch.cat([rows.flatten(1) for rows in uploads.tensors.values()], dim=1)
        distances = torch.cdist(flat, flat)  # (K, K)
        nearness = (1 + distances / distances.mean().clamp(min=1e-12)) ** -self.power
        weights = nearness / nearness.sum(dim=1, keepdim=True)
        mixed = {name: torch.tensordot(weights, rows, dims=1) for name, rows in uploads.tensors.items()}
        return fedc2i.Download(personal={**mixed, "influence_vector": weights}, clients=uploads.clients), state

    def personalise(
        self, own: dict[str, Tensor], batch: fedc2i.Batch | None, site: fedc2i.Site
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """On the client: starts the next round from its mean, and reports its weights, so that figures show them."""
        start, _ = super().personalise(own, batch, site)
        return start, {"influence_vector": site.received["influence_vector"]}


def main() -> None:
    """Compares the three on equal terms."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    found = fedc2i.compare(["fedavg", Near(), "fedc2i"], data="digits:scans,photos,ink", rounds=rounds)
    print(fedc2i.comparison_table(found))
    print("Near: weight of each client (column) for each client (row), after the last round")
    print(found[1].influence()[-1].round(2))


if __name__ == "__main__":
    main()
