"""FedAvg, FedProx and Local by hand, and γ = 0, which is FedAvg bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedprox import FedProx
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Uploads
from fedc2i.models.model import Model, scale
from fedc2i.training.local import draw_epochs
from oracles import assert_same_model
from oracles.training import local_run
from support.simulation import assert_same_outcome, differs, run

TRAINING = TrainingSettings(batch_size=5, lr=0.01)
CPU = torch.device("cpu")
SIZES = (12, 20, 7, 9, 15)


@pytest.mark.parametrize(("clients", "kind"), [(2, {}), (3, {"bias": False}), (5, {"batch_norm": True})], ids=str)
def test_gamma_zero_is_fedavg(
    clients: int, kind: dict[str, bool], make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    model, federation = make_model(**kind), make_federation(sizes=SIZES[:clients])
    mean, _ = run(FedAvg(), model, federation)
    assert_same_outcome(run(FedC2I(gamma=0), model, federation)[0], mean)
    assert differs(run(FedC2I(gamma=5), model, federation)[0], mean)


# FedAvg.


def uploads_of(values: list[float], samples: list[int]) -> Uploads:
    tensors = {"w": torch.tensor(values)[:, None], "v": torch.tensor(values)[:, None, None] * 2}
    return Uploads(tensors, tuple(range(len(values))), torch.tensor(samples), torch.zeros(len(values)))


@pytest.mark.parametrize(("weighting", "want"), [("uniform", 5.0), ("samples", (1 * 1 + 2 * 4 + 5 * 10) / 8)])
def test_fedavg_s_mean_by_hand(weighting: Any, want: float) -> None:
    download, state = FedAvg(weighting=weighting).combine(uploads_of([1.0, 4.0, 10.0], [1, 2, 5]), {})
    assert download.shared["w"].item() == pytest.approx(want)
    assert download.shared["v"].item() == pytest.approx(2 * want)
    assert download.clients == (0, 1, 2)
    assert state == {}


def test_fedavg_gives_everyone_the_mean_of_what_was_trained(model: Model, federation: Federation) -> None:
    for weighting, weights in (("uniform", torch.full((3,), 1 / 3)), ("samples", torch.tensor([12, 20, 7]) / 39)):
        outcome, _ = run(FedAvg(weighting=weighting), model, federation)
        for name, trained in outcome.trained.items():
            mean = sum(weights[m] * trained[m] for m in range(3))
            for m in range(3):
                torch.testing.assert_close(outcome.received[name][m], mean)


# FedProx.


def test_fedprox_adds_mu_times_the_way_gone_to_the_gradient(model: Model, federation: Federation) -> None:
    """The gradient of μ/2·‖w − w0‖² is μ(w − w0); of the norm that some code uses instead, a unit vector."""
    data = ClientData.place(federation.clients[0], 4, CPU)
    start, params = model.init(0), model.init(1)
    site = Site(model, data.counts, torch.tensor(0), {}, start=start, training=True)

    def gradient(method: Method) -> Params:
        return grad(lambda own: method.loss(own, data.train, site))(params)

    plain, pulled = gradient(FedAvg()), gradient(FedProx(mu=0.7))
    for name in params:
        torch.testing.assert_close(pulled[name] - plain[name], 0.7 * (params[name] - start[name]), rtol=1e-4, atol=1e-6)


def test_fedprox_trains_as_a_hand_written_loop(model: Model, federation: Federation) -> None:
    training = TrainingSettings(batch_size=5, optimizer="sgd", lr=0.05)
    outcome, _ = run(FedProx(mu=2.0), model, federation, rounds=1, **vars(training))
    module = model._build()
    module.load_state_dict(model.init(0, "init"))
    train = federation.clients[0].train
    batches = [i for epoch in draw_epochs(len(train), training, seeding.generator(0, "a", 1, "batches")) for i in epoch]
    want = local_run(module, scale(train.x, torch.float32), train.y, batches, lambda p: torch.optim.SGD(p, 0.05), 2.0)
    assert_same_model(row(outcome.trained, 0), want, rtol=1e-4, atol=1e-6)


def test_fedprox_without_a_pull_is_fedavg(model: Model, federation: Federation) -> None:
    mean = run(FedAvg(), model, federation)[0]
    assert_same_outcome(run(FedProx(mu=0), model, federation)[0], mean, rtol=1e-5, atol=1e-6)
    assert differs(run(FedProx(mu=1.0), model, federation)[0], mean)


def test_fedprox_refuses_a_negative_pull() -> None:
    with pytest.raises(UserError, match="mu must be a finite number of at least 0"):
        FedProx(mu=-1)
    with pytest.raises(UserError, match=r"weighting must be uniform \| samples"):
        FedAvg(weighting="size")


# Local.


def test_local_is_plain_training_from_the_common_start(model: Model, federation: Federation) -> None:
    outcome, reports = run(Local(), model, federation, rounds=3)
    for m, client in enumerate(federation.clients):
        module = model._build()
        module.load_state_dict(model.init(0, "init"))
        x = scale(client.train.x, torch.float32)
        for number in (1, 2, 3):  # a fresh optimiser every round
            generator = seeding.generator(0, client.name, number, "batches")
            batches = [i for epoch in draw_epochs(len(client.train), TRAINING, generator) for i in epoch]
            local_run(module, x, client.train.y, batches, lambda p: torch.optim.Adam(p, 0.01))
        assert_same_model(row(outcome.trained, m), module.state_dict(), rtol=1e-3, atol=1e-5)
    assert_same_model(outcome.received, outcome.trained, rtol=0, atol=0)
    assert all(report.bytes_up == report.bytes_down == 0 for report in reports)
    assert all(report.influence == {} for report in reports)


def test_local_does_not_depend_on_who_else_is_there(model: Model, federation: Federation) -> None:
    together, _ = run(Local(), model, federation)
    alone, _ = run(Local(), model, federation.select(["b"]))
    assert_same_model(row(alone.trained, 0), row(together.trained, 1), rtol=0, atol=0)
