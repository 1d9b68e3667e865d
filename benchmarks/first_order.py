"""How far first-order influence is from exact influence in a real run; prints a Markdown table.

    .venv/bin/python -m benchmarks.first_order [--clients 5 20 50 100] [--rounds 5] [--model lenet5] [--skew 1]

The digits data's five clients are split further, with label skew Dirichlet(--skew). In every round every client
measures its influence vector λ in all ways on the same batch, and goes on with the exact one. A line is all clients in
all rounds: the error of another λ in the place of the exact one. That of equal weights is how much there is to tell.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

import fedc2i
from fedc2i.core.params import Params, select
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_ablation import FedC2IClient
from fedc2i.methods.math.first_order import first_order_changes
from fedc2i.methods.math.influence import influence, sharp_cross_entropy

FORMS = {
    "equal": "equal weights",
    "linear": "l + δ",
    "exponential": "l·exp(δ/l)",
    "option": "influence=first-order",
}


@dataclass(frozen=True)
class Measured(FedC2I):
    """FedC²I that also reports what first-order influence would have been, and the milliseconds that each took."""

    name = "fedc2i-measured"
    title = "FedC²I, measured"

    def personalise(self, own: Params, batch: fedc2i.Batch, site: fedc2i.Site) -> tuple[Params, Mapping[str, Tensor]]:
        """The exact start; in place of the usual diagnostics, λ in every form."""
        vector_only = FedC2IClient(gamma=self.gamma)
        began = time.perf_counter()
        _, exact = vector_only.personalise(own, batch, site)
        between = time.perf_counter()
        _, other = replace(vector_only, influence="first-order").personalise(own, batch, site)
        seconds = between - began, time.perf_counter() - between

        def loss(body: Params) -> Tensor:
            return sharp_cross_entropy(site.logits({**own, **body}, batch.x), batch.y, batch.w)

        valid, bodies = ~exact["left_out"], select(site.received, site.model.body_names)
        at_mean, changes = first_order_changes(loss, bodies, valid, select(bodies, site.model.trainable))
        forms = {
            "equal": torch.ones_like(changes),
            "linear": at_mean + changes,
            "exponential": at_mean * (changes / at_mean).exp(),
            "option": other["client_losses"],
        }
        start, _ = super().personalise(own, batch, site)
        report = {name: influence(losses, self.gamma, valid) for name, losses in forms.items()}
        return start, {"exact": exact["influence_vector"], **report, "milliseconds": 1000 * torch.tensor(seconds)}


def measure(clients: int, rounds: int, model: str, skew: float, gamma: float) -> Mapping[str, np.ndarray]:
    """Every form of λ, ``(rounds * clients, clients)``, and the milliseconds, ``(rounds * clients, 2)``."""
    partition = None if clients == 5 else f"dirichlet:{clients // 5}:{skew}"
    data = fedc2i.load("digits", partition=partition)
    result = fedc2i.run(
        Measured(gamma=gamma), data, model=model, rounds=rounds, executor="looped", evaluate_every=rounds
    )
    return {name: np.concatenate([r.influence[name] for r in result.rounds]) for name in result.rounds[0].influence}


def rank_correlation(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Spearman's, row by row; nan where a row has no order."""
    a, b = (rankdata(rows, axis=1) - (rows.shape[1] + 1) / 2 for rows in (left, right))
    with np.errstate(invalid="ignore"):
        return (a * b).sum(1) / np.sqrt((a * a).sum(1) * (b * b).sum(1))


def lines(clients: int, found: Mapping[str, np.ndarray]) -> Sequence[str]:
    """Rows of the table for one number of clients."""
    exact, milliseconds = found["exact"], np.median(found["milliseconds"], axis=0)
    rows = []
    for form, title in FORMS.items():
        wrong = np.abs(found[form] - exact)
        distance = wrong.sum(1) / 2
        order = "" if form == "equal" else f"{np.nanmean(rank_correlation(found[form], exact)):.3f}"
        times = f"{milliseconds[1]:.0f} instead of {milliseconds[0]:.0f}" if form == "option" else ""
        errors = f"{wrong.max():.1e} | {distance.mean():.1e} | {distance.max():.1e}"
        rows.append(f"| {clients} | {title} | {errors} | {order} | {times} |")
    return rows


def main() -> None:
    """Prints the table as it grows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 20, 50], help="multiples of 5, at most 100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=5.0)
    asked = parser.parse_args()
    print("| clients | λ from | max abs error | mean total variation | largest | mean rank correlation | ms a client |")
    print("|---|---|---|---|---|---|---|")
    for clients in asked.clients:
        print(
            "\n".join(lines(clients, measure(clients, asked.rounds, asked.model, asked.skew, asked.gamma))), flush=True
        )


if __name__ == "__main__":
    main()
