"""The round loop on one machine: seeds, order, executors, evaluation, early stopping, reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row, rows, size_in_bytes, stack
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, RunContext
from fedc2i.engine.exchange import Server
from fedc2i.engine.executors.base import ClientBatch, LoopedExecutor
from fedc2i.engine.executors.stacked.executor import StackedExecutor
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.local import Local
from fedc2i.methods.messages import Download, Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from oracles import assert_same_model
from support.method_checks import KINDS, OF_THEIR_OWN, SENDS, each_kind, in_double
from support.simulation import assert_same_outcome, assert_same_run, differs, run, simulated

TRAINING = TrainingSettings(batch_size=5, lr=0.01)
SMOOTH = TrainingSettings(
    batch_size=5, optimizer="sgd", lr=0.05, momentum=0.5
)  # Adam blows rounding up where gradients are 0
CPU = torch.device("cpu")
EXECUTORS = ("looped", "stacked")
SIZES = (12, 20, 7, 9, 15)
EVERY_METHOD = OF_THEIR_OWN
IN_CLIENT_ORDER = {"fedcalm", "pooled"}  # resolves conflicts in the order of the table; batches of a joined table


@pytest.fixture
def normed(make_model: Callable[..., Model]) -> Model:
    """A model that every method can run, also one about normalisation layers, on either executor."""
    return make_model(layer_norm=True)


# Seeds, order, executors.


@pytest.mark.parametrize("name", each_kind(EVERY_METHOD, SENDS))
@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_one_seed_one_result(name: str, executor: str, normed: Model, federation: Federation) -> None:
    method = Method.registry[name]()
    runs = []
    for _ in range(2):
        runs.append(simulated(method, normed, federation, (0, 1), executor=executor, epochs=1))
        torch.rand(5)
    assert_same_run(*runs)
    assert differs(runs[0][0][1], runs[0][0][0])


@pytest.mark.parametrize("sizes", [(10, 10), (12, 20, 7)])
def test_padding_does_not_enter_batch_statistics(
    sizes: tuple[int, ...], make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    model, federation = in_double(make_model(batch_norm=True)), make_federation(sizes=sizes)
    looped, stacked = (run(FedAvg(), model, federation, executor=how)[0] for how in EXECUTORS)
    assert_same_outcome(stacked, looped, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", each_kind(sorted({*EVERY_METHOD} - IN_CLIENT_ORDER), (*KINDS, "local")))
def test_permuting_the_clients_permutes_the_result(name: str, normed: Model, federation: Federation) -> None:
    method, order = Method.registry[name](), [2, 0, 1]
    straight, _ = run(method, normed, federation, rounds=2, **vars(SMOOTH))
    permuted, _ = run(method, normed, federation.select([federation.names[m] for m in order]), rounds=2, **vars(SMOOTH))
    tolerance = {"rtol": 0, "atol": 0} if name == "local" else {"rtol": 1e-4, "atol": 1e-5}
    assert_same_model(permuted.trained, rows(straight.trained, order), **tolerance)
    assert_same_model(permuted.received, rows(straight.received, order), **tolerance)


@pytest.mark.parametrize("name", each_kind(EVERY_METHOD))
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_order_in_which_clients_are_processed_does_not_matter(
    name: str, dropout: float, make_model: Callable[..., Model], federation: Federation
) -> None:
    method, model, order = Method.registry[name](), make_model(dropout=dropout, layer_norm=True), [2, 0, 1]
    data = [ClientData.place(client, 4, CPU) for client in federation.clients]
    recipe, executor = RunContext(method, model, TRAINING, rounds=2, seed=0), LoopedExecutor(data)
    starts = stack([method.setup(model.init(0), model)] * 3)

    def once(clients: list[int]) -> tuple[Params, Params]:
        (trained,) = executor.train(
            [ClientBatch(recipe, tuple(clients), rows(starts, clients), Download(), 1)], evaluate=False
        )
        back = [clients.index(m) for m in range(3)]
        server = Server(method, torch.tensor([12, 20, 7]), starts)
        server.mailbox.receive(clients, trained.uploads, 1)
        turn = ClientBatch(recipe, tuple(clients), trained.params, server.combine(1), 1)
        (received,) = executor.personalise([turn], evaluate=False)
        return rows(trained.params, back), rows(received.params, back)

    for straight, shuffled in zip(once([0, 1, 2]), once(order), strict=True):
        assert_same_model(shuffled, straight, rtol=0, atol=0)


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_a_run_leaves_the_global_generator_alone(
    executor: str, make_model: Callable[..., Model], federation: Federation
) -> None:
    before = torch.get_rng_state()
    run(FedC2I(), make_model(dropout=0.5), federation, rounds=2, executor=executor, clients_per_round=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_is_looped_on_a_cpu(model: Model, federation: Federation) -> None:
    auto, looped = (run(FedAvg(), model, federation, rounds=2, executor=how)[0] for how in ("auto", "looped"))
    assert_same_outcome(auto, looped)


# Rounds, evaluation, early stopping.


@pytest.mark.parametrize(("every", "evaluated"), [(1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (100, [5]), (0, [5])])
def test_evaluate_every(every: int, evaluated: list[int], model: Model, federation: Federation) -> None:
    outcome, reports = run(FedC2I(), model, federation, rounds=5, evaluate_every=every)
    assert [report.round for report in reports] == [1, 2, 3, 4, 5]
    assert [report.round for report in reports if report.metrics] == evaluated
    for report in reports:
        if report.metrics:
            assert report.metrics.keys() == {"trained", "received"}
            assert all(metrics.keys() >= {"accuracy", "loss"} for metrics in report.metrics["trained"])
    assert outcome.last is reports[-1]
    assert_same_outcome(outcome, run(FedC2I(), model, federation, rounds=5)[0])  # looking changes nothing


def test_both_points_are_measured_on_the_own_test_data(model: Model, federation: Federation) -> None:
    outcome, reports = run(FedAvg(), model, federation, rounds=2)
    for point in ("trained", "received"):
        for m, client in enumerate(federation.clients):
            params = row(getattr(outcome, point), m)
            logits = model.head(params, model.features(params, client.test.x))
            metrics = reports[-1].metrics[point][m]
            right = int((logits.argmax(1) == client.test.y).sum())
            assert metrics["accuracy"] == pytest.approx(100 * right / len(client.test))
            assert metrics["loss"] == pytest.approx(
                float(torch.nn.functional.cross_entropy(logits, client.test.y)), rel=1e-5
            )
    values = [metrics["accuracy"] for metrics in reports[-1].metrics["trained"]]
    assert reports[-1].mean("trained") == pytest.approx(sum(values) / 3)


@dataclass(frozen=True)
class Scripted(FedAvg):
    """Predicts rightly on validation data in some rounds only, and ever better on test data."""

    good: tuple[int, ...] = ()

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        logits = torch.zeros(len(x), 4)
        logits[:, 0 if site.round in self.good else 3] = 1.0
        return logits


@pytest.mark.parametrize(
    ("good", "every", "stops"),
    [((), 1, 3), ((2,), 1, 4), ((1, 2, 3), 1, 3), ((4,), 1, 3), ((), 2, 6), ((), 3, 8)],
    ids=["never-better", "better-once", "as-good-is-not-better", "too-late", "every-second", "end-comes-first"],
)
def test_patience_counts_evaluations_without_a_better_validation_accuracy(
    good: tuple[int, ...], every: int, stops: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(validation=1)  # one sample, of class 0
    _, reports = run(Scripted(good=good), model, federation, rounds=8, patience=2, evaluate_every=every)
    assert reports[-1].round == stops


def test_patience_needs_validation_data(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="patience=2: no client of 'toy' has validation data"):
        run(FedAvg(), model, federation, patience=2)


def test_influence_on_validation_data_needs_it(model: Model, make_federation: Callable[..., Federation]) -> None:
    method = FedC2I(influence_split="validation")
    with pytest.raises(UserError, match="influence_split=validation: client 'a' has no validation data"):
        run(method, model, make_federation())
    run(method, model, make_federation(validation=3), rounds=1)


def test_independent_init(model: Model, federation: Federation) -> None:
    training = TrainingSettings(lr=1e-30)  # nothing moves
    common, _ = run(Local(), model, federation, rounds=1, **vars(training))
    independent, _ = run(Local(), model, federation, rounds=1, **vars(training), init="independent")
    for m, name in enumerate(federation.names):
        assert_same_model(row(common.trained, m), model.init(0, "init"), rtol=0, atol=0)
        assert_same_model(row(independent.trained, m), model.init(0, name, "init"), rtol=0, atol=0)
    weights = independent.trained["head.weight"]
    assert not torch.equal(weights[0], weights[1])


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("method", [FedAvg(), FedC2I()], ids=["fedavg", "fedc2i"])
def test_one_client_alone_is_local_training(
    method: Method, executor: str, normed: Model, make_federation: Callable[..., Federation]
) -> None:
    """The mean of one model is that model."""
    federation = make_federation(sizes=(12,))
    outcome, _ = run(method, normed, federation, executor=executor)
    assert_same_outcome(outcome, run(Local(), normed, federation, executor=executor)[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "rounds must be .* at least 1, got '0'"),
        ({"evaluate_every": -1}, "evaluate_every .* at least 0"),
        ({"evaluate_every": 0, "patience": 1}, "patience=1 needs evaluations: evaluate_every must be at least 1"),
        ({"patience": -1}, "patience .* at least 0"),
        ({"threads": 0}, "threads .* at least 1"),
        ({"init": "random"}, r"init must be common \| independent, got 'random'"),
        ({"executor": "gpu"}, r"executor must be auto \| looped \| workers \| stacked, got 'gpu'"),
    ],
)
def test_settings_refusals(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EngineSettings(**settings)


def test_a_model_that_does_not_fit_is_refused_before_anything_runs(model: Model, federation: Federation) -> None:
    with pytest.raises(UserError, match="has 4 outputs, but the data has 5 classes"):
        run(FedAvg(), model, replace(federation, classes=tuple("vwxyz")))


# What a round reports.


def test_influence_belongs_to_the_clients_it_is_labelled_with(model: Model, federation: Federation) -> None:
    """Row m is what client m measured of every client: the report of one round, measured again by hand."""
    outcome, reports = run(FedC2I(influence_samples="all"), model, federation, rounds=1)
    for m, client in enumerate(federation.clients):
        data = ClientData.place(client, 4, CPU)
        site = Site(model, data.counts, torch.tensor(m), relay(outcome.trained))
        _, report = FedC2I().personalise(row(outcome.trained, m), data.train, site)
        for kind in ("influence_vector", "influence_matrix", "client_losses", "class_losses"):
            np.testing.assert_allclose(reports[0].influence[kind][m], report[kind].numpy(), rtol=1e-4)
    assert (reports[0].influence["left_out"] == 0).all()


@pytest.mark.parametrize("kind", [{}, {"bias": False}, {"batch_norm": True}], ids=["plain", "no-bias", "batchnorm"])
def test_traffic(kind: dict[str, bool], federation: Federation, make_model: Callable[..., Model]) -> None:
    model = make_model(**kind)
    one = 4 * sum(tensor.numel() for tensor in model.init(0).values() if tensor.is_floating_point())
    _, (mean,) = run(FedAvg(), model, federation, rounds=1)
    assert (mean.bytes_up, mean.bytes_down) == (one, one)
    _, (relayed,) = run(FedC2I(), model, federation, rounds=1)
    assert (relayed.bytes_up, relayed.bytes_down) == (one, 3 * (one + 1))  # a flag for each: the model is sound
    _, (partial,) = run(FedC2I(), model, federation, rounds=1, clients_per_round=2)
    assert partial.bytes_down == 2 * (one + 1)
    assert size_in_bytes(model.init(0)) == one + (8 if kind.get("batch_norm") else 0)


def test_round_reports_name_the_seed_the_round_and_who_took_part(model: Model, federation: Federation) -> None:
    _, reports = run(FedAvg(), model, federation, rounds=2, seed=7)
    assert [(report.seed, report.round) for report in reports] == [(7, 1), (7, 2)]
    assert all(report.participants == ("a", "b", "c") for report in reports)
    assert all(report.seconds > 0 for report in reports)


# Personal rows of a download.


def test_a_download_gives_each_client_its_row_and_a_newcomer_the_mean() -> None:
    download = Download({"s": torch.tensor(1.0)}, {"p": torch.tensor([[1.0], [5.0]])}, clients=(0, 2))
    assert [download.to(m)["p"].item() for m in (0, 1, 2)] == [1.0, 3.0, 5.0]
    assert all(download.to(m)["s"] == 1 for m in (0, 1, 2))


@dataclass(frozen=True)
class Mirror(Method):
    """Sends every client twice its own model: personal rows through both executors."""

    def combine(self, uploads: Uploads, state: Params) -> tuple[Download, Params]:
        personal = {name: 2 * tensor for name, tensor in uploads.tensors.items()}
        calls = {"calls": state.get("calls", torch.tensor(0)) + 1}
        return Download(personal=personal, clients=uploads.clients), calls


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_personal_rows_reach_their_clients(executor: str, model: Model, federation: Federation) -> None:
    outcome, _ = run(Mirror(), model, federation, rounds=1, executor=executor)
    assert_same_model(outcome.received, {name: 2 * tensor for name, tensor in outcome.trained.items()}, 0, 0)


@dataclass(frozen=True)
class TwoWays(FedAvg):
    """Predicts in a second way, and uploads how far it went from its start."""

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        return {"upside": -site.logits(params, x)}

    def upload(self, params: Params, data: Batch, site: Site) -> Params:
        return {name: params[name] - site.start[name] for name in params}


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_a_second_prediction_and_the_start_reach_the_method(
    executor: str, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(validation=4)
    outcome, (report,) = run(TwoWays(), model, federation, rounds=1, executor=executor)
    metrics = report.metrics["trained"][0]
    ways = {"accuracy", "loss", "accuracy/upside", "loss/upside"}
    assert metrics.keys() - {"balanced_accuracy", "f1", "auroc", "calibration_error"} == {
        *ways,
        *(f"validation_{metric}" for metric in ways),
    }
    assert metrics["loss/upside"] > metrics["loss"]
    start = model.init(0, "init")["hidden.weight"]
    mean_step = outcome.trained["hidden.weight"].mean(0) - start
    torch.testing.assert_close(outcome.received["hidden.weight"][0], mean_step, rtol=1e-4, atol=1e-6)


def test_a_run_leaves_the_number_of_threads_alone(model: Model, federation: Federation) -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    settings = EngineSettings(rounds=1, **vars(TRAINING), threads=before + 1)
    simulate(FedAvg(), model, federation, settings, [0], on_round=lambda _: seen.append(torch.get_num_threads()))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("executor", ["looped", "workers"])
def test_progress_is_reported_client_by_client(executor: Any, model: Model, federation: Federation) -> None:
    seen: list[tuple[int, int]] = []
    settings = EngineSettings(rounds=1, **vars(TRAINING), executor=executor)
    simulate(FedAvg(), model, federation, settings, [0], on_client=lambda done, of: seen.append((done, of)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_the_server_s_state_opens_with_the_mean_of_the_first_models_and_is_carried_on() -> None:
    @dataclass(frozen=True)
    class Remembers(Mirror):
        def opening(self, params: Params) -> Params:
            return {"calls": 10 * params["w"].sum()}

    first = {"w": torch.tensor([[1.0], [3.0]]), "counter": torch.tensor([1, 2])}
    assert Server(Remembers(), torch.tensor([1, 9]), first).state == {"calls": 20.0}
    server = Server(Mirror(), torch.tensor([1, 1]), first)
    for number in (1, 2, 3):
        server.mailbox.receive([0, 1], {"w": torch.ones(2, 1)}, number)
        server.combine(number)
    assert server.state["calls"] == 3


def test_a_scalar_upload_is_accepted() -> None:
    server = Server(FedAvg(), torch.tensor([1, 1]), {"temperature": torch.ones(2)})
    assert server.mailbox.receive([0, 1], {"temperature": torch.tensor([1.0, torch.nan])}, 1) == {1: "not finite"}
    assert server.combine(1).shared["temperature"] == 1.0


def test_stacked_serves_some_clients_as_it_serves_all(model: Model, federation: Federation) -> None:
    data = [ClientData.place(client, 4, CPU) for client in federation.clients]
    recipe = RunContext(Local(), model, TRAINING, rounds=1, seed=0)
    starts = stack([model.init(0, n) for n in range(3)])
    turns = [
        ClientBatch(recipe, (0, 1, 2), starts, Download(), 1),
        ClientBatch(recipe, (2, 0), rows(starts, [2, 0]), Download(), 1),
    ]
    together, some = StackedExecutor(data).train(turns, evaluate=False)
    assert_same_model(some.params, rows(together.params, [2, 0]), rtol=1e-4, atol=1e-6)
