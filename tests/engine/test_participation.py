"""Rounds in which only some clients take part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Download, Uploads
from fedc2i.models.model import Model
from oracles import assert_same_model
from support.simulation import run

TRAINING = TrainingSettings(batch_size=5, lr=0.01)
CPU = torch.device("cpu")
SIZES = (12, 20, 7, 9, 15)


@dataclass(frozen=True)
class Watched(FedC2I):
    """FedC²I that remembers what `combine` was given."""

    seen: list[Uploads] = field(default_factory=list)

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        self.seen.append(uploads)
        return super().combine(uploads, state)


@dataclass(frozen=True)
class WatchedMean(FedAvg):
    seen: list[Uploads] = field(default_factory=list)

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        self.seen.append(uploads)
        return super().combine(uploads, state)


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("shares", [False, True], ids=["local", "fedavg"])
def test_partial_rounds_replayed_by_hand(
    shares: bool, executor: str, model: Model, make_federation: Callable[..., Federation]
) -> None:
    """Only those who take part train, each from its own model (Local) or from the last mean (FedAvg)."""
    federation, method = make_federation(sizes=SIZES), FedAvg() if shares else Local()
    settings = {"clients_per_round": 2, "init": "independent", "executor": executor}
    outcome, reports = run(method, model, federation, rounds=4, seed=1, **settings)
    recipe = RunContext(method, model, TRAINING, rounds=4, seed=1)
    clients = [LocalClient(recipe, ClientData.place(client, 4, CPU)) for client in federation.clients]
    own = [model.init(1, name, "init") for name in federation.names]
    mean: Params = {}
    for report in reports:
        chosen = [federation.names.index(name) for name in report.participants]
        for m in chosen:
            own[m] = clients[m].train(mean if shares and mean else own[m], {}, -1, report.round)
        mean = {name: sum(own[m][name] for m in chosen) / 2 for name in own[0]}
    assert reports[0].participants != ("a", "b")  # else a mix-up of numbers would not show
    assert_same_model(outcome.trained, stack(own), rtol=1e-3, atol=1e-5)
    assert_same_model(outcome.received, stack([mean] * 5) if shares else stack(own), rtol=1e-3, atol=1e-5)


def test_the_server_keeps_the_latest_upload_of_everyone_and_its_age(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, method = make_federation(sizes=SIZES), Watched()
    _, reports = run(method, model, federation, rounds=6, clients_per_round=2)
    last_sent: dict[int, int] = {}
    latest: dict[int, Tensor] = {}
    for report, uploads in zip(reports, method.seen, strict=True):
        assert len(report.participants) == 2
        for name in report.participants:
            last_sent[federation.names.index(name)] = report.round
        assert uploads.clients == tuple(sorted(last_sent))
        assert uploads.ages.tolist() == [report.round - last_sent[m] for m in uploads.clients]
        assert uploads.samples.tolist() == [SIZES[m] for m in uploads.clients]
        for place, m in enumerate(uploads.clients):
            now = uploads.tensors["head.weight"][place]
            assert (m not in latest or not torch.equal(now, latest[m])) == (last_sent[m] == report.round)
            latest[m] = now
    assert max(method.seen[-1].ages.tolist()) > 0
    assert len({report.participants for report in reports}) > 2  # drawn anew every round


def test_a_mean_is_of_this_round_s_uploads_only(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation, method = make_federation(sizes=SIZES), WatchedMean()
    _, reports = run(method, model, federation, rounds=4, clients_per_round=2)
    for report, uploads in zip(reports, method.seen, strict=True):
        assert tuple(federation.names[m] for m in uploads.clients) == report.participants
        assert uploads.ages.tolist() == [0, 0]


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_newcomers_start_from_the_mean_and_idle_clients_keep_their_model(
    executor: str, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation, method = make_federation(sizes=SIZES), Watched()
    outcome, reports = run(method, model, federation, rounds=1, clients_per_round=2, executor=executor)
    known = [federation.names.index(name) for name in reports[0].participants]
    for m in range(5):
        if m in known:
            assert not torch.equal(outcome.trained["head.weight"][m], model.init(0, "init")["head.weight"])
        else:
            assert_same_model(row(outcome.trained, m), model.init(0, "init"), rtol=0, atol=0)
            mean = {name: tensor[known].mean(0) for name, tensor in outcome.trained.items()}
            assert_same_model(row(outcome.received, m), mean, rtol=1e-5, atol=1e-7)


def test_influence_of_partial_rounds_is_nan_where_nothing_was_measured(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(sizes=SIZES)
    _, reports = run(FedC2I(), model, federation, rounds=4, clients_per_round=2, evaluate_every=4)
    sent: set[int] = set()
    for report, following in zip(reports, [*reports[1:], None], strict=True):
        sent |= {federation.names.index(name) for name in report.participants}
        names = federation.names if following is None else following.participants  # everyone when it is evaluated
        measured = np.zeros((5, 5), dtype=bool)
        measured[np.ix_([federation.names.index(name) for name in names], sorted(sent))] = True
        for kind, shape in (("influence_vector", (5, 5)), ("influence_matrix", (5, 5, 4)), ("left_out", (5, 5))):
            values = report.influence[kind]
            assert values.shape == shape
            assert (np.isnan(values).reshape(5, 5, -1).any(2) == ~measured).all()
            assert (np.isnan(values).reshape(5, 5, -1).all(2) == ~measured).all()


@pytest.mark.parametrize(
    ("wanted", "clients", "want"),
    [
        *[("100%", 7, 7), ("20%", 10, 2), ("20%", 5, 1), ("1%", 5, 1), ("50%", 6, 3), ("33.4%", 3, 1), ("99%", 5, 5)],
        *[(1, 5, 1), (5, 5, 5), ("3", 5, 3)],
    ],
)
def test_clients_per_round(wanted: Any, clients: int, want: int) -> None:
    assert EngineSettings(clients_per_round=wanted).participants(clients) == want


@pytest.mark.parametrize("wanted", [0, -1, 6, "0%", "101%", "-5%", "half", "", "%", "2.5", "nan%", "inf%"])
def test_clients_per_round_refusals(wanted: Any) -> None:
    with pytest.raises(UserError, match=r"clients_per_round must be 1\.\.5 or a share such as 20%, got"):
        EngineSettings(clients_per_round=wanted).participants(5)
