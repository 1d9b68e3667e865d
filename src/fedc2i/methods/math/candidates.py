"""Which models a client is sent when it is not sent all of them, and how it reads a few as if they were all.

The server sends each client the models it weighted most at the last exchange, and one at random so that it can come to
know others. K clients have models; n of them are sent to each, never its own, which it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.params import Params, Stacked

CANDIDATES = "candidates"  # (n,): whose models were sent, as positions in `Download.clients`
UNKNOWN = -1.0  # score of a model that nothing is known of: below every weight


def scores(reports: Mapping[str, Tensor]) -> Tensor:
    """``(K, K)`` how much client k (row) thought of each model: λ and the mean of Λ over classes, where both exist."""
    found = [values.mean(2) if values.ndim > 2 else values for values in reports.values()]
    return torch.stack(found).sum(0).nan_to_num(nan=UNKNOWN)


def choose(scores: Tensor, clients: Sequence[int], round: int, top_k: int) -> Tensor:
    """For every client its ``top_k`` others of the highest score, and one of the rest at random.

    Args:
        scores: ``(K, K)``, on the CPU; equal ones are taken in random order.
        clients: K numbers. With the round they are the key of what is drawn, so every seed draws the same.
        round: the present round.
        top_k: at least 1, at most K − 2.

    Returns:
        ``(K, top_k + 1)`` positions, in ascending order.
    """
    chosen = []
    for k, client in enumerate(clients):
        order = torch.randperm(len(clients), generator=seeding.generator(0, client, round, CANDIDATES))
        others = order[order != k]
        best = scores[k, others].argsort(descending=True, stable=True)
        top, rest = best[:top_k], best[top_k:].amin()  # the first of the rest in random order
        chosen.append(others[torch.cat([top, rest[None]])].sort().values)
    return torch.stack(chosen)


def beside(own: Params, received: Stacked, takes_part: Tensor) -> Stacked:
    """The client's own model in front of those it received: ``(1 + n, ...)``; zero if it does not take part."""
    return {
        name: torch.cat([torch.where(takes_part, own[name], torch.zeros_like(own[name]))[None], rows])
        for name, rows in received.items()
    }


def spread(values: Tensor, positions: Tensor, count: int, missing: float) -> Tensor:
    """Values ``(n, ...)`` at these positions of ``(count, ...)``, and ``missing`` where none was sent."""
    at = positions[:, None] == torch.arange(count, device=positions.device)  # (n, count)
    full = values[at.to(torch.uint8).argmax(0)]
    there = at.any(0).reshape(-1, *[1] * (values.ndim - 1))
    return torch.where(there, full, missing)
