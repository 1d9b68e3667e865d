"""How a federation is run, whatever the method, and what is refused before it starts."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import Literal

from fedc2i.core.errors import UserError
from fedc2i.core.options import check_at_least, check_choice
from fedc2i.data.federation import Federation
from fedc2i.engine import attacks, clip_noise, topology
from fedc2i.engine.executors.stacked import compatibility
from fedc2i.methods.base import Method
from fedc2i.models import validation
from fedc2i.models.model import Model
from fedc2i.training.local import Training

MOST_THREADS = 1024  # torch crashes when asked for very many


@dataclass(frozen=True)
class Settings:
    """How a federation is run, whatever the method.

    Attributes:
        rounds: communication rounds, at least 1.
        clients_per_round: a number of clients, or a share such as ``"20%"``.
        evaluate_every: rounds between evaluations; the last round is always evaluated, with 0 no other is.
        patience: stop after this many evaluations without a better mean validation accuracy; 0 never stops early.
        init: one ``common`` initial model, or an ``independent`` one for each client.
        topology: whose models a client receives: ``full``, everyone's; ``ring``, those of its neighbours in the table;
            ``random:K``, those of K others, drawn once for a run; or a file (see `fedc2i.engine.topology`).
        attack: which clients are dishonest or broken, and how (see `fedc2i.engine.attacks`); empty: none.
        norm_bound: an upload whose norm is more than this many times the median norm of the round's uploads is left
            out; 0: no bound.
        clip: the largest L2 norm of what an upload may differ from what the server knows; 0: uploads are not clipped.
        noise: standard deviation of Gaussian noise on every number of an upload, in units of ``clip``; 0: none.
        executor: ``looped``, one client after the other; ``workers``, over processes of a CPU, with the same numbers;
            ``stacked``, all clients at once; or ``auto``: stacked on a GPU, on a CPU workers where that pays.
        workers: processes on a CPU; 0: one per core, divided by ``threads``.
        clients_at_once: the most clients, over all seeds, that a stacked executor computes together; 0: as many as fit.
        threads: CPU threads inside one operation. One is fastest for small models, above all beside other programs,
            and makes results independent of the number of cores.
        training: how every client trains.
    """

    rounds: int = 20
    clients_per_round: int | str = "100%"
    evaluate_every: int = 1
    patience: int = 0
    init: Literal["common", "independent"] = "common"
    topology: str = "full"
    attack: str = ""
    norm_bound: float = 100.0
    clip: float = 0.0
    noise: float = 0.0
    executor: Literal["auto", "looped", "workers", "stacked"] = "auto"
    workers: int = 0
    clients_at_once: int = 0
    threads: int = 1
    training: Training = field(default_factory=Training)

    def __post_init__(self) -> None:
        check_at_least(self, 1, "rounds", "threads")
        check_at_least(self, 0, "evaluate_every", "patience", "workers", "clients_at_once")
        if self.workers > MOST_THREADS:
            raise UserError(f"workers must be 0..{MOST_THREADS}, got {self.workers}")
        if self.patience and not self.evaluate_every:
            raise UserError(f"patience={self.patience} needs evaluations: evaluate_every must be at least 1")
        check_choice(self, "init", "executor")
        if not (self.norm_bound == 0 or 1 < self.norm_bound < math.inf):
            raise UserError(f"norm_bound must be above 1, or 0 for none, got {self.norm_bound}")
        check_at_least(self, 0, "clip", "noise")
        if self.noise and not self.clip:
            raise UserError(f"noise={self.noise:g} is in units of clip, which must be above 0 then, got clip=0")
        if self.threads > MOST_THREADS:
            raise UserError(f"threads must be 1..{MOST_THREADS}, got {self.threads}")

    def is_due(self, number: int) -> bool:
        """Whether clients are scored in a round."""
        return number == self.rounds or (self.evaluate_every > 0 and number % self.evaluate_every == 0)

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


def check(method: Method, model: Model, federation: Federation, settings: Settings) -> None:
    """Refuses at the start what would fail in the middle.

    Raises:
        UserError: for a model that does not fit the data or the method, options that need validation data where there
            is none, a share of clients that is none, a topology or attackers that do not fit the clients, or an
            executor that cannot run the model, batches of one sample that the model cannot be trained on, or what
            clipping and noise do not cover.
    """
    model.check(federation.clients[0].train.x[:2], len(federation.classes))
    _refuse_single_samples(model, federation, settings.training)
    method.setup(model.init(0, "check"), model)  # a method may refuse a model, e.g. FedBN one without BatchNorm
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


def _refuse_single_samples(model: Model, federation: Federation, training: Training) -> None:
    """Refuses batches of one sample where the model takes statistics over samples alone."""
    size, samples = training.batch_size, {client.name: len(client.train) for client in federation.clients}
    single = {
        name: count
        for name, count in samples.items()
        if count == 1 or size == 1 or (count % size == 1 and not (training.drop_last and count > size))
    }
    reason = validation.trouble_with_one(model, federation.image_shape) if single else None
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
