"""One seed's way through the rounds: its exchange, its clients' models, who takes part next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedc2i.core.params import Params, Stacked, prefixed, replace_rows, row, rows, size_in_bytes, unprefixed
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import REPORTS, Exchange
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.records import Diagnostics, Outcome, Point, Round, Scored


class ClientModels:
    """Models of some clients: ``tensors`` with a row for each."""

    def __init__(self, clients: Sequence[int], device: torch.device) -> None:
        """None of them is there yet."""
        self.tensors: Stacked = {}
        self._row = {client: k for k, client in enumerate(clients)}
        self._device = device

    def of(self, clients: Sequence[int]) -> Stacked:
        """Models of these clients on the device, stacked."""
        return rows(self.tensors, [self._row[client] for client in clients])

    def put(self, clients: Sequence[int], models: Stacked) -> None:
        """Takes models of these clients, of all of them the first time."""
        models = {name: tensor.to(self._device) for name, tensor in models.items()}
        where = [self._row[client] for client in clients]
        self.tensors = replace_rows(self.tensors, where, models) if self.tensors else models


class Store:
    """Where clients' models are: on the device, all clients computed at once. See `fedc2i.engine.offloaded_models`."""

    offloads = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self, clients: Sequence[int]) -> ClientModels:
        """Models of these clients, none of them there yet."""
        return ClientModels(clients, self.device)

    def chunks(self, clients: Sequence[int]) -> list[tuple[int, ...]]:
        """The clients that are computed at once, one after the other."""
        return [tuple(clients)] if clients else []


class SeedRun:
    """All that changes from round to round with one seed."""

    def __init__(
        self,
        context: RunContext,
        settings: EngineSettings,
        names: Sequence[str],
        samples: Tensor,
        store: Store,
        keeps_logits: bool,
    ) -> None:
        """Draws the initial models and the first participants."""
        self.context, self.settings, self.names = context, settings, names
        self._store, self._keeps_logits = store, keeps_logits
        self._audience = tuple(range(len(names)))
        self._own = self._received = store.new(self._audience)
        for some in store.chunks(self._audience):
            self._own.put(some, context.first_models([names[m] for m in some], settings.init, not store.offloads))
        self.exchange = Exchange(context, settings, names, samples, self._own.tensors)
        self._chosen = self._choose(1)
        self._starts = self._own.of(self._chosen)
        self._last: Round | None = None
        self._scores: dict[Point, dict[int, Scored]] = {}
        self._logits: dict[Point, Tensor] = {}
        self._measured: list[Diagnostics] = []
        self._rejected: dict[int, str] = {}
        self._bytes_up = self._report_bytes = 0

    # A round, step by step.

    def training(self, number: int) -> list[ClientBatch]:
        """The clients that train in a round, with the models they start from."""
        self._scores = {"trained": {}, "received": {}}
        return self._batches(self._chosen, self._starts, number)

    def keep_models(self, batches: Sequence[ClientBatch], trained: Sequence[Trained]) -> None:
        """Clients keep the models they trained; a model of pooled data is everyone's."""
        models = self._joined([own.params for own in trained], self._chosen)
        if self.context.method.pools_data:
            everyone = {name: tensor.repeat_interleave(len(self.names), 0) for name, tensor in models.items()}
            self._own.put(range(len(self.names)), everyone)
        else:
            self._own.put(self._chosen, models)
        self._keep_scores("trained", batches, [own.metrics for own in trained])

    def absent(self, number: int) -> Iterator[list[ClientBatch]]:
        """The clients that do not train in a round, with the models they have, a chunk of them at a time."""
        trains = set(self._chosen)
        for some in self._store.chunks([m for m in range(len(self.names)) if m not in trains]):
            yield self._batches(some, self._own.of(some), number)

    def keep_absent(self, batches: Sequence[ClientBatch], metrics: Sequence[list[Scored]]) -> None:
        """Takes the evaluation of clients that do not train."""
        self._keep_scores("trained", batches, metrics)

    def make_uploads(self, trained: Sequence[Trained], number: int) -> tuple[Stacked, Tensor | None]:
        """What comes out of the upload pipeline, and what the mailbox measures of it, see `send_uploads`.

        Nothing waits for the device.
        """
        uploads = self._joined([own.uploads for own in trained], self._chosen)
        if self.settings.clip or self.context.attacks:
            from fedc2i.engine.upload import process

            names = [self.names[m] for m in self._chosen]
            uploads = process(uploads, self._starts, names, number, self.context, self.settings, self._received_before)
        self._bytes_up = size_in_bytes(row(uploads, 0)) + self._report_bytes
        return uploads, self.exchange.mailbox.measure(uploads)

    def send_uploads(self, uploads: Stacked, measured: Tensor | None, number: int) -> None:
        """Uploads go into the mailbox."""
        self._rejected = self.exchange.mailbox.receive(self._chosen, uploads, number, measured)

    def _received_before(self, k: int) -> Params:
        """What the k-th client that trains received before this round."""
        return self.exchange.download(self._chosen[k]).to(self._chosen[k])

    def personalising(self, number: int) -> Iterator[list[ClientBatch]]:
        """The clients that need what the exchange brought, with the models they have, a chunk of them at a time."""
        self._audience = self.exchange.audience(number)
        self._received, self._measured = self._store.new(self._audience), []
        for some in self._store.chunks(self._audience):
            yield self._batches(some, self._own.of(some), number)

    def keep_received(self, batches: Sequence[ClientBatch], personalised: Sequence[Personalised]) -> None:
        """Takes what a chunk of the clients made of the download."""
        some = sorted(m for batch in batches for m in batch.clients)
        self._received.put(some, self._joined([own.params for own in personalised], some))
        self._keep_scores("received", batches, [own.metrics for own in personalised])
        for batch, own in zip(batches, personalised, strict=True):
            self._measured.append(Diagnostics(own.diagnostics, batch.clients, batch.download.clients))

    def finish(self, number: int, due: bool, seconds: float) -> Round:
        """Ends the round: its report, who takes part in the next one, and from which start."""
        scored = {point: [own[m] for m in range(len(self.names))] for point, own in self._scores.items() if due}
        metrics = {point: [dict(own) for own in scores] for point, scores in scored.items()}  # without their logits
        self._logits = {
            point: torch.cat([own.logits for own in scores]) for point, scores in scored.items() if self._keeps_logits
        }
        self._scores = {}
        sizes = (self._bytes_up, self._bytes_down())
        self._last = self.exchange.report(
            number, seconds, self._chosen, metrics, self._measured, self._rejected, *sizes
        )
        self._choose_next(number)
        # Reports travel with the next upload and count as part of it; clients that do not train send none.
        self._report_bytes = self.exchange.take_reports(self._measured, self._chosen) // len(self._chosen)
        return self._last

    def _choose(self, number: int) -> tuple[int, ...]:
        """Who trains in a round; the first client for all of them if data is pooled."""
        chosen = self.exchange.choose(number)
        return chosen[:1] if self.context.method.pools_data else chosen

    def _choose_next(self, number: int) -> None:
        self._chosen = self._choose(number + 1)
        self._starts = self._received.of(self._chosen)

    def _bytes_down(self) -> int:
        """What a client that trained received, on average: with a topology, groups receive different amounts."""
        groups = self.exchange.by_group(self._chosen)
        sizes = [(size_in_bytes(self.exchange.download(own[0]).to(own[0])), len(own)) for own in groups]
        return sum(size * clients for size, clients in sizes) // len(self._chosen)

    def should_stop(self, due: bool) -> bool:
        """Whether validation accuracy has stopped rising."""
        assert self._last is not None
        return due and self.exchange.should_stop(self._last)

    def outcome(self) -> Outcome:
        """The last models; to be asked after an evaluated round, when everyone has received."""
        assert self._last is not None
        return Outcome(self._own.tensors, self._received.tensors, self._last, self._logits)

    # State in, state out.

    def state(self) -> tuple[Params, dict[str, Any]]:
        """All that is needed to resume after a round, as flat tensors and plain values."""
        tensors, values = self.exchange.state()
        tensors = prefixed("own/", self._own.tensors) | prefixed("received/", self._received.tensors) | tensors
        values["report_bytes"] = self._report_bytes
        values["on_cpu"] = [name for name, tensor in tensors.items() if self._stays_on_cpu(name, tensor)]
        return tensors, values

    def restore(self, tensors: Params, values: Mapping[str, Any], number: int) -> None:
        """Takes the state after round ``number``, which `checkpoint_check` has accepted."""
        models = {name for name in tensors if name.startswith(("own/", "received/"))}
        on_cpu = {*values["on_cpu"]} | models if self._store.offloads else {*values["on_cpu"]} - models
        device = self._store.device
        moved = {id(own): own.to(device) for name, own in tensors.items() if name not in on_cpu}  # of many names, once
        tensors = {name: own if name in on_cpu else moved[id(own)] for name, own in tensors.items()}
        self._own.put(range(len(self.names)), unprefixed("own/", tensors))
        self.exchange.restore(tensors, values)
        self._report_bytes = values["report_bytes"]
        self._audience = self.exchange.audience(number)
        self._received = self._store.new(self._audience)
        self._received.put(self._audience, unprefixed("received/", tensors))
        self._choose_next(number)

    def _stays_on_cpu(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor belongs on the CPU whatever the device of the run."""
        return tensor.device.type == "cpu" and (self._store.device.type != "cpu" or f"/{REPORTS}" in name)

    # Clients by the group they receive in; the results of a single group are passed on without a copy.

    def _batches(self, clients: Sequence[int], params: Stacked, number: int) -> list[ClientBatch]:
        """The client batches of ``clients``, whose models are ``params``."""
        place = {client: k for k, client in enumerate(clients)}
        return [
            ClientBatch(
                self.context, own, rows(params, [place[m] for m in own]), self.exchange.download(own[0]), number
            )
            for own in self.exchange.by_group(clients)
        ]

    def _joined(self, results: Sequence[Stacked], clients: Sequence[int]) -> Stacked:
        """Results of the batches of ``clients``, stacked in the order of ``clients``."""
        if len(results) == 1:
            return results[0]
        place = {client: k for k, client in enumerate(m for own in self.exchange.by_group(clients) for m in own)}
        joined = {name: torch.cat([own[name] for own in results]) for name in results[0]}
        return rows(joined, [place[m] for m in clients])

    def _keep_scores(self, point: Point, batches: Sequence[ClientBatch], metrics: Sequence[list[Scored]]) -> None:
        """Takes the metrics of batches, if any were asked for."""
        for batch, own in zip(batches, metrics, strict=True):
            if own:
                kept = own if self._keeps_logits else [Scored(one, one.logits.new_empty(0)) for one in own]
                self._scores[point].update(zip(batch.clients, kept, strict=True))
