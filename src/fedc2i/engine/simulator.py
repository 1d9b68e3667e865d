"""A federation on one machine: the round loop, for all seeds at once, and what is rejected before it starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import zip_longest
from typing import TypeVar

import torch

from fedc2i.core.errors import UserError
from fedc2i.core.params import size_in_bytes
from fedc2i.core.seeding import repeatable
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.checkpoint import OnState, ResumePoint, state_of
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.exchange import receiver_groups
from fedc2i.engine.executors.base import ClientBatch, Executor
from fedc2i.engine.executors.choice import new_executor
from fedc2i.engine.records import Outcome, Round, keeps_logits
from fedc2i.engine.seed_run import SeedRun, Store
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
    on_state: OnState | None = None,
    resume: ResumePoint | None = None,
) -> dict[int, Outcome]:
    """Runs one federation with every seed, side by side; a seed's numbers do not depend on the other seeds.

    Args:
        method: what clients and server do.
        model: what is trained.
        federation: whose data.
        settings: how long and how.
        seeds: each decides every random draw of its run.
        device: where to compute.
        on_round: called after every round, once for each seed.
        on_client: called during local training with the number of clients done and the number of clients.
        on_state: called after every round and its reports, with a function that returns the state to resume from.
        resume: continues from there; the result has the bits of an uninterrupted run.
    """
    device = torch.device(device)
    check(method, model, federation, settings)
    data = ClientData.place_all(federation, method, device)
    samples = torch.tensor([own.samples for own in data], device=device)
    contexts = [RunContext.of_seed(method, model, settings, federation.names, seed) for seed in seeds]
    store = _store(contexts, settings, federation.names, device)
    keeps = keeps_logits(len(seeds), federation)
    runs = [SeedRun(context, settings, federation.names, samples, store, keeps) for context in contexts]
    first, outcomes = 1, dict[int, Outcome]()
    if resume is not None:
        from fedc2i.engine.checkpoint_check import restore

        first = resume.round + 1
        runs, outcomes = restore(resume, runs, federation, device)
    if not runs:
        return {seed: outcomes[seed] for seed in seeds}
    with repeatable(settings), closing(new_executor(contexts, data, settings, device, on_client)) as executor:
        for number in range(first, settings.rounds + 1):
            due = settings.is_due(number)
            for report in _round(number, due, runs, executor, device):
                if on_round is not None:
                    on_round(report)
            for run in [run for run in runs if number == settings.rounds or run.should_stop(due)]:
                outcomes[run.context.seed] = run.outcome()
                runs.remove(run)
            if on_state is not None:
                on_state(number, partial(state_of, runs, outcomes))
            if not runs:
                break
    return {seed: outcomes[seed] for seed in seeds}


def _round(number: int, due: bool, runs: Sequence[SeedRun], executor: Executor, device: torch.device) -> list[Round]:
    """One round of every seed; if an evaluation is due, all clients are evaluated after both computations."""
    began = time.perf_counter()
    training = [run.training(number) for run in runs]
    trained = _together(executor.train, training, due)
    for run, batches, own in zip(runs, training, trained, strict=True):
        run.keep_models(batches, own)
    for absent in _in_turn([run.absent(number) for run in runs if due]):
        for run, batches, scores in zip(runs, absent, _together(executor.evaluate, absent), strict=True):
            run.keep_absent(batches, scores)
    # Of all seeds before one is read, which waits for a GPU.
    made_uploads = [run.make_uploads(own, number) for run, own in zip(runs, trained, strict=True)]
    for run, (uploads, measured) in zip(runs, made_uploads, strict=True):
        run.send_uploads(uploads, measured, number)
        run.exchange.combine(number)
    for receiving in _in_turn([run.personalising(number) for run in runs]):
        for run, batches, made in zip(runs, receiving, _together(executor.personalise, receiving, due), strict=True):
            run.keep_received(batches, made)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / len(runs)
    return [run.finish(number, due, seconds) for run in runs]


def _in_turn(chunks: Sequence[Iterator[list[ClientBatch]]]) -> Iterator[Sequence[list[ClientBatch]]]:
    """The next chunk of every seed's clients, until no seed has any; usually all clients are one chunk."""
    yield from zip_longest(*chunks, fillvalue=[])


def _together(
    compute: Callable[..., list[_Result]], asked: Sequence[list[ClientBatch]], *evaluate: bool
) -> list[list[_Result]]:
    """The results of each seed's client batches, which the executor computes in one call."""
    batches = [batch for own in asked for batch in own]
    results = iter(compute(batches, *evaluate) if batches else ())
    return [[next(results) for _ in own] for own in asked]


def _store(
    contexts: Sequence[RunContext], settings: EngineSettings, names: Sequence[str], device: torch.device
) -> Store:
    """Where the models of all clients and seeds are stored."""
    clients, participants = len(names), settings.participants(len(names))
    if participants == clients:
        return Store(device)
    from fedc2i.engine.offloaded_models import choose_store

    one = size_in_bytes(contexts[0].first_model(names[0], settings.init))
    return choose_store(device, len(contexts) * clients * one, participants)


def check(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> None:
    """Rejects at the start what would fail in the middle.

    Raises:
        UserError: for a model, method and settings that do not fit each other or the data.
    """
    if model.made_for != (federation.input, len(federation.classes)):
        from fedc2i.models import validation  # of a user's own model

        validation.validate(model, federation.clients[0].train.x[:2], len(federation.classes))
    _reject_single_samples(method, model, federation, settings)
    receiver_groups(0, settings, federation.names)
    context = RunContext.of_seed(method, model, settings, federation.names, 0)
    context.first_model("", settings.init)  # a method may reject a model, e.g. FedBN one without BatchNorm
    if settings.executor == "workers" and os.name != "posix":
        raise UserError("executor=workers needs Linux or macOS; use executor=looped")
    if settings.executor == "stacked":
        from fedc2i.engine.executors.stacked import compatibility

        if (reason := compatibility.obstacle(model, federation.input)) is not None:
            raise UserError(f"executor=stacked: model '{model.name}' {reason}; use executor=looped")
    if method.probe is not None and method.probe.split == "validation":
        for client in federation.clients:
            if not len(client.validation):
                raise UserError(f"influence_split=validation: client '{client.name}' has no validation data")
    everyone = settings.participants(len(federation.clients)) == len(federation.clients)
    if method.pools_data and (settings.attack or settings.topology != "full" or not everyone):
        needed = "no attack, topology=full and clients_per_round=100%"
        raise UserError(f"{method.name} trains on the data of all clients: {needed}")
    if settings.clip:
        from fedc2i.engine import clip_noise

        clip_noise.check(method, model, federation, settings)
    if settings.patience and not any(len(client.validation) for client in federation.clients):
        raise UserError(f"patience={settings.patience}: no client of '{federation.name}' has validation data")


def _reject_single_samples(method: Method, model: Model, federation: Federation, training: TrainingSettings) -> None:
    """Rejects batches of one sample where the model takes statistics over samples alone."""
    size, samples = training.batch_size, {client.name: len(client.train) for client in federation.clients}
    if method.pools_data:
        samples = {"all together": sum(samples.values())}
    single = {
        name: count
        for name, count in samples.items()
        if count == 1 or size == 1 or (count % size == 1 and not (training.drop_last and count > size))
    }
    if not single:
        return
    from fedc2i.models import validation

    if (reason := validation.why_not_one_sample(model, federation.input)) is None:
        return
    name, count = next(((own, n) for own, n in single.items() if n == 1), next(iter(single.items())))
    what = "another batch_size" if training.drop_last or size == 1 else "drop_last=true or another batch_size"
    hint = "give it more or leave it out" if count == 1 else f"set {what}"
    single_one = "are batches of one" if size == 1 < count else "leaves a batch of one"
    raise UserError(
        f"client '{name}' has {count} training sample{'s' * (count > 1)}, which {single_one}, and model "
        f"'{model.name}' cannot be trained on that; {hint} ({reason})"
    )
