"""FedPAC: its statistics, the programme for heads, alignment to prototypes, and who gets what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import Params, row, select
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Phase
from fedc2i.methods.fedpac import FedPAC
from fedc2i.methods.messages import Uploads
from fedc2i.models.model import Model
from oracles import assert_same_model
from oracles import fedpac as oracle
from support.method_checks import (
    local_client,
    make_site,
    place,
    run,
)

CLASSES = 4


def features(model: Model, params: Params, federation: Federation, client: int) -> torch.Tensor:
    return model.features(params, federation.clients[client].train.x)


def test_statistics_are_the_oracle_s(model: Model, federation: Federation) -> None:
    """V and h under the body that was received, prototypes under the one that was trained."""
    start, params, y = model.init(0), model.init(1), federation.clients[0].train.y
    sent = local_client(FedPAC(), model, federation).upload(params, start, {}, -1, 1)
    before = oracle.statistics(features(model, start, federation, 0), y, CLASSES)
    after = oracle.statistics(features(model, params, federation, 0), y, CLASSES)
    assert sent["variance"].item() == pytest.approx(before.variance, rel=1e-4)
    np.testing.assert_allclose(sent["reference"].numpy(), before.reference, atol=1e-6)
    for c, mean in after.means.items():
        np.testing.assert_allclose(sent["prototypes"][c].numpy(), mean, atol=1e-6)
    assert sent["class_counts"].tolist() == [4, 4, 4, 0]
    assert (sent["prototypes"][3] == 0).all()


def test_the_exchange_is_the_oracle_s(model: Model, federation: Federation) -> None:
    """After one round: the mean body, and for each client the heads under the weights that scipy finds."""
    outcome, (report,) = run(FedPAC(), model, federation, rounds=1)
    first = model.init(0, "init")
    labels = [client.train.y for client in federation.clients]
    own = [oracle.statistics(features(model, first, federation, m), labels[m], CLASSES) for m in range(3)]
    want = oracle.weights([one.variance for one in own], [one.reference for one in own])
    np.testing.assert_allclose(report.influence["influence_vector"], want, atol=1e-4)
    np.testing.assert_allclose(want.sum(1), 1)
    assert want.std(0).max() > 0.05  # not all the same
    for name in model.head_names:
        heads = np.tensordot(want, outcome.trained[name].numpy(), 1)
        np.testing.assert_allclose(outcome.received[name].numpy(), heads, atol=1e-4)
    for name in model.body_names:
        for m in range(3):
            torch.testing.assert_close(outcome.received[name][m], outcome.trained[name].mean(0))


def test_prototypes_are_weighted_by_counts(model: Model, federation: Federation) -> None:
    clients = [place(federation, m) for m in range(3)]
    params, method = model.init(0), FedPAC()
    sent = [method.upload(params, own.train, make_site(model, own, start=params)) for own in clients]
    stacked = {name: torch.stack([one[name] for one in sent]) for name in sent[0]}
    uploads = Uploads(stacked, (0, 1, 2), torch.tensor([12, 20, 7]), torch.zeros(3))
    download, _ = method.combine(uploads, {})
    own = [oracle.statistics(features(model, params, federation, m), clients[m].train.y, CLASSES) for m in range(3)]
    for c, want in oracle.global_prototypes(own, CLASSES).items():
        np.testing.assert_allclose(download.shared["prototypes"][c].numpy(), want, atol=1e-6)
    assert download.shared["known"].tolist() == [True] * 4
    assert download.shared.keys() == {*model.body_names, "prototypes", "known"}
    assert download.personal.keys() == {*model.head_names, "influence_vector"}
    weighted, _ = FedPAC(weighting="samples").combine(uploads, {})
    assert_same_model(select(weighted.shared, model.body_names), select(download.shared, model.body_names), 1e-5)


def test_the_loss_by_hand(model: Model, federation: Federation) -> None:
    """CE + λ·MSE where the class has a prototype, CE alone where it has none and in round 1."""
    data, params = place(federation), model.init(0)
    means, known = torch.randn(CLASSES, 6), torch.tensor([True, False, True, True])
    site = make_site(model, data, {"prototypes": means, "known": known})
    h = model.features(params, data.train.x)
    entropy = F.cross_entropy(model.head(params, h), data.train.y)
    away = sum(F.mse_loss(h[n], means[y]) for n, y in enumerate(data.train.y.tolist()) if known[y]) / len(h)
    torch.testing.assert_close(FedPAC(lam=0.7).loss(params, data.train, site), entropy + 0.7 * away)
    torch.testing.assert_close(FedPAC().loss(params, data.train, make_site(model, data)), entropy)


@pytest.mark.parametrize(
    ("epochs", "head", "want"),
    [
        (2, 1, (Phase(1, "head"), Phase(1, "body"))),
        (6, 1, (Phase(1, "head"), Phase(5, "body"))),
        (3, 9, (Phase(2, "head"), Phase(1, "body"))),
        (1, 1, (Phase(1),)),
    ],
)
def test_how_epochs_are_shared_out(epochs: int, head: int, want: Sequence[Phase]) -> None:
    assert FedPAC(head_epochs=head).phases(epochs) == want


def test_a_client_that_sat_out_keeps_its_head(model: Model, make_federation: Callable[..., Federation]) -> None:
    outcome, reports = run(FedPAC(), model, make_federation(sizes=(12, 20, 7, 9)), clients_per_round=2)
    present = ["abcd".index(name) for name in reports[-1].participants]
    absent = [m for m in range(4) if m not in present]
    for m in absent:
        for name in model.head_names:
            assert torch.equal(outcome.received[name][m], outcome.trained[name][m])
        for name in model.body_names:
            assert torch.equal(outcome.received[name][m], outcome.received[name][present[0]])
    vector = reports[-1].influence["influence_vector"]
    assert np.isnan(vector[absent]).all()
    np.testing.assert_allclose(np.nansum(vector[present], 1), 1, rtol=1e-5)


def test_alone_a_client_keeps_its_model(model: Model, make_federation: Callable[..., Federation]) -> None:
    outcome, reports = run(FedPAC(), model, make_federation(sizes=(12,)))
    assert_same_model(row(outcome.received, 0), row(outcome.trained, 0), 0, 0)
    assert reports[-1].influence["influence_vector"].tolist() == [[1.0]]
