"""Ditto: the global model is FedAvg's, the private one feels CE and the pull, and only the global one leaves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.func import grad
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Stacked, select
from fedc2i.data.federation import Federation
from fedc2i.methods.ditto import Ditto
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.local import Local
from fedc2i.models.model import Model
from oracles import assert_same_model
from support.method_checks import TRAINING, make_site, place, run


def private(stacked: Stacked) -> Stacked:
    return {name.removeprefix("private."): t for name, t in stacked.items() if name.startswith("private.")}


def test_the_private_model_starts_as_a_copy(model: Model) -> None:
    start = model.init(0)
    assert_same_model(private(Ditto().setup(start, model)), start, rtol=0, atol=0)


def test_gradients_by_hand(model: Model, federation: Federation) -> None:
    """w: that of CE; v: that of CE, plus μ(v − w_received)."""
    data, mu, w, v, received = place(federation), 0.7, model.init(0), model.init(1), model.init(2)
    site = make_site(model, data, start={**received, **{f"private.{n}": t for n, t in model.init(3).items()}})
    params = {**w, **{f"private.{name}": tensor for name, tensor in v.items()}}
    got = grad(lambda own: Ditto(mu=mu).loss(own, data.train, site))(params)
    entropy = grad(lambda own: F.cross_entropy(site.logits(own, data.train.x), data.train.y))
    of_w, of_v = entropy(w), entropy(v)
    for name in w:
        torch.testing.assert_close(got[name], of_w[name], rtol=1e-4, atol=1e-6)
        pull = mu * (v[name] - received[name])
        torch.testing.assert_close(got[f"private.{name}"], of_v[name] + pull, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_the_global_model_is_fedavg_s(
    batch_norm: bool, make_model: Callable[..., Model], federation: Federation
) -> None:
    model = make_model(batch_norm=batch_norm)
    ours, _ = run(Ditto(), model, federation)
    mean, _ = run(FedAvg(), model, federation)
    assert_same_model(select(ours.trained, mean.trained), mean.trained, rtol=1e-6, atol=1e-7)
    assert_same_model(select(ours.received, mean.received), mean.received, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_without_pull_the_private_model_is_local_training(
    batch_norm: bool, make_model: Callable[..., Model], federation: Federation
) -> None:
    """With BatchNorm this says too that the private statistics are kept apart from the global ones."""
    model = make_model(batch_norm=batch_norm)
    ours, reports = run(Ditto(mu=0.0), model, federation)
    alone, alone_reports = run(Local(), model, federation)
    assert_same_model(private(ours.trained), alone.trained, rtol=1e-6, atol=1e-7)
    for one, two in zip(reports[-1].metrics["trained"], alone_reports[-1].metrics["trained"], strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-5)


def test_a_strong_pull_holds_the_private_model_near(model: Model, federation: Federation) -> None:
    def distance(mu: float) -> float:
        outcome, _ = run(Ditto(mu=mu), model, federation)
        return sum(float((t - outcome.received[n]).norm()) for n, t in private(outcome.trained).items())

    assert distance(100.0) < distance(1.0) < distance(0.0)


def test_the_private_model_survives_an_exchange_and_predicts(model: Model, federation: Federation) -> None:
    outcome, reports = run(Ditto(), model, federation)
    assert_same_model(private(outcome.received), private(outcome.trained), rtol=0, atol=0)
    last = reports[-1].metrics
    for trained, received in zip(last["trained"], last["received"], strict=True):
        assert trained["loss"] == received["loss"]
        assert trained["loss/global"] != received["loss/global"]


def test_an_absent_client_keeps_its_private_model(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12, 20, 7, 9))
    outcome, reports = run(Ditto(), model, federation, rounds=1, clients_per_round=2, **vars(TRAINING))
    absent = [m for m, name in enumerate(federation.names) if name not in reports[0].participants]
    for m in absent:
        mine = {name: tensor[m] for name, tensor in private(outcome.received).items()}
        assert_same_model(mine, model.init(0, "init"), rtol=0, atol=0)
