"""FedFomo: its weights by hand and by the oracle, newcomers and broken models."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedc2i.core.params import Params, prefixed, select, stack
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Probe, Site
from fedc2i.methods.fedfomo import FedFomo, first_order_gains
from fedc2i.methods.messages import VALID, Uploads, relay
from fedc2i.models.model import Model, scale
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles import fedfomo as oracle
from support.method_checks import local_client, place, probe_of, run, upload


def module(model: Model, params: Params) -> nn.Module:
    net = model._build()
    net.load_state_dict(params)
    return net


def batch_of(federation: Federation, client: int = 1) -> Batch:
    return place(federation, client).train


def personalise(
    model: Model, models: list[Params], own: Params, batch: Batch, position: int = 0
) -> tuple[Params, dict[str, Tensor]]:
    """From the model that the last run started from, ``own`` if it is not said."""
    site = Site(model, torch.ones(4), torch.tensor(position), relay(stack(models)))
    own = own if "before.head.bias" in own else {**own, **prefixed("before.", own)}
    start, report = FedFomo().personalise(own, batch, site)
    return start, dict(report)


@pytest.fixture
def models(model: Model) -> list[Params]:
    return [model.init(0, n) for n in range(5)]


def test_gains_by_hand() -> None:
    """1 better over distance 2; a worse one; a copy; a better one far off; one whose loss is not a number."""
    losses, distances = torch.tensor([1.0, 3.0, 2.0, 1.5, torch.nan]), torch.tensor([2.0, 1.0, 0.0, 10.0, 1.0])
    torch.testing.assert_close(
        first_order_gains(torch.tensor(2.0), losses, distances), torch.tensor([0.5, 0.0, 0.0, 0.05, 0.0])
    )


@pytest.mark.parametrize("position", range(5))
def test_weights_and_step_are_the_oracle_s(
    position: int, model: Model, models: list[Params], federation: Federation
) -> None:
    batch = batch_of(federation)
    nets, x = [module(model, one) for one in models], scale(batch.x, torch.float32)
    want = oracle.weights(nets[position], nets, x, batch.y)
    start, report = personalise(model, models, models[position], batch, position)
    moved = oracle.step(nets[position], nets, want)
    assert_same_model(select(start, models[0]), dict(moved.named_parameters()), rtol=1e-4, atol=1e-6)
    own = np.eye(5)[position] * (1 - sum(want))  # what is left of 1 is the client's own
    np.testing.assert_allclose(report["influence_vector"], want + own, rtol=1e-3, atol=1e-5)


def test_the_best_model_is_kept_bit_for_bit(model: Model, models: list[Params], federation: Federation) -> None:
    batch = batch_of(federation)
    losses = [oracle.loss_of(module(model, one), scale(batch.x, torch.float32), batch.y) for one in models]
    best = int(np.argmin(losses))
    start, report = personalise(model, models, models[best], batch, best)
    assert_same_model(select(start, models[best]), models[best], 0, 0)
    assert report["influence_vector"].tolist() == np.eye(5)[best].tolist()


def test_baseline_start_counts_the_trained_model_among_the_candidates(
    model: Model, models: list[Params], federation: Federation
) -> None:
    batch, before = batch_of(federation), model.init(0, 9)
    own = {**models[0], **{f"before.{name}": tensor for name, tensor in before.items()}}
    nets, base = [module(model, one) for one in models], module(model, before)
    want = oracle.weights(base, nets, scale(batch.x, torch.float32), batch.y)
    assert want[0] > 0  # the case shows it
    start, report = personalise(model, models, own, batch)
    np.testing.assert_allclose(report["influence_vector"], want, rtol=1e-3, atol=1e-5)
    moved = dict(oracle.step(base, nets, want).named_parameters())
    assert_same_model(select(start, moved), moved, rtol=1e-4, atol=1e-6)
    for name in moved:  # the next run's baseline
        assert torch.equal(start[f"before.{name}"], start[name])


def test_baseline_start_goes_back_where_nothing_does_better(
    model: Model, models: list[Params], federation: Federation
) -> None:
    batch = batch_of(federation)
    losses = [oracle.loss_of(module(model, one), scale(batch.x, torch.float32), batch.y) for one in models]
    order = np.argsort(losses)
    before, others = models[order[0]], [models[n] for n in order[1:]]
    own = {**others[0], **{f"before.{name}": tensor for name, tensor in before.items()}}
    start, _ = personalise(model, others, own, batch)
    assert_same_model(select(start, before), before, 0, 0)


def test_the_baseline_is_private_and_not_trained(model: Model, federation: Federation) -> None:
    method = FedFomo()
    start = method.setup(model.init(0), model)
    trained = local_client(method, model, federation).train(start, {}, -1, 1)
    for name in model.init(0):
        assert torch.equal(trained[f"before.{name}"], start[name])
        assert not torch.equal(trained[name], start[name])
    assert upload(method, model, federation).keys() == set(model.init(0))


def test_a_newcomer_starts_from_the_mean_and_broken_peers_are_left_out(
    model: Model, models: list[Params], federation: Federation
) -> None:
    method = FedFomo()
    own, batch = method.setup(model.init(0, 9), model), batch_of(federation)
    broken = [
        {name: tensor * (torch.nan if n == 1 else 1) for name, tensor in one.items()} for n, one in enumerate(models)
    ]
    start, report = personalise(model, broken, own, batch, -1)
    sound = stack([models[n] for n in (0, 2, 3, 4)])
    assert_same_model(select(start, sound), {name: rows.mean(0) for name, rows in sound.items()}, 1e-5, 1e-6)
    assert report["left_out"].tolist() == [False, True, False, False, False]
    start, report = personalise(model, broken, method.setup(broken[0], model), batch, 0)
    assert all(torch.isfinite(tensor).all() for tensor in start.values())
    assert report["influence_vector"][1] == 0


def test_a_client_whose_own_model_broke_starts_again(
    model: Model, models: list[Params], federation: Federation
) -> None:
    own = {name: tensor * torch.nan for name, tensor in models[0].items()}
    start, _ = personalise(model, models, own, batch_of(federation))
    mean = {name: rows.mean(0) for name, rows in stack(models).items()}
    assert_same_model(select(start, mean), mean, 1e-5, 1e-6)


def test_where_nothing_is_sound_its_own_model_stays(model: Model, models: list[Params], federation: Federation) -> None:
    broken = [{name: tensor * torch.nan for name, tensor in one.items()} for one in models]
    start, _ = personalise(model, broken, models[0], batch_of(federation))
    assert_same_model(select(start, models[0]), models[0], 0, 0)
    nothing = Site(model, torch.ones(4), torch.tensor(-1), {})
    assert FedFomo().personalise(models[0], batch_of(federation), nothing) == (models[0], {})


def test_models_are_compared_on_held_out_data(make_federation: Callable[..., Federation], model: Model) -> None:
    assert FedFomo(influence_samples=7).probe == Probe(7, "held-out")
    client = local_client(FedFomo(), model, make_federation(validation=3))
    assert torch.equal(probe_of(client).y.sort()[0], client.data.validation.y.sort()[0])
    client = local_client(FedFomo(), model, make_federation())
    assert len(probe_of(client).y) == client.data.samples


def test_the_server_relays_every_model() -> None:
    tensors = {"a": torch.arange(6.0).reshape(3, 2)}
    uploads = Uploads(tensors, (0, 2, 4), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 0]))
    download, _ = FedFomo().combine(uploads, {})
    assert download.shared["a"] is tensors["a"]
    assert download.shared[VALID].all()
    assert FedFomo.keeps_uploads


def test_rows_of_a_run_sum_to_one(model: Model, federation: Federation) -> None:
    _, reports = run(FedFomo(), model, federation, rounds=3)
    vectors = np.stack([report.influence["influence_vector"] for report in reports])
    np.testing.assert_allclose(vectors.sum(-1), 1, rtol=1e-5)
    assert (vectors >= 0).all()
