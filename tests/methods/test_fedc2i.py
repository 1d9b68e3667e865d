"""FedC²I's options on a tiny case with an independent result, the samples it measures on, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from fedc2i.core.params import stack
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method, Probe, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.messages import Uploads, relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from oracles.fedc2i import Problem, by_powers
from support.method_checks import local_client, make_site, personalise, place, probe_of

GAMMA = 3.0


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=4, classes=5, labels=[0, 1, 2, 3], samples=7, position=2, seed=5)


# Options.


def test_gamma_class_is_the_matrix_s_own(problem: Problem) -> None:
    _, report = personalise(problem, FedC2I(gamma=2.0, gamma_class=7.0))
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


def pixels(batch: Batch) -> set[bytes]:
    return {image.numpy().tobytes() for image in batch.x}


@pytest.mark.parametrize(("samples", "want"), [(5, 5), (1, 1), (12, 12), (13, 12), (1000, 12), ("all", 12)])
def test_influence_samples_are_distinct_training_samples(
    federation: Federation, model: Model, samples: Any, want: int
) -> None:
    data = place(federation)
    batch = probe_of(local_client(FedC2I(influence_samples=samples), model, federation))
    assert len(batch.y) == len(pixels(batch)) == want
    assert pixels(batch) <= pixels(data.train)
    assert batch.w.tolist() == [1.0] * want


def test_influence_samples_are_drawn_anew_for_every_round_and_client(federation: Federation, model: Model) -> None:
    own = local_client(FedC2I(influence_samples=4), model, federation)
    first, again, second = (probe_of(own, number) for number in (1, 1, 2))
    assert torch.equal(first.x, again.x)
    assert pixels(first) != pixels(second)
    training_batch = own.context.epochs(own.data, 1)[0][0][:4]
    assert pixels(first) != pixels(own.data.train.take(training_batch))


def test_influence_split(make_federation: Callable[..., Federation], model: Model) -> None:
    method = FedC2I(influence_split="validation", influence_samples="all")
    client = local_client(method, model, make_federation(validation=6))
    assert pixels(probe_of(client)) == pixels(client.data.validation)
    assert not pixels(probe_of(client)) & pixels(client.data.train)


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
    client = local_client(HeldOut(), model, make_federation(validation=validation))
    assert pixels(probe_of(client)) == pixels(client.data.validation if validation else client.data.train)


def test_the_probe_reaches_personalise(make_federation: Callable[..., Federation], model: Model) -> None:
    """The whole path of a client: what it measures on is the probe, nothing else."""
    method = FedC2I(influence_split="validation", influence_samples=4)
    models = [model.init(0, n) for n in range(3)]
    client = local_client(method, model, make_federation(validation=6))
    _, got = client.personalise(models[0], relay(stack(models)), 0, 2)
    site = make_site(model, client.data, relay(stack(models)))
    _, want = method.personalise(models[0], probe_of(client, 2), site)
    assert torch.equal(got["client_losses"], want["client_losses"])


def test_the_server_relays_every_model_unchanged() -> None:
    tensors = {"a": torch.arange(6.0).reshape(3, 2)}
    uploads = Uploads(tensors, (0, 2, 4), torch.tensor([5, 6, 7]), torch.tensor([0, 1, 0]))
    download, _ = FedC2I().combine(uploads, {})
    assert download.clients == (0, 2, 4)
    for client in (0, 1, 4):
        assert torch.equal(download.to(client)["a"], tensors["a"])
    assert [download.position(client) for client in range(5)] == [0, -1, 1, -1, 2]
