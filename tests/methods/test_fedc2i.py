"""FedC²I's options on a tiny case with an independent result, the samples it measures on, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from fedc2i.core.params import Params, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.methods.base import Method, Probe, Site, Uploads
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.messages import relay
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from fedc2i.training.settings import TrainingSettings
from oracles.fedc2i import Problem, by_powers

GAMMA = 3.0


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)


def personalise(problem: Problem, **options: Any) -> tuple[Params, dict[str, Tensor]]:
    model = split(problem.build, head="2")
    counts = torch.tensor([3, 1, 2, 9, 0])
    site = Site(model, counts, torch.tensor(problem.position), relay(stack(problem.models)))
    batch = Batch(problem.x, problem.y, torch.ones(len(problem.y)).double())
    start, report = FedC2I(**{"gamma": GAMMA, **options}).personalise(problem.own, batch, site)
    return start, dict(report)


# Options.


def test_gamma_class_is_the_matrix_s_own(problem: Problem) -> None:
    _, report = personalise(problem, gamma=2.0, gamma_class=7.0)
    assert_close(report["influence_vector"], by_powers(problem.client_losses(), 2.0))
    assert_close(report["influence_matrix"], by_powers(problem.class_losses(), 7.0))


@pytest.mark.parametrize("influence", ["exact", "first-order"])
def test_gamma_zero_is_fedavg_bit_for_bit(influence: Any, model: Model) -> None:
    uploads = Uploads(stack([model.init(0, n) for n in range(7)]), tuple(range(7)), torch.ones(7), torch.zeros(7))
    mean, _ = FedAvg().combine(uploads, {})
    own = model.init(0, 3)
    x = torch.randint(256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    batch = Batch(x, torch.arange(5) % model.classes, torch.ones(5))
    site = Site(model, torch.ones(model.classes), torch.tensor(3), relay(uploads.tensors))
    start, _ = FedC2I(gamma=0, influence=influence).personalise(own, batch, site)
    for name, tensor in mean.shared.items():
        assert torch.equal(start[name], tensor)


def context(method: Method, model: Model) -> RunContext:
    return RunContext(method, model, TrainingSettings(), rounds=3, seed=0)


def placed(federation: Federation, client: int = 0) -> ClientData:
    return ClientData.place(federation.clients[client], len(federation.classes), torch.device("cpu"))


def pixels(batch: Batch) -> set[bytes]:
    return {image.numpy().tobytes() for image in batch.x}


@pytest.mark.parametrize(("samples", "want"), [(5, 5), (1, 1), (12, 12), (13, 12), (1000, 12), ("all", 12)])
def test_influence_samples_are_distinct_training_samples(
    federation: Federation, model: Model, samples: Any, want: int
) -> None:
    data = placed(federation)
    batch = context(FedC2I(influence_samples=samples), model).probe(data, 1)
    assert batch is not None
    assert len(batch.y) == len(pixels(batch)) == want
    assert pixels(batch) <= pixels(data.train)
    assert batch.w.tolist() == [1.0] * want


def test_influence_samples_are_drawn_anew_for_every_round_and_client(federation: Federation, model: Model) -> None:
    own = context(FedC2I(influence_samples=4), model)
    first, again, second = (own.probe(placed(federation), number) for number in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert pixels(first) != pixels(second)
    training_batch = own.epochs(placed(federation), 1)[0][0][:4]
    assert pixels(first) != pixels(placed(federation).train.take(training_batch))


def test_influence_split(make_federation: Callable[..., Federation], model: Model) -> None:
    data = placed(make_federation(validation=6))
    batch = context(FedC2I(influence_split="validation", influence_samples="all"), model).probe(data, 1)
    assert pixels(batch) == pixels(data.validation)
    assert not pixels(batch) & pixels(data.train)


@dataclass(frozen=True)
class HeldOut(Method):
    """Asks for held-out samples, as any method may."""

    @property
    def probe(self) -> Probe:
        return Probe("all", "held-out")


@pytest.mark.parametrize("validation", [0, 6])
def test_held_out_samples_are_validation_data_where_there_are_any(
    validation: int, make_federation: Callable[..., Federation], model: Model
) -> None:
    data = placed(make_federation(validation=validation))
    batch = context(HeldOut(), model).probe(data, 1)
    assert pixels(batch) == pixels(data.validation if validation else data.train)


def test_the_probe_reaches_personalise(make_federation: Callable[..., Federation], model: Model) -> None:
    """The whole path of a client: what it measures on is the probe, nothing else."""
    data, method = placed(make_federation(validation=6)), FedC2I(influence_split="validation", influence_samples=4)
    models = [model.init(0, n) for n in range(3)]
    client = LocalClient(context(method, model), data)
    _, got = client.personalise(models[0], relay(stack(models)), 0, 2)
    probe = client.context.probe(data, 2)
    _, want = method.personalise(models[0], probe, Site(model, data.counts, torch.tensor(0), relay(stack(models))))
    assert torch.equal(got["client_losses"], want["client_losses"])


def test_the_server_relays_every_model_unchanged() -> None:
    tensors = {"a": torch.arange(6.0).reshape(3, 2)}
    uploads = Uploads(tensors, (0, 2, 4), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 0]))
    download, _ = FedC2I().combine(uploads, {})
    assert download.clients == (0, 2, 4)
    for client in (0, 1, 4):
        assert torch.equal(download.to(client)["a"], tensors["a"])
    assert [download.position(client) for client in range(5)] == [0, -1, 1, -1, 2]


# Refusals.
