"""FedIC: clusters of prototypes, what is combined inside them, and what every client receives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedc2i.core.params import row
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Phase
from fedc2i.methods.fedic import FedIC, cosine_similarity, first_neighbours
from fedc2i.methods.messages import Download, Uploads
from fedc2i.models.model import Model
from oracles import assert_same_model, fedpac
from oracles import fedic as oracle
from support.method_checks import local_client, run

CLASSES, DIM = 3, 4
COUNTS = torch.tensor([[5, 2, 0], [3, 0, 0], [1, 4, 0], [7, 1, 0], [2, 6, 2]])  # class 2: one client has it


@pytest.fixture
def uploads() -> Uploads:
    """Five clients in two camps, with some classes missing."""
    generator = torch.Generator().manual_seed(3)
    camps = torch.randn(2, CLASSES, DIM, generator=generator)[[0, 0, 1, 1, 0]]
    points = camps + 0.3 * torch.randn(5, CLASSES, DIM, generator=generator)
    tensors = {
        "body": torch.randn(5, 2, generator=generator),
        "head/fc.weight": torch.randn(5, CLASSES, DIM, generator=generator),
        "head/fc.bias": torch.randn(5, CLASSES, generator=generator),
        "prototypes": points * (COUNTS > 0)[..., None],
        "class_counts": COUNTS,
        "variance": torch.rand(5, CLASSES, generator=generator) * (COUNTS > 0),
    }
    return Uploads(tensors, (0, 1, 2, 3, 4), COUNTS.sum(1), torch.zeros(5))


def exchanged(uploads: Uploads, **options: Any) -> Download:
    download, state = FedIC(**options).combine(uploads, {})
    assert state == {}
    return download


def test_the_exchange_is_the_oracle_s(uploads: Uploads) -> None:
    download, sent = exchanged(uploads), uploads.tensors
    weights = download.personal["influence_matrix"].numpy()  # (m, k, c)
    several = 0
    for c in range(CLASSES):
        have = [m for m in range(5) if COUNTS[m, c] > 0]
        points = {m: sent["prototypes"][m, c].double().numpy() for m in have}
        counts = {m: int(COUNTS[m, c]) for m in have}
        prototypes, alpha = oracle.one_class(points, counts, {m: float(sent["variance"][m, c]) for m in have})
        several += len(oracle.finch(points)) > 1
        for m in have:
            np.testing.assert_allclose(download.personal["prototypes"][m, c].numpy(), prototypes[m], atol=1e-5)
            want = np.array([alpha[m].get(k, 0.0) for k in range(5)])
            np.testing.assert_allclose(weights[m, :, c], want, atol=1e-5)
            for name in ("weight", "bias"):
                rows = sum(want[k] * sent[f"head/fc.{name}"][k, c].numpy() for k in range(5))
                np.testing.assert_allclose(download.personal[f"fc.{name}"][m, c].numpy(), rows, atol=1e-5)
    assert several  # the case has a class with more than one cluster
    torch.testing.assert_close(download.shared["body"], sent["body"].mean(0))
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)


def test_a_class_of_one_client_and_a_class_a_client_lacks(uploads: Uploads) -> None:
    download, sent = exchanged(uploads), uploads.tensors
    heads = download.personal["fc.weight"]
    assert torch.equal(heads[4, 2], sent["head/fc.weight"][4, 2])  # α = 1
    assert torch.equal(heads[0, 2], sent["head/fc.weight"][0, 2])  # nothing to measure by: its own row
    torch.testing.assert_close(download.personal["prototypes"][0, 2], sent["prototypes"][4, 2])
    have = [0, 2, 3, 4]
    mean = torch.einsum("k,kd->d", COUNTS[have, 1] / COUNTS[have, 1].sum(), sent["prototypes"][have, 1])
    torch.testing.assert_close(download.personal["prototypes"][1, 1], mean)
    assert download.personal["known"].tolist() == [[True, True, True]] * 5


def test_a_class_that_nobody_has_is_not_known(uploads: Uploads) -> None:
    counts = COUNTS.clone()
    counts[4, 2] = 0
    uploads.tensors["class_counts"] = counts
    download = exchanged(uploads)
    assert download.personal["known"][0].tolist() == [True, True, False]
    assert torch.equal(download.personal["fc.weight"][:, 2], uploads.tensors["head/fc.weight"][:, 2])
    assert all(torch.isfinite(rows).all() for rows in download.personal.values())


def test_statistics_are_the_oracle_s(model: Model, federation: Federation) -> None:
    start, params, train = model.init(0), model.init(1), federation.clients[0].train
    sent = local_client(FedIC(), model, federation).upload(params, start, {}, -1, 1)
    h = model.features(params, train.x)
    for c in range(3):
        assert sent["variance"][c].item() == pytest.approx(fedpac.class_variance(h, train.y, c), rel=1e-3)
        torch.testing.assert_close(sent["prototypes"][c], h[train.y == c].mean(0))
    assert sent["variance"][3] == 0
    assert sent["class_counts"].tolist() == [4, 4, 4, 0]


def test_how_it_trains() -> None:
    assert FedIC().phases(2) == (Phase(2),)
    assert FedIC(alternate=True).phases(2) == (Phase(1, "head"), Phase(1, "body"))


def test_a_client_that_sat_out_keeps_its_head(model: Model, make_federation: Callable[..., Federation]) -> None:
    outcome, reports = run(FedIC(), model, make_federation(sizes=(12, 20, 7, 9)), clients_per_round=2)
    absent = [m for m in range(4) if "abcd"[m] not in reports[-1].participants]
    for name in model.head_names:
        assert torch.equal(outcome.received[name][absent], outcome.trained[name][absent])
    assert np.isnan(reports[-1].influence["influence_matrix"][absent]).all()


def test_alone_a_client_keeps_its_model(model: Model, make_federation: Callable[..., Federation]) -> None:
    outcome, _ = run(FedIC(), model, make_federation(sizes=(12,)))
    assert_same_model(row(outcome.received, 0), row(outcome.trained, 0), 0, 0)


# Clusters.


def clusters(same: torch.Tensor) -> list[set[int]]:
    """The clusters as sets, in the order of their first member."""
    found = [set(row.nonzero()[:, 0].tolist()) for row in same]
    return [one for m, one in enumerate(found) if one and min(one) == m]


def test_first_neighbours_by_hand() -> None:
    """0-1 are each other's nearest, 2 follows 1; 3 and 4 are apart from them; the absent 5 would be nearest to all."""
    angles = torch.tensor([0.0, 10.0, 25.0, 90.0, 120.0, 45.0]).deg2rad()
    points = torch.stack([angles.cos(), angles.sin()], 1) * torch.arange(1, 7)[:, None]  # lengths do not matter
    present = torch.tensor([True] * 5 + [False])
    same = first_neighbours(cosine_similarity(points), present)
    assert clusters(same) == [{0, 1, 2}, {3, 4}]
    assert torch.equal(same, same.T)


@pytest.mark.parametrize("present", [[True], [False], [True, False], [True, True], [False, False]])
def test_one_two_and_no_clients(present: list[bool]) -> None:
    who = torch.tensor(present)
    same = first_neighbours(torch.zeros(len(present), len(present)), who)
    assert clusters(same) == ([{m for m, here in enumerate(present) if here}] if any(present) else [])


def test_a_long_chain_is_one_cluster() -> None:
    gaps = torch.tensor([0.0, *(50 - n for n in range(40))]).cumsum(0)  # each is nearer to the next than to the last
    similarity = -(gaps[:, None] - gaps).abs()
    assert len(clusters(first_neighbours(similarity, torch.ones(41, dtype=torch.bool)))) == 1
