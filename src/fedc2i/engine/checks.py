"""What is rejected before a run starts."""

from __future__ import annotations

import os

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.engine import attacks, clip_noise, topology
from fedc2i.engine.executors.stacked import compatibility
from fedc2i.engine.settings import EngineSettings
from fedc2i.methods.base import Method
from fedc2i.models import validation
from fedc2i.models.model import Model
from fedc2i.training.settings import TrainingSettings


def check(method: Method, model: Model, federation: Federation, settings: EngineSettings) -> None:
    """Rejects at the start what would fail in the middle.

    Raises:
        UserError: for a model that does not fit the data or the method, options that need validation data where there
            is none, an invalid share of clients, a topology or attackers that do not fit the clients, or an
            executor that cannot run the model, batches of one sample that the model cannot be trained on, or what
            clipping and noise do not cover.
    """
    validation.validate(model, federation.clients[0].train.x[:2], len(federation.classes))
    _reject_single_samples(model, federation, settings)
    method.setup(model.init(0, "check"), model)  # a method may reject a model, e.g. FedBN one without BatchNorm
    settings.participants(len(federation.clients))
    topology.parse(settings.topology, federation.names, seed=0)
    attacks.parse(settings.attack, federation.names, seed=0)
    if settings.executor == "workers" and os.name != "posix":
        raise UserError("executor=workers needs Linux or macOS; use executor=looped")
    if settings.executor == "stacked" and (reason := compatibility.obstacle(model, federation.image_shape)) is not None:
        raise UserError(f"executor=stacked: model '{model.name}' {reason}; use executor=looped")
    if method.probe is not None and method.probe.split == "validation":
        for client in federation.clients:
            if not len(client.validation):
                raise UserError(f"influence_split=validation: client '{client.name}' has no validation data")
    clip_noise.check(method, model, federation, settings)
    if settings.patience and not any(len(client.validation) for client in federation.clients):
        raise UserError(f"patience={settings.patience}: no client of '{federation.name}' has validation data")


def _reject_single_samples(model: Model, federation: Federation, training: TrainingSettings) -> None:
    """Rejects batches of one sample where the model takes statistics over samples alone."""
    size, samples = training.batch_size, {client.name: len(client.train) for client in federation.clients}
    single = {
        name: count
        for name, count in samples.items()
        if count == 1 or size == 1 or (count % size == 1 and not (training.drop_last and count > size))
    }
    reason = validation.why_not_one_sample(model, federation.image_shape) if single else None
    if reason is None:
        return
    name, count = next(((own, n) for own, n in single.items() if n == 1), next(iter(single.items())))
    what = "another batch_size" if training.drop_last or size == 1 else "drop_last=true or another batch_size"
    hint = "give it more or leave it out" if count == 1 else f"set {what}"
    single_one = "are batches of one" if size == 1 < count else "leaves a batch of one"
    raise UserError(
        f"client '{name}' has {count} training sample{'s' * (count > 1)}, which {single_one}, and model "
        f"'{model.name}' cannot be trained on that; {hint} ({reason})"
    )
