"""A federation on one machine: the round loop, for all seeds at once."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TypeVar

import torch

from fedc2i.data.federation import Federation
from fedc2i.engine import attacks
from fedc2i.engine.checks import check
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.executors.adaptive import Adaptive
from fedc2i.engine.executors.base import ClientBatch, Executor
from fedc2i.engine.executors.looped import Looped
from fedc2i.engine.executors.stacked import compatibility
from fedc2i.engine.executors.stacked.executor import Stacked
from fedc2i.engine.executors.workers.executor import Workers
from fedc2i.engine.executors.workers.pool import Pool, cores, lease
from fedc2i.engine.records import Metrics, Outcome, Round
from fedc2i.engine.seed_run import SeedRun
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.state import Keep, Start, put_back, state_of
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

_Result = TypeVar("_Result")


def simulate(
    method: Method,
    model: Model,
    federation: Federation,
    settings: EngineSettings,
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
    on_round: Callable[[Round], None] | None = None,
    on_client: Callable[[int, int], None] | None = None,
    keep: Keep | None = None,
    start: Start | None = None,
) -> dict[int, Outcome]:
    """Runs one federation with every seed, all of them side by side; a seed's numbers do not depend on the others.

    Args:
        method: what clients and server do.
        model: what is trained.
        federation: whose data.
        settings: how long and how.
        seeds: each decides every random draw of its run.
        device: where to compute.
        on_round: called after every round, once for each seed.
        on_client: called during local training with the number of clients done and the number there are.
        keep: called behind every round, after its reports, with what gives the state to go on from.
        start: goes on from there, and ends with the bits of a run that was never cut off.
    """
    device = torch.device(device)
    check(method, model, federation, settings)
    data = [ClientData.place(client, len(federation.classes), device) for client in federation.clients]
    samples = torch.tensor([own.samples for own in data], device=device)
    attackers = {seed: attacks.parse(settings.attack, federation.names, seed) for seed in seeds}
    recipes = [RunContext(method, model, settings, settings.rounds, seed, attackers[seed]) for seed in seeds]
    lanes = [SeedRun(recipe, settings, federation.names, samples, device) for recipe in recipes]
    first, outcomes = 1, dict[int, Outcome]()
    if start is not None:
        first, (lanes, outcomes) = start.round + 1, put_back(start, lanes, device)
    if not lanes:
        return {seed: outcomes[seed] for seed in seeds}
    with repeatable(settings.threads), closing(_executor(recipes, data, settings, device, on_client)) as executor:
        for number in range(first, settings.rounds + 1):
            began = time.perf_counter()
            due = settings.is_due(number)
            trained = _by_lane(executor.train, [lane.to_train(number) for lane in lanes], due)
            others: list[list[Metrics]] = [[] for _ in lanes]
            if due and settings.participants(len(data)) < len(data):
                others = _by_lane(executor.evaluate, [lane.sitting_out(number) for lane in lanes])
            for lane, runs, scores in zip(lanes, trained, others, strict=True):
                lane.collect(runs, scores, number, due)
            received = _by_lane(executor.personalise, [lane.to_personalise(number, due) for lane in lanes], due)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / len(lanes)
            reports = [lane.finish(own, number, due, seconds) for lane, own in zip(lanes, received, strict=True)]
            for report in reports:
                if on_round is not None:
                    on_round(report)
            for lane in [lane for lane in lanes if number == settings.rounds or lane.is_over(due)]:
                outcomes[lane.recipe.seed] = lane.outcome()
                lanes.remove(lane)
            if keep is not None:
                keep(number, not lanes, partial(state_of, lanes, outcomes))
            if not lanes:
                break
    return {seed: outcomes[seed] for seed in seeds}


def _by_lane(
    compute: Callable[..., list[_Result]], asked: Sequence[list[ClientBatch]], *more: bool
) -> list[list[_Result]]:
    """The results of the turns that each lane asked for, computed together."""
    results = iter(compute([turn for turns in asked for turn in turns], *more))
    return [[next(results) for _ in turns] for turns in asked]


def _executor(
    recipes: Sequence[RunContext],
    data: Sequence[ClientData],
    settings: EngineSettings,
    device: torch.device,
    on_client: Callable[[int, int], None] | None,
) -> Executor:
    """The one asked for; by itself, stacked on a GPU unless the model cannot be."""
    if settings.executor == "stacked" or (settings.executor == "auto" and _stacks(recipes[0].model, data, device)):
        return Stacked(data, settings.clients_at_once, [recipe.attacks for recipe in recipes])

    def over(pool: Pool) -> Workers:
        return Workers(pool, recipes, data, settings.threads, on_client)

    looped = Looped(data, on_client)
    jobs = settings.participants(len(data)) * len(recipes)
    workers = min(settings.workers or max(1, cores() // settings.threads), jobs)
    if settings.executor == "workers":
        return over(lease(workers))
    if settings.executor == "looped" or device.type != "cpu" or workers == 1 or os.name != "posix":
        return looped
    return Adaptive(looped, over, workers, settings.rounds)


def _stacks(model: Model, data: Sequence[ClientData], device: torch.device) -> bool:
    """Whether clients are stacked by themselves; where only the model is against it, a warning says why."""
    if device.type != "cuda":
        return False
    reason = compatibility.obstacle(model, data[0].train.x.shape[1:])
    if reason is not None:
        warnings.warn(f"executor=auto: looped, because model '{model.name}' {reason}", stacklevel=2)
    return reason is None


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
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
