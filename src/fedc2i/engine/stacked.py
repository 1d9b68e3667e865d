"""All clients at once: the method's functions lifted over a stack of parameters with ``torch.func.vmap``.

What does not depend on the client (a relayed stack of models, their sum, their leave-one-out means) is computed once,
because vmap leaves it without a client axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812

from fedc2i import seeding
from fedc2i.engine.client import ClientData, Recipe
from fedc2i.engine.rounds import Metrics
from fedc2i.evaluate import AT_ONCE, predict_all
from fedc2i.methods.base import Download, Site
from fedc2i.params import Params
from fedc2i.params import Stacked as StackedParams
from fedc2i.training import Batch, pad, train_stacked

_Context = dict[str, Any]  # the tensors a Site is made of, with or without a client axis


class Stacked:
    """`Executor` that serves all clients together."""

    def __init__(self, recipe: Recipe, data: Sequence[ClientData]) -> None:
        self._recipe = recipe
        self._data = data
        self._device = data[0].counts.device
        self._splits = {split: pad([getattr(own, split) for own in data]) for split in ("train", "validation", "test")}
        self._counts = torch.stack([own.counts for own in data])

    def _context(self, clients: Sequence[int], download: Download) -> tuple[_Context, _Context]:
        """What the clients know, stacked where it differs between them, and the axis of each tensor for vmap."""
        position = torch.tensor([download.position(m) for m in clients], device=self._device)
        personal = {name: torch.stack([download.to(m)[name] for m in clients]) for name in download.personal}
        received = {**download.shared, **personal}
        context = {
            "counts": self._counts[list(clients)],
            "position": position,
            "received": received,
        }
        dims = {
            "counts": 0,
            "position": 0,
            "received": {name: 0 if name in personal else None for name in received},
        }
        return context, dims

    def _site(self, context: _Context, round: int, training: bool = False) -> Site:
        return Site(self._recipe.model, round=round, rounds=self._recipe.rounds, training=training, **context)

    def _rows(self, split: str, clients: Sequence[int]) -> Batch:
        data = self._splits[split]
        if list(clients) == list(range(len(self._data))):
            return data
        return Batch(*(part[list(clients)] for part in data))

    def train(self, clients: Sequence[int], starts: StackedParams, download: Download, round: int) -> StackedParams:
        """Local runs of ``round``."""
        recipe, params = self._recipe, starts
        context, dims = self._context(clients, download)
        context, dims = {**context, "start": starts}, {**dims, "start": 0}
        epochs = [recipe.epochs(self._data[m], round) for m in clients]
        shares = [recipe.run_phases(own) for own in epochs]
        for number, (phase, _) in enumerate(shares[0]):
            training = phase.train != "head"

            def loss(params: Params, batch: Batch, own: _Context, training: bool = training) -> Tensor:
                return recipe.method.loss(params, batch, self._site(own, round, training))

            batches = [[index for epoch in own[number][1] for index in epoch] for own in shares]
            with seeding.isolated(self._device, recipe.seed, round, phase.train):
                params = train_stacked(
                    loss,
                    params,
                    recipe.trainable(phase, params),
                    self._rows("train", clients),
                    batches,
                    recipe.training,
                    context,
                    dims,
                )
        return params

    def upload(
        self, clients: Sequence[int], own: StackedParams, starts: StackedParams, download: Download, round: int
    ) -> StackedParams:
        """What leaves the clients after their local runs from ``starts``."""
        context, dims = self._context(clients, download)
        context, dims = {**context, "start": starts}, {**dims, "start": 0}

        def one(params: Params, data: Batch, own: _Context) -> Params:
            return self._recipe.method.upload(params, data, self._site(own, round))

        with torch.no_grad():
            return vmap(one, in_dims=(0, 0, dims))(own, self._rows("train", clients), context)

    def personalise(
        self, clients: Sequence[int], own: StackedParams, download: Download, round: int
    ) -> tuple[StackedParams, Mapping[str, Tensor]]:
        """The starts of the next round, and stacked diagnostics."""
        context, dims = self._context(clients, download)
        probes = [self._recipe.probe(self._data[m], round) for m in clients]
        batch = None if probes[0] is None else pad([probe for probe in probes if probe is not None])

        def one(params: Params, batch: Batch | None, own: _Context) -> tuple[Params, dict[str, Tensor]]:
            start, report = self._recipe.method.personalise(params, batch, self._site(own, round))
            return start, dict(report)

        with torch.no_grad():
            lifted = vmap(one, in_dims=(0, None if batch is None else 0, dims))
            return lifted(own, batch, context)

    def evaluate(self, clients: Sequence[int], params: StackedParams, download: Download, round: int) -> Metrics:
        """Metrics of every client on its own data."""
        context, dims = self._context(clients, download)

        def predict(params: Params, x: Tensor, own: _Context) -> dict[str, Tensor]:
            return predict_all(self._recipe.method, params, x, self._site(own, round))

        lifted = vmap(predict, in_dims=(0, 0, dims))
        metrics: Metrics = [{} for _ in clients]
        for split, prefix in (("test", ""), ("validation", "validation_")):
            data = self._rows(split, clients)
            totals: dict[str, Tensor] = {}
            with torch.no_grad():
                for low in range(0, data.y.shape[1], AT_ONCE):
                    x, y, w = (part[:, low : low + AT_ONCE] for part in data)
                    for name, logits in lifted(params, x, context).items():  # (K, B, C)
                        right = 100 * ((logits.argmax(2) == y) * w).sum(1)
                        loss = (F.cross_entropy(logits.transpose(1, 2), y, reduction="none") * w).sum(1)
                        for metric, value in ((f"accuracy{name}", right), (f"loss{name}", loss)):
                            totals[metric] = totals[metric] + value if metric in totals else value
            sizes = data.w.sum(1)
            for metric, total in totals.items():
                for own, size, value in zip(metrics, sizes.tolist(), total.tolist(), strict=True):
                    if size:
                        own[f"{prefix}{metric}"] = value / size
        return metrics
