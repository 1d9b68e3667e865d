"""All clients of all seeds at once: the method's functions lifted with ``torch.func.vmap``, over clients, then seeds.

What does not depend on the client (a relayed stack of models, their sum, their leave-one-out means) is computed once a
seed, because vmap gives it no client axis. If memory runs out, fewer clients are computed at a time.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, row, select, stack
from fedc2i.data.federation import InputSpec
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.executors.stacked.chunks import Compute, Result, clients_that_fit, in_chunks
from fedc2i.engine.executors.stacked.graph_cache import GraphCache, Kind
from fedc2i.engine.executors.stacked.padded_data import PaddedData, moved
from fedc2i.engine.executors.stacked.stepper import Stepper
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from fedc2i.engine.executors.stacked.watched_site import WatchedClient, WatchedSite
from fedc2i.engine.records import Scored
from fedc2i.methods.base import Phase, Site
from fedc2i.training.local import Batch
from fedc2i.training.metrics import defined

_TOO_LARGE = "a single client does not fit into the device's memory; use workers=1 if runs share it, else device=cpu"
_WIDEST_PATCH = 128  # numbers in a patch: up to this many, cuDNN's convolutions are slower than a product
_SiteTensors = dict[str, Any]  # the tensors of a Site, each with or without an axis for clients


class _Scores(NamedTuple):
    """Of several clients, on the device: the names of each one's metrics, all their values, and all logits."""

    names: list[list[str]]
    values: Tensor
    logits: Tensor


class StackedExecutor:
    """`Executor` that computes for all clients together."""

    def __init__(
        self, data: Sequence[ClientData], clients_at_once: int = 0, contexts: Sequence[RunContext] = ()
    ) -> None:
        self._data = data
        self._device = data[0].counts.device
        self._padded = PaddedData(data, contexts)
        self._at_once = clients_at_once  # 0: not known yet
        self._graphs = GraphCache(self._device)

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        return self._in_chunks(batches, lambda chunk: self._train(chunk, evaluate))

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """See `Executor.personalise`."""
        return self._in_chunks(batches, lambda chunk: self._personalise(chunk, evaluate))

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[list[Scored]]:
        """Metrics of one client after the other: a test set is work enough for a whole GPU."""
        found = [self._metrics(batch) for batch in batches]
        values = iter(torch.cat([own.values for own in found]).tolist())  # one transfer for all seeds
        scores = []
        for batch, own in zip(batches, found, strict=True):
            metrics = [defined({name: next(values) for name in names}) for names in own.names]
            logits = torch.split(own.logits, [len(self._data[m].test.y) for m in batch.clients])
            scores.append([Scored(*one) for one in zip(metrics, logits, strict=True)])
        return scores

    def _metrics(self, batch: ClientBatch) -> _Scores:
        """What `evaluate` reports."""
        kind: Kind = ("evaluate", *batch.clients)
        clients = [
            WatchedClient(batch.context, self._data[m], lambda: self._graphs.reads_round.add(kind))
            for m in batch.clients
        ]

        def metrics(models: Stacked, tensors: _SiteTensors) -> _Scores:
            found: list[dict[str, Tensor]] = []
            logits: list[Tensor] = []
            for k, client in enumerate(clients):
                personal = {name: rows[k] for name, rows in tensors["personal"].items()}
                mail = {**tensors["received"], **personal}, tensors["position"][k]
                with VmapRules(widest=_WIDEST_PATCH):
                    sums = [client.score(piece, row(models, k), *mail, batch.round) for piece in client.pieces()]
                found.append(client.metrics(sums))
                logits += client.test_logits(sums)
            values = torch.stack([value for own in found for value in own.values()])
            return _Scores([list(own) for own in found], values, torch.cat(logits))

        position = moved(torch.tensor([batch.download.position(m) for m in batch.clients]), self._device)
        tensors = {"received": batch.download.shared, "personal": _personal_rows(batch), "position": position}
        if len(batch.clients) < len(self._data):  # other clients in the next round: not worth a CUDA graph
            return metrics(batch.params, tensors)
        result: _Scores = self._graphs.graphed(batch, kind, tensors, metrics)(batch.params, tensors)
        return result

    def close(self) -> None:
        """Releases the CUDA graphs and their memory."""
        self._graphs.clear()

    def _evaluate(self, chunk: Sequence[ClientBatch], models: Sequence[Stacked], wanted: bool) -> list[list[Scored]]:
        pairs = zip(chunk, models, strict=True)
        return self.evaluate([replace(batch, params=own) for batch, own in pairs]) if wanted else [[] for _ in chunk]

    def _in_chunks(self, batches: Sequence[ClientBatch], compute: Compute[Result]) -> list[Result]:
        """Results in the order of ``batches``, in as many chunks as memory requires."""
        self._at_once = self._at_once or self._first_guess(batches[0].context)
        while True:
            try:
                return in_chunks(batches, self._at_once, compute)
            except torch.OutOfMemoryError:
                largest = min(self._at_once, sum(len(batch.clients) for batch in batches))
                if largest == 1:
                    raise UserError(_TOO_LARGE) from None
            self._at_once = largest // 2
            self._graphs.clear()
            gc.collect()  # a user's method may hold tensors in reference cycles
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _first_guess(self, context: RunContext) -> int:
        """How many clients are tried together at first: on a GPU all, because it reports when memory runs out."""
        if self._device.type != "cpu":
            return 10**9
        samples = min(self._padded.train.y.shape[1], context.training.batch_size)
        x = self._padded.train.x
        return clients_that_fit(context.model, InputSpec(tuple(x.shape[2:]), x.dtype), samples)

    def _site_tensors(self, chunk: Sequence[ClientBatch]) -> tuple[_SiteTensors, _SiteTensors]:
        """What the clients know, stacked, and for each tensor the axis of its clients, if it has one."""
        shared = stack([batch.download.shared for batch in chunk])
        personal = stack([_personal_rows(batch) for batch in chunk])
        position = torch.tensor([[batch.download.position(m) for m in batch.clients] for batch in chunk])
        tensors: _SiteTensors = {
            "counts": self._padded.counts(chunk),
            "position": moved(position, self._device),
            "received": {**shared, **personal},
        }
        received = {name: 0 if name in personal else None for name in tensors["received"]}
        return tensors, {"counts": 0, "position": 0, "received": received}

    def _site(self, first: ClientBatch, own: _SiteTensors, kind: Kind, training: bool = False) -> Site:
        """A client's site; it notes if the round's number matters: then a CUDA graph serves that round only."""
        more: dict[str, Any] = {"round": first.round, "rounds": first.context.rounds, "training": training}
        return WatchedSite(first.context.model, **own, **more, on_round=lambda: self._graphs.reads_round.add(kind))

    def _train(self, chunk: list[ClientBatch], evaluate: bool) -> list[Trained]:
        first, context, rows = chunk[0], chunk[0].context, self._padded.rows(chunk)
        starts = params = stack([batch.params for batch in chunk])
        tensors, dims = self._site_tensors(chunk)
        tensors, dims = {**tensors, "start": starts}, {**dims, "start": 0}
        for number, (phase, steps) in enumerate(self._padded.steps(chunk)):
            stepper = self._stepper(first, phase, number, tensors, dims)
            with seeding.isolated(self._device, context.seed, first.clients[0], first.round, phase.train):
                params = stepper.run(params, rows, steps, tensors)

        def upload(params: Params, data: Batch, own: _SiteTensors) -> Params:
            with self._rules():
                return context.method.upload(params, data, self._site(first, own, ("upload",)))

        lifted = self._graphs.graphed(first, ("upload",), tensors, _over_both(upload, (0, 0, dims)))
        with torch.no_grad():
            uploads = lifted(params, self._padded.training_sets(rows), tensors)
        if self._device.type == "cuda":  # while it trains: nothing since the first step has waited for it
            self._padded.draw_ahead(chunk)
        trained = _unstack(params, len(chunk))
        metrics = self._evaluate(chunk, trained, evaluate)
        return [Trained(*own) for own in zip(trained, _unstack(uploads, len(chunk)), metrics, strict=True)]

    def _stepper(
        self, first: ClientBatch, phase: Phase, number: int, tensors: _SiteTensors, dims: _SiteTensors
    ) -> Stepper:
        """For tensors of these shapes; cached, because on a GPU it holds a step's CUDA graph."""
        context, kind = first.context, ("train", number)
        names = context.trainable(phase, first.params)

        def loss(params: Params, batch: Batch, own: _SiteTensors) -> Tensor:
            with VmapRules(batch.w):
                return context.loss(params, batch, self._site(first, own, kind, phase.train != "head"), names)

        def make() -> Stepper:
            return Stepper(loss, names, self._padded.train, context.training, dims, context.method.average)

        return self._graphs.cached(first, kind, tensors, make)

    def _rules(self) -> AbstractContextManager[Any]:
        """For uploads and exchanges; on a CPU, patches of their many samples would need memory that nobody counted."""
        return VmapRules() if self._device.type == "cuda" else nullcontext()

    def _personalise(self, chunk: list[ClientBatch], evaluate: bool) -> list[Personalised]:
        first = chunk[0]
        tensors, dims = self._site_tensors(chunk)
        probes, held_out = self._padded.probes(chunk), self._padded.held_out(chunk)
        if held_out is not None:
            tensors, dims = {**tensors, "held_out": held_out}, {**dims, "held_out": Batch(0, 0, 0)}  # type: ignore[arg-type]
        kind = ("personalise", 0 if probes is None else probes.y.shape[2])

        def one(params: Params, probe: Batch | None, own: _SiteTensors) -> tuple[Params, dict[str, Tensor]]:
            with self._rules():
                start, measured = first.context.method.personalise(params, probe, self._site(first, own, kind))
            return start, dict(measured)

        lifted = self._graphs.graphed(first, kind, tensors, _over_both(one, (0, None if probes is None else 0, dims)))
        with torch.no_grad():
            starts, measured = lifted(stack([batch.params for batch in chunk]), probes, tensors)
        received = _unstack(starts, len(chunk))
        metrics = self._evaluate(chunk, received, evaluate)
        return [Personalised(*own) for own in zip(received, _unstack(measured, len(chunk)), metrics, strict=True)]


def _personal_rows(batch: ClientBatch) -> Stacked:
    """What each client received for itself alone, stacked."""
    download = batch.download
    if not download.personal:
        return {}
    if download.clients == batch.clients:
        return dict(download.personal)
    return stack([select(download.to(m), download.personal) for m in batch.clients])


def _over_both(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """`vmap` over clients, whose axes are ``dims``, then over seeds, for which everything has an axis."""
    outer = tuple(None if dim is None else 0 for dim in dims)
    return vmap(vmap(function, in_dims=dims, randomness="different"), in_dims=outer, randomness="different")


def _unstack(stacked: Stacked, seeds: int) -> list[Stacked]:
    """The seeds of a stack, as views."""
    return [{name: tensor[s] for name, tensor in stacked.items()} for s in range(seeds)]
