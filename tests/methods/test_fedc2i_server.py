"""FedC²I mixed on the server: its weights by the oracle, what travels, what a client could find out, every engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fedc2i
from fedc2i.core.params import Params, row, size_in_bytes, stack, unprefixed
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import LocalClient, RunContext
from fedc2i.methods import fedc2i_server
from fedc2i.methods.base import Probe, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_server import (
    NOT_MEASURED,
    FedC2IServer,
    body_statement,
    head_rows,
    row_statement,
    stated_losses,
)
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model, scale, split
from fedc2i.models.networks import build
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles import fedc2i_server as oracle
from oracles.fedc2i import mixed_body, mixed_head
from support.method_checks import SIZES, TRAINING, in_double, place, run


@pytest.fixture
def four(make_federation: Callable[..., Federation]) -> Federation:
    return make_federation(sizes=SIZES)


def means_of(models: list[Params]) -> Params:
    return {f"mean/{name}": rows.mean(0) for name, rows in stack(models).items()}


def uploads_of(
    method: FedC2IServer, model: Model, federation: Federation, models: list[Params], received: Params, start: Params
) -> Uploads:
    """What these clients send of these models, after they received this."""
    recipe, clients = RunContext(method, model, TRAINING, rounds=5, seed=0), range(len(models))
    sent = [
        LocalClient(recipe, place(federation, m)).upload(models[m], start, received, m if received else -1, 3)
        for m in clients
    ]
    return Uploads(stack(sent), tuple(clients), torch.ones(len(models)), torch.zeros(len(models)), 3)


def answer(method: FedC2IServer, model: Model, federation: Federation, models: list[Params]) -> Download:
    """What the server makes of these models, whose clients know their mean already."""
    received = means_of(models)
    return method.combine(uploads_of(method, model, federation, models, received, {}), {})[0]


# The weights.


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("round", ["first", "later"])
def test_weights_and_mixes_are_the_oracle_s(
    round: str, bias: bool, make_model: Callable[..., Model], four: Federation
) -> None:
    """In the first round the statement is about the start, later about the means received last."""
    model, method = in_double(make_model(bias=bias)), FedC2IServer(gamma=3.0, gamma_class=7.0)
    models, old = [model.init(0, m) for m in range(4)], model.init(0, "old")
    received = {} if round == "first" else {f"mean/{name}": tensor for name, tensor in old.items()}
    start = old if round == "first" else model.init(0, "start")
    download, _ = method.combine(uploads_of(method, model, four, models, received, start), {})
    vectors = []
    for m in range(4):
        data = place(four, m).train
        x = scale(data.x, torch.float64)
        args = (model._build, model.head_names, models, m, old, x, data.y)
        vector, matrix = oracle.weights(*args, 3.0)[0], oracle.weights(*args, 7.0)[1]
        got = download.to(m)
        assert_close(got["influence_vector"], vector, rtol=1e-8, atol=1e-10)
        assert_close(got["influence_matrix"], matrix, rtol=1e-8, atol=1e-10)
        want = {**mixed_body(models, model.head_names, vector), **mixed_head(models, model.head_names, matrix)}
        assert_same_model({name: got[name] for name in want}, want, rtol=1e-8, atol=1e-10)
        vectors.append(vector)
    assert max(float((vector - 0.25).abs().max()) for vector in vectors) > 0.01  # the case shows something
    assert_same_model(
        {name: download.shared[f"mean/{name}"] for name in old},
        {name: rows.mean(0) for name, rows in stack(models).items()},
        rtol=1e-9,
    )


def test_at_a_fresh_mean_the_vector_is_that_of_fedc2i_to_first_order(
    make_model: Callable[..., Model], four: Federation
) -> None:
    model = in_double(make_model(batch_norm=True))
    models = [
        {n: t + 0.1 * u if t.is_floating_point() else t for (n, t), u in zip(a.items(), b.values(), strict=True)}
        for a, b in ((model.init(0), model.init(0, m)) for m in range(4))
    ]
    floats = [{n: t for n, t in own.items() if t.is_floating_point()} for own in models]
    received = relay(stack(floats))
    means = {f"mean/{name}": rows.mean(0) for name, rows in stack(floats).items()}
    method = FedC2IServer()
    download, _ = method.combine(uploads_of(method, model, four, models, means, {}), {})
    for m in range(4):
        data = place(four, m)
        site = Site(model, data.counts, torch.tensor(m), received)
        start, report = FedC2I(influence="first-order").personalise(models[m], data.train, site)
        got = download.to(m)
        assert_close(got["influence_vector"], report["influence_vector"], rtol=1e-6, atol=1e-9)
        assert_close(got["influence_matrix"], report["influence_matrix"], rtol=1e-2, atol=1e-4)  # exact ones there
        for name in ("hidden.weight", "norm.weight", "norm.running_mean", "norm.running_var"):
            assert_close(got[name], start[name], rtol=1e-6, atol=1e-8)


def test_rows_sum_to_one_and_gamma_zero_is_fedavg(model: Model, four: Federation) -> None:
    _, reports = run(FedC2IServer(), model, four, rounds=3)
    for report in reports:
        np.testing.assert_allclose(report.influence["influence_vector"].sum(1), 1, rtol=1e-5)
        np.testing.assert_allclose(report.influence["influence_matrix"].sum(1), 1, rtol=1e-5)
        assert report.influence["influence_matrix"].shape == (4, 4, model.classes)
    model = in_double(model)
    plain, mean = (run(method, model, four, rounds=3)[0] for method in (FedC2IServer(gamma=0), FedAvg()))
    assert_same_model(plain.trained, mean.trained, rtol=1e-6, atol=1e-9)


def test_adaptive_gammas(model: Model, four: Federation) -> None:
    models = [model.init(0, m) for m in range(4)]

    def vector(**options: Any) -> torch.Tensor:
        return answer(FedC2IServer(**options), model, four, models).personal["influence_vector"]

    assert_close(vector(gamma="scaled(4)"), vector(gamma=3.0))  # 4·(4 − 1)/4
    assert_close(vector(gamma="ramp(8)"), vector(gamma=4.0))  # round 3 of 5: 8·2/4
    narrow = vector(gamma="perplexity(2)")
    assert_close((-(narrow * narrow.log()).sum(1)).exp(), torch.full((4,), 2.0), rtol=1e-3, atol=0)
    matrix = answer(FedC2IServer(gamma_class="perplexity(2)"), model, four, models).personal["influence_matrix"]
    assert_close((-(matrix * matrix.log()).sum(1)).exp(), torch.full((4, 4), 2.0), rtol=1e-3, atol=0)


# Statements.


def test_a_few_samples_at_a_time_make_no_difference(
    model: Model, four: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = in_double(model)
    models = [model.init(0, m) for m in range(4)]
    whole = answer(FedC2IServer(), model, four, models)
    monkeypatch.setattr(fedc2i_server, "AT_ONCE", 5)
    parts = answer(FedC2IServer(), model, four, models)
    assert_same_model(parts.personal, whole.personal, rtol=1e-9)


def test_row_statement_is_a_derivative(model: Model, four: Federation) -> None:
    """Against finite differences, and padding without weight."""
    model = in_double(model)
    own, mean, data = model.init(0), model.init(0, 1), place(four).train
    padded = Batch(*(torch.cat([part, part[:3]]) for part in data[:2]), torch.cat([data.w, torch.zeros(3)]))

    def state(mean: Params, data: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (lambda h: model.head(own, h), lambda h: model.head(mean, h))
        return row_statement(lambda x: model.features(own, x), *heads, True, data)

    losses, slopes = state(mean, data)
    for got, want in zip(state(mean, padded), (losses, slopes), strict=True):
        assert_close(got, want, rtol=1e-9, atol=1e-12)
    step = 1e-5
    for column, name in ((0, "head.weight"), (4, "head.weight"), (6, "head.bias")):
        moved = {key: tensor.clone() for key, tensor in mean.items()}
        (moved[name][:, column] if column < 6 else moved[name]).add_(step)
        assert_close((state(moved, data)[0] - losses) / step, slopes[:, column], rtol=1e-3, atol=1e-6)


def test_stated_losses_by_hand() -> None:
    """Three models of one number: 1, 2 and 6, mean 3. Client 0 says loss 2, slope 0.5; client 1 loss 1, slope -1."""
    models, slopes = torch.tensor([1.0, 2.0, 6.0]), torch.tensor([0.5, -1.0, 0.0])
    got = stated_losses(torch.tensor([2.0, 1.0, NOT_MEASURED]), models[:, None] * slopes, torch.ones(3).bool())
    falls = torch.tensor([-0.75 / 2, -1.0, -0.5]).exp()  # 0.5·(3 − 6)/2 of 2; −1·(3 − 1)/2 and −1·(3 − 2)/2 of 1
    want = torch.tensor([[2.5, falls[1]], [2.25, falls[2]], [2 * falls[0], 2.5]])
    assert_close(got[:, :2], want)
    assert got[:, 2].isnan().all()


def test_head_rows_put_the_bias_last() -> None:
    weight, bias = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([[7.0, 8, 9], [1, 2, 3]])
    assert head_rows({"a.bias": bias, "a.weight": weight})[0].tolist() == [[0, 1, 7], [2, 3, 8], [4, 5, 9]]
    assert head_rows({"a.weight": weight}).shape == (2, 3, 2)


def test_what_cannot_be_measured_is_said_so_and_the_own_model_stays(model: Model, four: Federation) -> None:
    models = [model.init(0, m) for m in range(4)]
    broken = {name: tensor * torch.inf for name, tensor in means_of(models).items()}
    method = FedC2IServer()
    uploads = uploads_of(method, model, four, models, broken, {})
    assert all(torch.isfinite(tensor).all() for tensor in uploads.tensors.values())
    assert (uploads.tensors["statement/loss"] == NOT_MEASURED).all()
    assert (uploads.tensors["statement/class_losses"] == NOT_MEASURED).any(1).all()
    uploads.tensors["statement/class_losses"].fill_(NOT_MEASURED)
    download, _ = method.combine(uploads, {})
    assert torch.equal(download.personal["influence_vector"], torch.eye(4))
    got = download.to(2)
    assert_same_model({name: got[name] for name in models[2]}, models[2], rtol=0, atol=0)


def test_a_body_that_is_not_trained() -> None:
    def frozen() -> nn.Module:
        net = nn.Sequential(nn.Flatten(), nn.Linear(12, 3), nn.Tanh(), nn.Linear(3, 2))
        net[1].requires_grad_(False)
        return net

    model = split(frozen, head="3")
    batch = Batch(torch.rand(4, 3, 2, 2), torch.tensor([0, 1, 1, 0]), torch.ones(4))
    site = Site(model, torch.tensor([2, 2]), torch.tensor(-1), {}, start=model.init(0, "start"))
    sent = [FedC2IServer().upload(model.init(0, m), batch, site) for m in range(3)]
    assert sent[0]["statement/gradient"].shape == (0,)
    assert {name for name in sent[0] if name.startswith("buffer/")} == {"buffer/1.weight", "buffer/1.bias"}
    download, _ = FedC2IServer().combine(Uploads(stack(sent), (0, 1, 2), torch.ones(3), torch.zeros(3), 1), {})
    assert_close(download.personal["influence_vector"], torch.full((3, 3), 1 / 3))
    loss, _ = body_statement(site.logits, model.init(0), (), batch)
    assert_close(
        loss, nn.functional.cross_entropy(model.head(model.init(0), site.features(model.init(0), batch.x)), batch.y)
    )


# What travels, and what it tells.


@pytest.mark.parametrize("tell", [True, False])
def test_what_a_client_receives(tell: bool, model: Model, four: Federation) -> None:
    """One mixed model, one mean, its own weights: nothing has an axis for peers' models."""
    download = answer(FedC2IServer(tell_weights=tell), model, four, [model.init(0, m) for m in range(4)])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.init(0).items()}
    weights = {"influence_vector": (4,), "influence_matrix": (4, 4)} if tell else {}
    for client in (0, 3, 9):
        got = {name: tuple(tensor.shape) for name, tensor in download.to(client).items()}
        assert got == shapes | {f"mean/{name}": shape for name, shape in shapes.items()} | weights


@pytest.mark.parametrize("clients", [3, 4, 6])
def test_from_four_clients_on_other_peers_could_have_sent_the_same(
    clients: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    """Client 0 knows two sums of its M − 1 peers' bodies: the mean's and, with its weights, the mix's."""
    model, federation = in_double(model), make_federation(sizes=(9,) * clients)
    models = [model.init(0, m) for m in range(clients)]
    download = answer(FedC2IServer(), model, federation, models)
    vector = download.personal["influence_vector"][0]
    sums = torch.stack([torch.ones_like(vector), vector])[:, 1:]  # (2, M − 1)
    unknown = torch.linalg.svd(sums)[2][2:]  # changes of the peers that neither sum shows
    assert len(unknown) == max(0, clients - 3)
    if len(unknown):
        moved = torch.cat([torch.zeros(1).double(), 100 * unknown[0]])
        bodies = torch.stack([own["hidden.weight"] for own in models])
        others = bodies + moved[:, None, None]
        got = download.to(0)
        assert_close(others.mean(0), got["mean/hidden.weight"])
        assert_close(torch.einsum("i,i...->...", vector, others), got["hidden.weight"])
        assert (others - bodies)[1:].abs().amax() > 1


def test_bytes_by_hand(model: Model, four: Federation) -> None:
    _, reports = run(FedC2IServer(), model, four, rounds=2)
    size, classes = size_in_bytes(model.init(0)), model.classes
    body = size - 4 * 7 * classes  # 6 features and a bias
    assert {report.bytes_up for report in reports} == {size + body + 4 + 4 * classes + 4 * 7 * classes}
    assert {report.bytes_down for report in reports} == {2 * size + 4 * 4 + 4 * 4 * classes}


# Runs.


@pytest.mark.parametrize("settings", [{"clients_per_round": 2}, {"topology": "ring"}], ids=str)
def test_every_engine_agrees(settings: Any, model: Model, make_federation: Callable[..., Federation]) -> None:
    federation, method = make_federation(sizes=(*SIZES, 8)), FedC2IServer(gamma="ramp(9)")
    model = in_double(model)
    looped, reports = run(method, model, federation, rounds=3, **settings)
    for how, rtol, atol in (("stacked", 1e-5, 1e-9), ("workers", 0, 0)):
        other, others = run(method, model, federation, rounds=3, executor=how, **settings)
        assert_same_model(other.trained, looped.trained, rtol=rtol, atol=atol)
        assert_same_model(other.received, looped.received, rtol=rtol, atol=atol)
        for one, two in zip(reports, others, strict=True):
            for name, values in one.influence.items():
                np.testing.assert_allclose(two.influence[name], values, rtol=1e-4, atol=1e-7)


def test_a_newcomer_starts_from_the_mean_of_all_mixes(model: Model, four: Federation) -> None:
    models = [model.init(0, m) for m in range(4)]
    download, own = answer(FedC2IServer(), model, four, models), model.init(0, 9)
    site = Site(model, torch.ones(4), torch.tensor(-1), download.to(9))
    start, report = FedC2IServer().personalise(own, None, site)
    assert_same_model(start, {name: download.personal[name].mean(0) for name in own}, rtol=1e-5, atol=1e-6)
    assert report["influence_vector"].isnan().all()
    assert FedC2IServer().personalise(own, None, Site(model, torch.ones(4), torch.tensor(-1), {})) == (own, {})


def test_a_client_that_sits_out_keeps_its_statement(model: Model, four: Federation) -> None:
    _, reports = run(FedC2IServer(), model, four, rounds=4, clients_per_round=2)
    vector = reports[-1].influence["influence_vector"]
    met = {name for report in reports for name in report.participants}
    known = [m for m, name in enumerate(four.names) if name in met]
    np.testing.assert_allclose(vector[np.ix_(known, known)].sum(1), 1, rtol=1e-5)


def test_without_weights_nothing_is_reported_and_nothing_else_changes(model: Model, four: Federation) -> None:
    told, _ = run(FedC2IServer(), model, four)
    secret, reports = run(FedC2IServer(tell_weights=False), model, four)
    assert_same_model(secret.trained, told.trained, rtol=0, atol=0)
    assert all(not report.influence for report in reports)


def test_alone_it_is_local_training(model: Model, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation(sizes=(12,))
    alone, local = (run(method, model, federation)[0].trained for method in (FedC2IServer(), Local()))
    assert_same_model(alone, local, rtol=1e-6, atol=1e-7)
    assert row(alone, 0).keys() == model.init(0).keys()


@dataclass(frozen=True)
class Both(FedC2IServer):
    """Sends the models as well, for the exact λ of the same exchange on all training data."""

    @property
    def probe(self) -> Probe:
        return Probe("all")

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        download, state = super().combine(uploads, state)
        models = {key.removeprefix("head/"): rows for key, rows in uploads.tensors.items() if "statement" not in key}
        peers = {f"peers/{key}": rows for key, rows in relay(models).items()}
        return replace(download, shared={**download.shared, **peers}), state

    def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, dict[str, torch.Tensor]]:
        start, told = super().personalise(own, batch, site)
        _, exact = FedC2I().personalise(own, batch, replace(site, received=unprefixed("peers/", site.received)))
        return start, {**told, **{f"exact_{key}": value for key, value in exact.items()}}


def test_it_learns_by_weights_that_are_nearly_the_exact_ones() -> None:
    data = fedc2i.load("digits:scans,photos,ink")
    model = build("lenet5", len(data.classes), data.input)
    _, reports = run(Both(), model, data, rounds=3, evaluate_every=3, **vars(TrainingSettings()))
    assert reports[-1].mean("trained") > 40
    for report in reports[1:]:
        for name in ("influence_vector", "influence_matrix"):
            one, two = (report.influence[key].ravel() for key in (name, f"exact_{name}"))
            assert np.corrcoef(one, two)[0, 1] > 0.9
