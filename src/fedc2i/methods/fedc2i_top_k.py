"""FedC²I with less to download: a client receives only the models it weighted most. Ours, not the paper's.

Every client receives every model only in the first round and in every ``refresh``-th. In between it receives n = k + 1
of K: the ``k`` that it weighted most at the last exchange and one other, drawn at random so that it can come to know
others. It measures influence among those and its own. For that it sends its weights to the server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.options import option
from fedc2i.core.params import Params, Stacked, select
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.messages import Download, Message, Uploads
from fedc2i.training.local import Batch

WEIGHTS = ("influence_vector", "influence_matrix")
LOSSES = ("client_losses", "class_losses", "gamma_class")
UNKNOWN = -1.0  # score of a model that nothing is known of: below every weight


@dataclass(frozen=True)
class Chosen(Message):
    """Whose models a client was sent: ``(n,)`` positions in `Download.clients`."""

    candidates: Tensor


@dataclass(frozen=True)
class FedC2ITopK(FedC2I):
    """FedC²I among a few models and the client's own; with k of at least K − 2 it is FedC²I."""

    name = "fedc2i-top-k"
    title = "FedC²I top-k"
    about = "fedc2i with less to download: the k models a client weighted most, and one at random; not the paper's"
    influence_note = "In the run clients received a few models; here all of them."

    k: int = option(2, "how many models a client receives, those it weighted most, beside one at random", low=1)
    refresh: int = option(5, "everyone receives all models in every refresh-th round, and in the first", low=1)

    @property
    def reads_reports(self) -> tuple[str, ...]:
        """The weights: they decide who receives which models."""
        return WEIGHTS

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        """Relays a few models to each, all to everyone in rounds of full exchange."""
        full, state = super().combine(uploads, state)
        all_others = self.k >= len(uploads.clients) - 2
        if all_others or not uploads.reports or uploads.round % self.refresh == 0:
            return full, state
        index = choose(scores(uploads.reports), uploads.clients, uploads.round, self.k)
        index = index.to(next(iter(uploads.tensors.values())).device)
        models = {name: full.shared[name][index] for name in uploads.tensors}  # (K, n, ...)
        flags = select(full.shared, lambda name: name not in models)
        return Download(flags, {**models, **Chosen(index).flat()}, uploads.clients), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
        """Influence among a few models and the client's own; weights of those not received are 0, their losses nan.

        A client that the server has nothing of yet starts from the mean of what others receive, and reports nothing.
        """
        chosen = Chosen.find(site.received)
        if chosen is None:
            return super().personalise(own, batch, site)
        assert batch is not None
        index, sent, known = chosen.candidates, site.peers, site.position >= 0
        _, takes_part = self.measured_with(own, sent)
        few = replace(
            sent,
            models=beside(own, sent.models, takes_part),
            valid=torch.cat([takes_part[None], sent.valid[index]]),
            position=known.to(torch.int64) - 1,
        )
        start, report = self.exchange(own, few, batch, site)
        positions, count = torch.cat([site.position[None], index]), len(sent.valid)
        for names, missing in ((WEIGHTS, 0.0), (LOSSES, torch.nan)):
            for name in [name for name in names if name in report]:
                report[name] = torch.where(known, spread(report[name], positions, count, missing), torch.nan)
        return start, {**report, "left_out": ~sent.valid}


def scores(reports: Mapping[str, Tensor]) -> Tensor:
    """``(K, K)`` how much client k (row) thought of each model: λ and the mean of Λ over classes, where both exist."""
    found = [values.mean(2) if values.ndim > 2 else values for values in reports.values()]
    return torch.stack(found).sum(0).nan_to_num(nan=UNKNOWN)


def choose(scores: Tensor, clients: Sequence[int], round: int, k: int) -> Tensor:
    """For every client the ``k`` others of the highest score, and one of the rest at random: ``(K, k + 1)`` positions.

    ``scores`` are ``(K, K)``; equal ones are taken in random order. What is drawn is keyed by client and round, so
    every seed draws the same.
    """
    chosen = []
    for place, client in enumerate(clients):
        order = torch.randperm(len(clients), generator=seeding.generator(0, client, round, "candidates"))
        others = order[order != place]
        best = scores[place, others].argsort(descending=True, stable=True)
        top, rest = best[:k], best[k:].amin()  # the first of the rest in random order
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
