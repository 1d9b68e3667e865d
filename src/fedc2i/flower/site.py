"""A site's work in a round: the simulator's `LocalClient`, between a task and an answer."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import torch

from fedc2i.core.params import Params, row, stack
from fedc2i.data.federation import Client
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.determinism import repeatable
from fedc2i.engine.records import Point
from fedc2i.engine.settings import EngineSettings
from fedc2i.engine.upload import process
from fedc2i.flower.messages import Answer, Task
from fedc2i.flower.site_memory import Memory


@dataclass(frozen=True)
class Assignment:
    """What all sites of a run do: the recipe and its settings."""

    recipe: RunContext
    settings: EngineSettings


def fingerprint(params: Params) -> str:
    """Twelve digits that are equal for models with the same names, shapes and types of tensors."""
    described = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(params.items())]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]


def expected_upload(assignment: Assignment, client: Client, classes: int) -> Params:
    """An upload with the names, shapes and types that the coordinator expects; its values have no meaning."""
    recipe = assignment.recipe
    own = LocalClient(recipe, ClientData.place(client, classes, torch.device("cpu")))
    first = recipe.first_model(client.name, assignment.settings.init)
    return own.upload(first, first, {}, -1, 1)


def perform(
    task: Task, received: Params, assignment: Assignment, data: ClientData, memory: Memory, secret: bytes = b""
) -> Answer:
    """Does a task, and keeps the trained model.

    Args:
        task: what to do.
        received: tensors from the last exchange.
        assignment: the run.
        data: of the site.
        memory: the site's models; a round starts from the latest one before it.
        secret: the site's key for noise; if empty, noise follows from the run's seed.
    """
    recipe, device = assignment.recipe, data.counts.device
    client = LocalClient(recipe, data)
    received = {name: tensor.to(device) for name, tensor in received.items()}
    own = memory.load(task.round) or recipe.first_model(data.name, assignment.settings.init)
    own = {name: tensor.to(device) for name, tensor in own.items()}
    report: Params = {}
    metrics: dict[Point, dict[str, float]] = {}
    with repeatable(assignment.settings.threads):
        start, upload = own, {}
        if task.exchange and (task.train or task.score_received):
            start, told = client.personalise(own, received, task.position, task.exchange)
            report = {name: tensor.detach() for name, tensor in told.items()}
            if task.score_received:
                metrics["received"] = client.evaluate(start, received, task.position, task.exchange)
        if task.train:
            own = client.train(start, received, task.position, task.round)
            upload = client.upload(own, start, received, task.position, task.round)
            run = task.round, recipe, assignment.settings
            as_sent = process(stack([upload]), stack([start]), [data.name], *run, lambda k: received, secret)
            upload = row(as_sent, 0)
            memory.save(task.round, own)
        if task.score_trained:
            metrics["trained"] = client.evaluate(own, received, task.position, task.round)
    if task.exchange and not task.train and not task.score_trained:  # the last exchange
        memory.finish({"received": start, "trained": own})
    told = {} if assignment.settings.noise else report  # noise does not protect what a client measured of others
    return Answer(upload, told, metrics)
