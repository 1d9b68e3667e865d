"""A federation on one machine: the round loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedc2i import seeding
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, Recipe
from fedc2i.engine.looped import Executor, Looped, Metrics
from fedc2i.engine.server import Server
from fedc2i.engine.stacked import Stacked as StackedExecutor
from fedc2i.errors import UserError
from fedc2i.methods.base import Download, Method
from fedc2i.models import Model
from fedc2i.options import check_at_least, check_choice
from fedc2i.params import Stacked, replace_rows, row, rows, size_in_bytes, stack
from fedc2i.training import Training

Point = Literal["received", "trained"]
POINTS: tuple[Point, ...] = ("received", "trained")
MOST_THREADS = 1024  # torch crashes when asked for very many


@dataclass(frozen=True)
class Settings:
    """How a federation is run, whatever the method.

    Attributes:
        rounds: communication rounds, at least 1.
        clients_per_round: a number of clients, or a share such as ``"20%"``.
        evaluate_every: rounds between evaluations; the last round is always evaluated.
        patience: stop after this many evaluations without a better mean validation accuracy; 0 never stops early.
        init: one ``common`` initial model, or an ``independent`` one for each client.
        executor: ``looped``, ``stacked``, or ``auto``: stacked on a GPU, looped on a CPU.
        threads: CPU threads inside one operation. One is fastest for small models, above all beside other programs,
            and makes results independent of the number of cores.
        training: how every client trains.
    """

    rounds: int = 20
    clients_per_round: int | str = "100%"
    evaluate_every: int = 1
    patience: int = 0
    init: Literal["common", "independent"] = "common"
    executor: Literal["auto", "looped", "stacked"] = "auto"
    threads: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rounds", "evaluate_every", "threads")
        check_at_least(self, 0, "patience")
        check_choice(self, "init", "executor")
        if self.threads > MOST_THREADS:
            raise UserError(f"threads must be 1..{MOST_THREADS}, got {self.threads}")

    def participants(self, clients: int) -> int:
        """How many of ``clients`` take part in a round."""
        wanted = str(self.clients_per_round)
        try:
            share = float(wanted.removesuffix("%")) / 100 if wanted.endswith("%") else int(wanted) / clients
        except (ValueError, OverflowError):
            share = 0.0
        if not 0 < share <= 1:
            raise UserError(f"clients_per_round must be 1..{clients} or a share such as 20%, got '{wanted}'")
        return max(1, round(share * clients))


@dataclass(frozen=True)
class Round:
    """What one round brought.

    Attributes:
        seed: of the run.
        round: its number, from 1.
        seconds: how long it took, evaluation included.
        participants: names of the clients that trained.
        metrics: for each point, for each client its metrics; empty in rounds that are not evaluated.
        influence: diagnostics such as ``influence_vector`` ``(M, M, ...)``: row m is what client m measured of every
            client, nan where it measured nothing. It belongs to the exchange at the end of this round.
        refused: names of clients whose upload was not finite and was left out.
        bytes_up: what one client sent.
        bytes_down: what one client received.
    """

    seed: int
    round: int
    seconds: float
    participants: tuple[str, ...]
    metrics: Mapping[Point, Metrics]
    influence: Mapping[str, np.ndarray[Any, Any]]
    refused: tuple[str, ...]
    bytes_up: int
    bytes_down: int

    def mean(self, point: Point, metric: str = "accuracy") -> float:
        """The unweighted mean of a metric over the clients that have it."""
        values = [own[metric] for own in self.metrics[point] if metric in own]
        return float(np.mean(values))


@dataclass(frozen=True)
class Outcome:
    """The end of a run: every client's last model at both points, stacked, and the last round's report."""

    trained: Stacked
    received: Stacked
    last: Round


def federate(
    method: Method,
    model: Model,
    federation: Federation,
    settings: Settings,
    seed: int,
    device: torch.device | str = "cpu",
    on_round: Callable[[Round], None] | None = None,
    on_client: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Runs one federation with one seed.

    Args:
        method: what clients and server do.
        model: what is trained.
        federation: whose data.
        settings: how long and how.
        seed: decides every random draw.
        device: where to compute.
        on_round: called after every round.
        on_client: called during local training with the number of clients done and the number there are.
    """
    names, everyone = federation.names, list(range(len(federation.clients)))
    device = torch.device(device)
    check(method, model, federation, settings)
    data = [ClientData.place(client, len(federation.classes), device) for client in federation.clients]
    recipe = Recipe(method, model, settings.training, settings.rounds, seed)
    executor = _executor(recipe, data, settings, device, on_client)
    own = _first_models(method, model, settings, names, seed, device)
    server = Server(method, torch.tensor([own.samples for own in data], device=device), own)
    stopping = _Patience(settings.patience)

    chosen = _choose(settings, names, seed, 1)
    starts = rows(own, chosen)
    with _repeatable(settings.threads):
        for number in range(1, settings.rounds + 1):
            began = time.perf_counter()
            trained = executor.train(chosen, starts, server.download, number)
            own = replace_rows(own, chosen, trained)
            due = number % settings.evaluate_every == 0 or number == settings.rounds
            metrics: dict[Point, Metrics] = {}
            if due:
                metrics["trained"] = executor.evaluate(everyone, own, server.download, number)
            uploads = executor.upload(chosen, trained, starts, server.download, number)
            refused = server.receive(chosen, uploads, number)
            download = server.combine(number)
            following = _choose(settings, names, seed, number + 1)
            audience = everyone if due else following
            received, report = executor.personalise(audience, rows(own, audience), download, number)
            if due:
                metrics["received"] = executor.evaluate(everyone, received, download, number)
            last = Round(
                seed,
                number,
                time.perf_counter() - began,
                tuple(names[m] for m in chosen),
                metrics,
                _spread(report, audience, download, len(names)),
                tuple(names[m] for m in refused),
                bytes_up=size_in_bytes(row(uploads, 0)),
                bytes_down=size_in_bytes(download.to(chosen[0])),
            )
            if on_round is not None:
                on_round(last)
            if due and stopping.is_over(last, method.headline):
                break
            chosen, starts = following, rows(received, [audience.index(m) for m in following])
    return Outcome(own, received, last)


def _executor(
    recipe: Recipe,
    data: Sequence[ClientData],
    settings: Settings,
    device: torch.device,
    on_client: Callable[[int, int], None] | None,
) -> Executor:
    """The one asked for; by itself, stacked on a GPU unless padding would enter BatchNorm's statistics."""
    pads_statistics = _pads_statistics(recipe.model, [own.samples for own in data])
    stacked = settings.executor == "stacked" or (settings.executor == "auto" and device.type == "cuda")
    return StackedExecutor(recipe, data) if stacked and not pads_statistics else Looped(recipe, data, on_client)


def _first_models(
    method: Method, model: Model, settings: Settings, names: Sequence[str], seed: int, device: torch.device
) -> Stacked:
    keys: list[tuple[str, ...]] = [(name, "init") if settings.init == "independent" else ("init",) for name in names]
    models = stack([method.setup(model.init(seed, *own), model) for own in keys])
    return {name: tensor.to(device) for name, tensor in models.items()}


def _choose(settings: Settings, names: Sequence[str], seed: int, number: int) -> list[int]:
    """Who takes part in a round, in table order."""
    count = settings.participants(len(names))
    if count == len(names):
        return list(range(count))
    draw = torch.randperm(len(names), generator=seeding.generator(seed, number, "participants"))
    return sorted(draw[:count].tolist())


def check(method: Method, model: Model, federation: Federation, settings: Settings) -> None:
    """Refuses at the start what would fail in the middle.

    Raises:
        UserError: for a model that does not fit the data or the method, options that need validation data where there
            is none, a share of clients that is none, or an executor that cannot run the model.
    """
    model.check(federation.clients[0].train.x[:2], len(federation.classes))
    method.setup(model.init(0, "check"), model)  # a method may refuse a model, e.g. FedBN one without BatchNorm
    settings.participants(len(federation.clients))
    samples = [len(client.train) for client in federation.clients]
    if settings.executor == "stacked" and _pads_statistics(model, samples):
        raise UserError(
            f"executor=stacked: model '{model.name}' keeps batch statistics, so clients must have equally many "
            "training samples; use executor=looped"
        )
    if method.probe is not None and method.probe.split == "validation":
        for client in federation.clients:
            if not len(client.validation):
                raise UserError(f"influence_split=validation: client '{client.name}' has no validation data")
    if settings.patience and not any(len(client.validation) for client in federation.clients):
        raise UserError(f"patience={settings.patience}: no client of '{federation.name}' has validation data")


def _pads_statistics(model: Model, samples: Sequence[int]) -> bool:
    """Whether stacking the clients would let padding enter running statistics."""
    return model.has_statistics and len(set(samples)) > 1


def _spread(
    report: Mapping[str, Tensor], audience: Sequence[int], download: Download, clients: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics of some clients about those they received, as full ``(M, M, ...)`` arrays with nan elsewhere."""
    full = {}
    for name, values in report.items():
        array = np.full((clients, clients, *values.shape[2:]), np.nan, dtype=np.float32)
        array[np.ix_(audience, download.clients)] = values.to(torch.float32).cpu().numpy()
        full[name] = array
    return full


class _Patience:
    """Early stopping on mean validation accuracy; never on test data."""

    def __init__(self, patience: int) -> None:
        self._patience, self._best, self._waited = patience, -float("inf"), 0

    def is_over(self, last: Round, point: Point) -> bool:
        if not self._patience:
            return False
        score = last.mean(point, "validation_accuracy")
        self._waited = 0 if score > self._best else self._waited + 1
        self._best = max(self._best, score)
        return self._waited >= self._patience


@contextmanager
def _repeatable(threads: int) -> Iterator[None]:
    """A fixed number of CPU threads, full single precision and repeatable convolutions: one seed, the same bits."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32
    before_threads = torch.get_num_threads()
    cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = True, False, False
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.allow_tf32, matmul.allow_tf32 = before
        torch.set_num_threads(before_threads)
