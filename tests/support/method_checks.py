"""Small runs of a method, and what one client does in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedc2i.core.params import Params, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.messages import relay
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from oracles.fedc2i import Problem

CPU = torch.device("cpu")
TRAINING = TrainingSettings(batch_size=5, lr=0.01)
SIZES = (12, 20, 7, 9)
# Other defaults, or less, of methods that are tested themselves.
PRESETS = ("fedc2i.methods.fedc2i_ablation",)
OF_THEIR_OWN = sorted(name for name, kind in Method.registry.items() if kind.__module__ not in PRESETS)
# One of each kind for an engine: a mean, phases, a private model, prototypes, relayed models, reports, personal
# downloads, held-out samples.
KINDS = ("fedavg", "fedrep", "ditto", "fedproto", "fedc2i", "fedc2i-top-k", "fedc2i-server", "fedc2i-plus")
# And one for each way of what a server sends: a mean, prototypes, relayed models, personal downloads.
SENDS = ("fedavg", "fedproto", "fedc2i", "fedc2i-server")


def each_kind(names: Sequence[str], kinds: Sequence[str] = KINDS) -> list[Any]:
    """Parameters of a test that is about an engine more than about a method: the slow tests have the other methods."""
    return [pytest.param(name, marks=() if name in kinds else pytest.mark.slow) for name in names]


def run(
    method: Method, model: Model, federation: Federation, rounds: int = 2, **settings: Any
) -> tuple[Outcome, list[Round]]:
    """A small run, with the report of every round."""
    reports: list[Round] = []
    settings = {**vars(TRAINING), "executor": "looped", **settings}
    outcomes = simulate(
        method, model, federation, EngineSettings(rounds=rounds, **settings), [0], on_round=reports.append
    )
    return outcomes[0], reports


def place(federation: Federation, client: int = 0) -> ClientData:
    return ClientData.place(federation.clients[client], len(federation.classes), CPU)


def make_site(model: Model, data: ClientData, received: Params | None = None, **more: Any) -> Site:
    return Site(model, data.counts, torch.tensor(0), received or {}, **more)


def local_client(
    method: Method, model: Model, federation: Federation, training: TrainingSettings = TRAINING
) -> LocalClient:
    """The first client of a federation."""
    return LocalClient(RunContext(method, model, training, rounds=3, seed=0), place(federation))


def probe_of(client: LocalClient, round: int = 1) -> Batch:
    """The samples that `Method.personalise` sees at a client."""
    drawn = client.context.draw_probe(client.data, round)
    assert drawn is not None
    return getattr(client.data, drawn[0]).take(drawn[1])


def upload(method: Method, model: Model, federation: Federation) -> Params:
    """What the first client sends of its initial model."""
    start = method.setup(model.init(0), model)
    return local_client(method, model, federation).upload(start, start, {}, -1, 1)


def in_double(model: Model) -> Model:
    """The same model with numbers of double precision."""
    return split(lambda: model._build().double(), head=model.head_names[0].rpartition(".")[0], name=model.name)


def personalise(
    problem: Problem,
    method: Method | None = None,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
    position: int | None = None,
    own: Params | None = None,
    **more: Any,
) -> tuple[Params, dict[str, Tensor]]:
    """What FedC²I makes of an oracle's problem; padding samples are noise without weight, ``more`` is of the site."""
    noise = torch.randn(padding, *problem.x.shape[1:], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    x = torch.cat([problem.x, 100 * noise]).to(dtype)
    y = torch.cat([problem.y, torch.zeros(padding, dtype=torch.int64)])
    w = torch.cat([torch.ones(len(problem.y)), torch.zeros(padding)]).to(dtype)
    received = relay({name: tensor.to(dtype) for name, tensor in stack(problem.models).items()})
    own = {name: tensor.to(dtype) for name, tensor in (own or problem.own).items()}
    model = split(problem.build, head="2")
    counts = torch.bincount(problem.y, minlength=model.classes)
    where = torch.tensor(problem.position if position is None else position)
    site = Site(model, counts, where, received, **more)
    start, report = (method or FedC2I()).personalise(own, Batch(x, y, w), site)
    return start, dict(report)
