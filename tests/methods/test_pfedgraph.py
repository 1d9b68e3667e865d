"""pFedGraph: cosines of updates, the collaboration graph, personal means, and the pull in the local loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad
from torch.nn import functional as F  # noqa: N812

from fedc2i.core.params import row
from fedc2i.core.settings import TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.messages import Uploads
from fedc2i.methods.pfedgraph import PFedGraph, collaboration, cosine_distance, cosines
from fedc2i.models.model import Model
from oracles import assert_same_model
from oracles import pfedgraph as oracle
from support.method_checks import make_site, place, run


def test_graph_by_hand() -> None:
    """p + cos/(2α) with p = ½, α = 1: (1, ½ + c/2), projected: each loses half of what exceeds 1."""
    graph = collaboration(torch.tensor([[1.0, 0.2], [0.2, 1.0]]), torch.tensor([0.5, 0.5]), 1.0, 0.9)
    torch.testing.assert_close(graph, torch.tensor([[0.7, 0.3], [0.3, 0.7]]).double())
    opposite = collaboration(torch.tensor([[1.0, -1.0], [-1.0, 1.0]]), torch.tensor([0.5, 0.5]), 0.8, 0.9)
    assert opposite.tolist() == [[1, 0], [0, 1]]
    near = torch.tensor([[1.0, 0.91], [0.91, 1.0]])
    assert collaboration(near, torch.tensor([0.5, 0.5]), 0.8, 0.9).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert collaboration(near, torch.tensor([0.5, 0.5]), 0.8, 1.0)[0, 0] > 0.52


@pytest.mark.parametrize("alpha", [0.1, 0.8, 5.0])
@pytest.mark.parametrize("clients", [1, 2, 6])
def test_graph_is_the_oracle_s(clients: int, alpha: float) -> None:
    rng = np.random.default_rng(clients)
    first = rng.normal(size=7)
    models = first + rng.normal(size=7) + rng.normal(size=(clients, 7))
    shares = rng.dirichlet(np.ones(clients))
    rows = torch.from_numpy(models - first)
    similarity = cosines({"a": rows[:, :3], "b": rows[:, 3:].reshape(clients, 2, 2)})
    got = collaboration(similarity, torch.from_numpy(shares), alpha, 0.9)
    want = oracle.graph(oracle.similarity(models, first, 0.9), shares, alpha)
    np.testing.assert_allclose(got.numpy(), want, atol=1e-6)


def test_a_client_that_did_not_move_has_no_likes_but_itself() -> None:
    similarity = cosines({"a": torch.tensor([[0.0, 0.0], [1.0, 2.0]])})
    torch.testing.assert_close(similarity, torch.tensor([[0.0, 0.0], [0.0, 1.0]]).double())
    graph = collaboration(similarity, torch.tensor([0.5, 0.5]), 0.8, 0.9)
    assert graph[0, 0] > graph[0, 1]


def test_the_exchange_is_the_oracle_s(model: Model, federation: Federation) -> None:
    """Two rounds: the second graph is by the way gone since the very first model, not since the last round."""
    for weighting, shares in (("uniform", np.full(3, 1 / 3)), ("samples", np.array([12, 20, 7]) / 39)):
        outcome, reports = run(PFedGraph(weighting=weighting, snap=0.99), model, federation)
        first = torch.cat([tensor.flatten() for tensor in model.init(0, "init").values()]).double().numpy()
        models = torch.cat([rows.flatten(1) for rows in outcome.trained.values()], 1).double().numpy()
        want = oracle.graph(oracle.similarity(models, first, 0.99), shares, 0.8)
        np.testing.assert_allclose(reports[-1].influence["influence_vector"], want, atol=1e-4)
        assert want.std() > 0.02
        for name, trained in outcome.trained.items():
            mixed = np.tensordot(want, trained.double().numpy(), 1)
            np.testing.assert_allclose(outcome.received[name].numpy(), mixed, atol=1e-4)


def test_the_loss_by_hand(model: Model, federation: Federation) -> None:
    data, params, start = place(federation), model.init(0), model.init(1)
    site = make_site(model, data, {"influence_vector": torch.ones(1)}, start=start)
    names = sorted(params)
    cosine = F.cosine_similarity(*(torch.cat([one[n].flatten() for n in names]) for one in (params, start)), dim=0)
    entropy = FedAvg().loss(params, data.train, site)
    distance = 1 - cosine
    torch.testing.assert_close(PFedGraph(lam=0.5).loss(params, data.train, site), entropy + 0.5 * distance)
    torch.testing.assert_close(PFedGraph(lam=0.5).loss(params, data.train, make_site(model, data)), entropy)  # round 1


def test_the_pull_s_gradient_is_precise() -> None:
    """Zero at the start, exactly; near it, what the usual formula gives in double precision only."""
    then = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    assert (grad(cosine_distance)(then, then) == 0).all()
    now = then + 1e-5 * torch.randn(5000, generator=torch.Generator().manual_seed(1))

    def usual(one: Tensor, two: Tensor) -> Tensor:
        return 1 - F.cosine_similarity(one, two, dim=0)

    want = grad(usual)(now.double(), then.double())
    torch.testing.assert_close(grad(cosine_distance)(now, then).double(), want, rtol=1e-3, atol=1e-11)
    assert (grad(usual)(now, then).double() - want).norm() > 1e-3 * want.norm()
    far = torch.randn(5000, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(cosine_distance(far, then), usual(far, then))


def test_the_pull_pulls(model: Model, federation: Federation) -> None:
    """After a local run a client that is pulled is nearer to its start than one that is not."""

    def turned(lam: float) -> float:
        training = TrainingSettings(batch_size=5, optimizer="sgd", lr=0.1)
        outcome, _ = run(PFedGraph(lam=lam), model, federation, rounds=2, **vars(training))
        before, _ = run(PFedGraph(lam=lam), model, federation, rounds=1, **vars(training))
        pairs = [(outcome.trained[name].flatten(1), before.received[name].flatten(1)) for name in outcome.trained]
        one, two = (torch.cat(parts, 1) for parts in zip(*pairs, strict=True))
        return F.cosine_similarity(one, two).mean().item()

    assert turned(5.0) > turned(0.0)


def test_large_alpha_without_a_pull_is_fedavg(model: Model, federation: Federation) -> None:
    mean, _ = run(FedAvg(), model, federation)
    assert_same_model(run(PFedGraph(alpha=1e9, lam=0), model, federation)[0].received, mean.received, 1e-4, 1e-6)


def test_absent_clients_are_served_and_newcomers_get_the_mean(
    model: Model, make_federation: Callable[..., Federation]
) -> None:
    outcome, (report,) = run(PFedGraph(), model, make_federation(sizes=(12, 20, 7, 9)), rounds=1, clients_per_round=2)
    present = ["abcd".index(name) for name in report.participants]
    stranger = next(m for m in range(4) if m not in present)
    for rows in outcome.received.values():
        torch.testing.assert_close(rows[stranger], rows[present].mean(0))
    np.testing.assert_allclose(np.nansum(report.influence["influence_vector"], 1), 1, rtol=1e-5)
    assert PFedGraph.keeps_uploads


def test_statistics_take_no_part_in_cosines_but_are_mixed() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    state = {"w": torch.zeros(2), "var": torch.zeros(1)}

    def mixed(var: float) -> Any:
        tensors = {"w": rows, "buffer/var": torch.tensor([[1.0], [var]])}
        return PFedGraph().combine(Uploads(tensors, (0, 1), torch.ones(2), torch.zeros(2)), state)[0].personal

    assert torch.equal(mixed(1.0)["w"], mixed(50.0)["w"])
    weights = mixed(5.0)["influence_vector"]
    torch.testing.assert_close(mixed(5.0)["var"], weights @ torch.tensor([[1.0], [5.0]]))


def test_alone_a_client_keeps_its_model(model: Model, make_federation: Callable[..., Federation]) -> None:
    outcome, reports = run(PFedGraph(), model, make_federation(sizes=(12,)))
    assert_same_model(row(outcome.received, 0), row(outcome.trained, 0), 0, 0)
    assert reports[-1].influence["influence_vector"].tolist() == [[1.0]]
