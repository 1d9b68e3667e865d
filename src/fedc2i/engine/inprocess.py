"""A federation on one machine: the round loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedc2i import seeding
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, Recipe
from fedc2i.engine.looped import Executor, Looped
from fedc2i.engine.rounds import Metrics, Outcome, Point, Round
from fedc2i.engine.server import Server
from fedc2i.engine.settings import Settings, check, pads_statistics
from fedc2i.engine.stacked import Stacked as StackedExecutor
from fedc2i.methods.base import Download, Method
from fedc2i.models import Model
from fedc2i.params import Stacked, replace_rows, row, rows, size_in_bytes, stack


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
    padded = pads_statistics(recipe.model, [own.samples for own in data])
    stacked = settings.executor == "stacked" or (settings.executor == "auto" and device.type == "cuda")
    return StackedExecutor(recipe, data) if stacked and not padded else Looped(recipe, data, on_client)


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


def _spread(
    report: Mapping[str, Tensor], audience: Sequence[int], download: Download, clients: int
) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all clients, nan elsewhere.

    ``(M, M, ...)`` for what a client says of each client it received, ``(M, ...)`` for what it says of itself.
    """
    full = {}
    for name, values in report.items():
        of_others = values.ndim > 1 and values.shape[1] == len(download.clients)
        shape = (clients, clients, *values.shape[2:]) if of_others else (clients, *values.shape[1:])
        array = np.full(shape, np.nan, dtype=np.float32)
        array[np.ix_(audience, download.clients) if of_others else audience] = values.to(torch.float32).cpu().numpy()
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
    conv = cudnn.conv  # type: ignore[attr-defined]
    before = cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision
    before_threads = torch.get_num_threads()
    cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision = True, False, "ieee", "ieee"
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision = before
        torch.set_num_threads(before_threads)
