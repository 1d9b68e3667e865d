"""How often do the intervals of `fedc2i influence show` hold the truth? ``python -m benchmarks.intervals RUN [N ...]``.

The truth is λ on all training samples of a client, with the last models of a run. From these samples N are drawn, with
replacement, ``SUBSETS`` times; each time the bootstrap sees these N only and gives 95 % intervals. Prints the share of
intervals that hold the truth, over all clients and by client.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor

from fedc2i.analysis.influence_intervals import draw_weights, interval, resample
from fedc2i.core.params import Stacked, floating, row
from fedc2i.engine.client import ClientData
from fedc2i.methods.base import Site
from fedc2i.methods.messages import relay
from fedc2i.runs.finished_run import reopen
from fedc2i.runs.plan import Plan
from fedc2i.runs.stored_models import read_models

SUBSETS = 40
DRAWS = 200
AT_ONCE = 1000  # draws


def held(plan: Plan, models: Stacked, m: int, samples: int, generator: torch.Generator) -> Tensor:
    """``(SUBSETS, M)``: whether the interval of client ``m``'s λ holds the truth."""
    data = ClientData.place(plan.federation.clients[m], len(plan.federation.classes), torch.device("cpu"))
    rounds = int(plan.config.rounds or 1)
    received = relay(floating(models))
    site = Site(plan.model, data.counts, torch.tensor(m), received, round=rounds, rounds=rounds)

    def measure(w: Tensor) -> dict[str, Tensor]:
        report = plan.method.personalise(row(models, m), data.train._replace(w=w), site)[1]
        return {"vector": report["influence_vector"]}

    with torch.no_grad():
        truth = measure(data.train.w)["vector"]
    weights = []
    for _ in range(SUBSETS):
        subset = torch.randint(data.samples, (samples,), generator=generator).expand(DRAWS, -1)
        often = draw_weights(samples, DRAWS, generator)
        weights.append(torch.zeros(DRAWS, data.samples).scatter_add_(1, subset, often))
    drawn = resample(measure, torch.cat(weights), AT_ONCE)["vector"].reshape(SUBSETS, DRAWS, -1)
    ends = [interval(truth, own) for own in drawn]
    return torch.stack([(own.low <= truth) & (truth <= own.high) for own in ends])


def main(folder: Path, sizes: list[int]) -> None:
    """Prints a line for each size."""
    torch.set_num_threads(1)
    plan, generator = reopen(folder), torch.Generator().manual_seed(0)
    names = plan.federation.names
    models = read_models(folder, names, plan.config.seeds[0])
    for samples in sizes:
        found = torch.stack([held(plan, models, m, samples, generator).float() for m in range(len(names))])
        by_client = ", ".join(f"{name} {100 * own:.0f} %" for name, own in zip(names, found.mean((1, 2)), strict=True))
        print(f"{samples} samples: {100 * float(found.mean()):.0f} % hold the truth ({by_client})", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]] or [32, 64, 128, 256])
