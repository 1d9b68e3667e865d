"""FedProto: its prototypes, loss and both predictions against an oracle; absent clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fedc2i.core.params import Params, select, stack
from fedc2i.data.federation import Federation
from fedc2i.methods.fedproto import FedProto, nearness
from fedc2i.methods.local import Local
from fedc2i.methods.math.prototypes import Prototypes
from fedc2i.methods.messages import Uploads
from fedc2i.models.model import Model
from oracles import assert_same_model
from oracles.fedproto import client_prototypes, global_prototypes, loss, nearest
from support.method_checks import (
    local_client,
    make_site,
    place,
    run,
)


def exchange(method: FedProto, model: Model, federation: Federation) -> tuple[Params, list[dict[int, Any]]]:
    """What clients with different models receive after one exchange, and their prototypes by the oracle."""
    uploads, oracles = [], []
    for m in range(3):
        data, params = place(federation, m), model.init(m)
        site = make_site(model, data)
        uploads.append(method.upload(params, data.train, site))
        oracles.append(client_prototypes(site.features(params, data.train.x), data.train.y))
    together = Uploads(stack(uploads), (0, 1, 2), torch.tensor([12, 20, 7]), torch.zeros(3))
    return method.combine(together, {})[0].to(0), oracles


@pytest.mark.parametrize("weighting", ["uniform", "counts"])
def test_prototypes_are_the_oracle_s(weighting: Any, model: Model, federation: Federation) -> None:
    received, oracles = exchange(FedProto(weighting=weighting), model, federation)
    assert 3 not in oracles[0]  # the first client lacks the last class
    counts = [dict(enumerate(place(federation, m).counts.tolist())) for m in range(3)]
    want = global_prototypes(oracles, counts if weighting == "counts" else None)
    assert received.keys() == {"prototypes", "known"}
    assert received["known"].tolist() == [True] * 4
    torch.testing.assert_close(received["prototypes"], torch.tensor([want[c] for c in range(4)]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("ld", [0.0, 1.0, 2.5])
def test_loss_is_the_oracle_s_also_for_a_class_without_prototype(
    ld: float, model: Model, federation: Federation
) -> None:
    data, params = place(federation, 1), model.init(0)
    known = torch.tensor([True, False, True, True])
    means = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    site = make_site(model, data, {"prototypes": means, "known": known})
    features = site.features(params, data.train.x)
    table = {c: means[c].tolist() for c in (0, 2, 3)}
    want = loss(site.model.head(params, features), features, data.train.y, table, ld)
    assert FedProto(ld=ld).loss(params, data.train, site).item() == pytest.approx(want, rel=1e-5)


def test_the_first_round_is_local_training(model: Model, federation: Federation) -> None:
    ours, _ = run(FedProto(ld=5.0), model, federation, rounds=1)
    alone, _ = run(Local(), model, federation, rounds=1)
    assert_same_model(ours.trained, alone.trained, rtol=0, atol=0)
    assert_same_model(ours.received, alone.received, rtol=0, atol=0)
    later, _ = run(FedProto(ld=5.0), model, federation, rounds=2)
    assert not torch.equal(later.trained["hidden.weight"], run(Local(), model, federation)[0].trained["hidden.weight"])


def test_both_predictions(model: Model, federation: Federation) -> None:
    received, _ = exchange(FedProto(), model, federation)
    received = {**received, "known": torch.tensor([True, True, False, True])}
    data, params = place(federation, 2), model.init(2)
    site, x = make_site(model, data, received), place(federation, 1).train.x
    means = {c: received["prototypes"][c].tolist() for c in (0, 1, 3)}
    want = nearest(site.features(params, x), means)
    assert torch.equal(FedProto().predict(params, x, site), site.logits(params, x))
    assert FedProto().other_predictions(params, x, site)["prototype"].argmax(1).tolist() == want


def test_the_nearest_prototype_by_hand() -> None:
    shared = Prototypes(torch.tensor([[0.0, 0.0], [4.0, 0.0], [9.0, 9.0]]), torch.tensor([True, True, False]))
    scores = nearness(torch.tensor([[1.0, 0.0], [3.0, 2.0], [9.0, 9.0]]), shared)
    assert scores.argmax(1).tolist() == [0, 1, 1]  # (9, 9) is nobody's prototype
    assert scores[0].tolist() == [-0.5, -4.5, -5.5]
    assert torch.isfinite(scores).all()


def test_without_prototypes_the_classifier_predicts(model: Model, federation: Federation) -> None:
    data, params = place(federation), model.init(0)
    site = make_site(model, data)
    (other,) = FedProto().other_predictions(params, data.test.x, site).values()
    assert torch.equal(other, site.logits(params, data.test.x))


def test_absent_clients_prototypes_stay() -> None:
    tensors = {
        "prototypes": torch.tensor([[[1.0], [0.0]], [[3.0], [0.0]], [[0.0], [8.0]]]),
        "class_present": torch.tensor([[True, False], [True, False], [False, True]]),
    }
    uploads = Uploads(tensors, (0, 1, 4), torch.tensor([5, 6, 7]), torch.tensor([0, 0, 3]))
    assert FedProto().combine(uploads, {})[0].shared["prototypes"].tolist() == [[2.0], [8.0]]


def test_prototypes_are_taken_after_training_in_evaluation_mode(
    make_model: Callable[..., Model], federation: Federation
) -> None:
    model, method = make_model(batch_norm=True), FedProto()
    client = local_client(method, model, federation)
    start = model.init(0)
    trained = client.train(start, {}, -1, 1)
    before = {name: tensor.clone() for name, tensor in trained.items()}
    sent = client.upload(trained, start, {}, -1, 1)
    assert_same_model(trained, before, rtol=0, atol=0)  # statistics did not move
    want = client_prototypes(model.features(trained, client.data.train.x, training=False), client.data.train.y)
    torch.testing.assert_close(sent["prototypes"][1], torch.tensor(want[1]), rtol=1e-4, atol=1e-6)


def test_models_stay_private(model: Model, federation: Federation) -> None:
    outcome, _ = run(FedProto(), model, federation)
    assert_same_model(outcome.received, select(outcome.trained, model.init(0)), rtol=0, atol=0)
