"""One seed's way through the rounds: its exchange, its clients' models, who takes part next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedc2i.core.params import Params, Stacked, prefixed, replace_rows, row, rows, size_in_bytes, unprefixed
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import REPORTS, Exchange
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.records import Diagnostics, Metrics, Outcome, Point, Round


class SeedRun:
    """All that changes from round to round with one seed."""

    def __init__(
        self, context: RunContext, settings: EngineSettings, names: Sequence[str], samples: Tensor, device: torch.device
    ) -> None:
        """Draws the initial models and the first participants."""
        self.context, self.settings, self.names = context, settings, names
        self._device = device
        first = context.first_models(names, settings.init)
        self._own: Stacked = {name: tensor.to(device) for name, tensor in first.items()}
        self.exchange = Exchange(context, settings, names, samples, self._own)
        self._chosen = self._choose(1)
        self._starts = rows(self._own, self._chosen)
        self._audience = tuple(range(len(names)))
        self._received = self._own
        self._last: Round | None = None
        self._metrics: dict[Point, Metrics] = {}
        self._rejected: dict[int, str] = {}
        self._bytes_up = self._report_bytes = 0

    # A round, step by step.

    def training(self, number: int) -> list[ClientBatch]:
        """The clients that train in a round, with the models they start from."""
        self._metrics = {}
        return self._batches(self._chosen, self._starts, number)

    def absent(self, number: int) -> list[ClientBatch]:
        """The clients that do not train in a round, with the models they have."""
        others = self._absent()
        return self._batches(others, rows(self._own, others), number)

    def keep_models(self, trained: Sequence[Trained]) -> None:
        """Clients keep the models they trained; a model of pooled data is everyone's."""
        models = self._joined([own.params for own in trained], self._chosen)
        if self.context.method.pools_data:
            self._own = {name: tensor.repeat_interleave(len(self.names), 0) for name, tensor in models.items()}
        else:
            self._own = replace_rows(self._own, self._chosen, models)

    def keep_metrics(self, trained: Sequence[Trained], absent: Sequence[Metrics]) -> None:
        """Takes the evaluation of all clients after local training."""
        found = self._by_client([own.metrics for own in trained], self._chosen)
        found |= self._by_client(absent, self._absent())
        self._metrics["trained"] = [found[m] for m in range(len(self.names))]

    def send_uploads(self, trained: Sequence[Trained], number: int) -> None:
        """Uploads go through the upload pipeline into the mailbox."""
        uploads = self._joined([own.uploads for own in trained], self._chosen)
        if self.settings.clip or self.context.attacks:
            from fedc2i.engine.upload import process

            names = [self.names[m] for m in self._chosen]
            uploads = process(uploads, self._starts, names, number, self.context, self.settings, self._received_before)
        self._bytes_up = size_in_bytes(row(uploads, 0)) + self._report_bytes
        self._rejected = self.exchange.mailbox.receive(self._chosen, uploads, number)

    def _received_before(self, k: int) -> Params:
        """What the k-th client that trains received before this round."""
        return self.exchange.download(self._chosen[k]).to(self._chosen[k])

    def personalising(self, number: int) -> list[ClientBatch]:
        """The clients that need what the exchange brought, with the models they have."""
        self._audience = self.exchange.audience(number)
        return self._batches(self._audience, rows(self._own, self._audience), number)

    def finish(self, personalised: Sequence[Personalised], number: int, due: bool, seconds: float) -> Round:
        """Ends the round: its report, who takes part in the next one, and from which start."""
        if due:
            found = self._by_client([own.metrics for own in personalised], self._audience)
            self._metrics["received"] = [found[m] for m in self._audience]
        measured = [
            Diagnostics(own.diagnostics, clients, self.exchange.download(clients[0]).clients)
            for own, clients in zip(personalised, self.exchange.by_group(self._audience), strict=True)
        ]
        sizes = (self._bytes_up, self._bytes_down())
        report = (number, seconds, self._chosen, self._metrics, measured, self._rejected)
        self._last = self.exchange.report(*report, *sizes)
        self._received = self._joined([own.params for own in personalised], self._audience)
        self._choose_next(number)
        # Reports travel with the next upload and count as part of it; clients that do not train send none.
        self._report_bytes = self.exchange.take_reports(measured, self._chosen) // len(self._chosen)
        return self._last

    def _choose(self, number: int) -> tuple[int, ...]:
        """Who trains in a round; the first client for all of them if data is pooled."""
        chosen = self.exchange.choose(number)
        return chosen[:1] if self.context.method.pools_data else chosen

    def _choose_next(self, number: int) -> None:
        self._chosen = self._choose(number + 1)
        self._starts = rows(self._received, [self._audience.index(m) for m in self._chosen])

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
        return Outcome(self._own, self._received, self._last)

    # State in, state out.

    def state(self) -> tuple[Params, dict[str, Any]]:
        """All that is needed to resume after a round, as flat tensors and plain values."""
        tensors, values = self.exchange.state()
        tensors = prefixed("own/", self._own) | prefixed("received/", self._received) | tensors
        values["report_bytes"] = self._report_bytes
        values["on_cpu"] = [name for name, tensor in tensors.items() if self._stays_on_cpu(name, tensor)]
        return tensors, values

    def restore(self, tensors: Params, values: Mapping[str, Any], number: int) -> None:
        """Takes the state after round ``number``, which `checkpoint_check.check_seed` has accepted."""
        on_cpu = set(values["on_cpu"])
        moved = {id(own): own.to(self._device) for own in tensors.values()}  # a tensor of many names is moved once
        tensors = {name: own if name in on_cpu else moved[id(own)] for name, own in tensors.items()}
        self._own, self._received = unprefixed("own/", tensors), unprefixed("received/", tensors)
        self.exchange.restore(tensors, values)
        self._report_bytes = values["report_bytes"]
        self._audience = self.exchange.audience(number)
        self._choose_next(number)

    def _stays_on_cpu(self, name: str, tensor: Tensor) -> bool:
        """Whether a tensor belongs on the CPU whatever the device of the run."""
        return tensor.device.type == "cpu" and (self._device.type != "cpu" or f"/{REPORTS}" in name)

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

    def _by_client(self, metrics: Sequence[Metrics], clients: Sequence[int]) -> dict[int, dict[str, float]]:
        """Metrics of the batches of ``clients``, by client."""
        order = [m for own in self.exchange.by_group(clients) for m in own]
        return dict(zip(order, (own for batch in metrics for own in batch), strict=True))

    def _absent(self) -> tuple[int, ...]:
        trains = set(self._chosen)
        return tuple(m for m in range(len(self.names)) if m not in trains)
