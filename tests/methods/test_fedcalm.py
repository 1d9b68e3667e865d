"""FedCALM: projections, the soft-margin programme and its optimality, the cap, and what is shared."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedc2i.core.params import Params, row
from fedc2i.data.federation import Federation
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedcalm import FedCALM, conflict_free
from fedc2i.methods.messages import Uploads
from fedc2i.models.model import Model
from oracles import assert_same_model
from oracles import fedcalm as oracle
from oracles.quadratic import box_residual
from support.method_checks import run


def drawn(clients: int, size: int = 4, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Updates with a common part and conflicts."""
    rng = np.random.default_rng(seed)
    return 0.3 * rng.normal(size=size) + spread * rng.normal(size=(clients, size))


def uploads_of(tensors: Params) -> Uploads:
    count = len(next(iter(tensors.values())))
    return Uploads(tensors, tuple(range(count)), torch.ones(count), torch.zeros(count))


def step(method: FedCALM, updates: np.ndarray) -> np.ndarray:
    """d for updates from a global model of zeros, through `combine`."""
    rows = torch.from_numpy(updates)
    download, state = method.combine(uploads_of({"w": rows}), {"w": torch.zeros_like(rows[0])})
    assert torch.equal(state["w"], download.shared["w"])
    return download.shared["w"].numpy()


def test_conflict_free_by_hand() -> None:
    """(1, 0) and (−1, 1) conflict: (1, 0) becomes (½, ½), (−1, 1) becomes (0, 1)."""
    updates = torch.tensor([[1.0, 0.0], [-1.0, 1.0]]).double()
    np.testing.assert_allclose(conflict_free(updates @ updates.T) @ updates, [0.25, 0.75])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clients", [1, 2, 3, 6])
def test_conflict_free_is_the_oracle_s(clients: int, seed: int) -> None:
    updates = drawn(clients, seed=seed)
    if seed == 3:
        updates[0] = 0
    rows = torch.from_numpy(updates)
    np.testing.assert_allclose((conflict_free(rows @ rows.T) @ rows).numpy(), oracle.conflict_free(updates), atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("clients", [2, 3, 5])
def test_an_update_is_the_primal_optimum(clients: int, seed: int) -> None:
    updates = drawn(clients, seed=seed, spread=0.5)
    method = FedCALM(epsilon=0.4, slack=0.5)
    want = oracle.layer(updates, 0.4, 0.5)
    np.testing.assert_allclose(step(method, updates), want, atol=1e-5)


def test_the_dual_s_optimality_conditions() -> None:
    """λ_i = 0 for a client whose margin is met, C for one that is given up, and the margin met exactly in between."""
    updates = drawn(6, size=20, seed=1)
    rows = torch.from_numpy(updates)
    gram = rows @ rows.T
    method = FedCALM(epsilon=0.5, slack=0.2)
    free = conflict_free(gram)
    margins = 0.5 * np.linalg.norm(updates, axis=1) * float((free @ rows).norm())
    dual = method.coefficients(gram) - free  # these updates do not reach the cap
    d = (method.coefficients(gram) @ rows).numpy()
    assert np.linalg.norm(d) < np.linalg.norm(updates, axis=1).max()
    assert box_residual(gram.numpy(), margins - (gram @ free).numpy(), dual.numpy().clip(0, 0.2), 0.2) < 1e-8
    assert len({round(float(own), 6) for own in dual}) > 2  # some at a bound, some between
    missing = margins - updates @ d
    for own, miss in zip(dual.tolist(), missing, strict=True):
        assert miss < 1e-9 or own > 0.2 - 1e-9
        assert miss > -1e-9 or own < 1e-9


def test_agreeing_clients_are_averaged() -> None:
    updates = np.array([[1.0, 0.2, 0.0], [1.0, 0.0, 0.3], [1.2, 0.1, 0.1]])
    np.testing.assert_allclose(step(FedCALM(), updates), updates.mean(0), atol=1e-12)


def test_the_update_is_never_longer_than_the_longest_client_s() -> None:
    """A margin far out of reach: every λ is C, uncapped d is (M + 1) means."""
    updates = 1e-3 * np.array([[1.0, 0.2], [1.0, 0.0], [1.2, 0.1]])
    d = step(FedCALM(epsilon=1e6), updates)
    assert np.linalg.norm(d) == pytest.approx(np.linalg.norm(updates, axis=1).max(), rel=1e-6)
    np.testing.assert_allclose(d / np.linalg.norm(d), updates.mean(0) / np.linalg.norm(updates.mean(0)), rtol=1e-6)


def test_one_client_moves_the_model_by_its_update() -> None:
    updates = 0.01 * drawn(1)
    np.testing.assert_allclose(step(FedCALM(), updates), updates[0], rtol=1e-9)


def test_nothing_moved_and_exact_opposites() -> None:
    assert (step(FedCALM(), np.zeros((3, 4))) == 0).all()
    opposite = np.array([[1.0, 2.0], [-1.0, -2.0]])
    np.testing.assert_allclose(step(FedCALM(), opposite), 0, atol=1e-12)
    np.testing.assert_allclose(step(FedCALM(), np.array([[1.0, 2.0], [0.0, 0.0]])), [0.5, 1.0])


def test_coefficients_of_many_layers_at_once() -> None:
    """Also of one that did not move, and of one that is a thousand times smaller."""
    layers = [drawn(4), np.zeros((4, 4)), 1e-3 * drawn(4, seed=2)]
    grams = torch.from_numpy(np.stack([updates @ updates.T for updates in layers]))
    together = FedCALM(epsilon=0.3).coefficients(grams)
    for gram, found in zip(grams, together, strict=True):
        torch.testing.assert_close(found, FedCALM(epsilon=0.3).coefficients(gram), rtol=0, atol=1e-9)
    assert (together[1] == 0).all()


def test_layers_do_not_see_each_other_and_statistics_are_averaged() -> None:
    one, two = torch.from_numpy(drawn(3)), torch.from_numpy(drawn(3, size=6, seed=5)).reshape(3, 2, 3)
    running = torch.tensor([[1.0], [4.0], [10.0]])
    tensors = {"one": one, "two": two, "buffer/var": running}
    state = {"one": torch.zeros(4), "two": torch.ones(2, 3), "var": torch.ones(1)}
    download, after = FedCALM().combine(uploads_of(tensors), state)
    np.testing.assert_allclose(download.shared["one"], step(FedCALM(), one.numpy()))
    np.testing.assert_allclose(download.shared["two"].flatten() - 1, step(FedCALM(), two.flatten(1).numpy() - 1))
    assert download.shared["var"].item() == 5
    assert after.keys() == state.keys() == download.shared.keys()


def test_the_server_starts_from_the_initial_model(model: Model, federation: Federation) -> None:
    """Round 1 against the oracle, layer by layer, from what the clients really trained."""
    outcome, _ = run(FedCALM(epsilon=0.3), model, federation, rounds=1)
    first = model.init(0, "init")
    for name, trained in outcome.trained.items():
        updates = (trained - first[name]).flatten(1).double().numpy()
        want = first[name] + torch.from_numpy(oracle.layer(updates, 0.3, 1.0)).reshape(first[name].shape)
        torch.testing.assert_close(outcome.received[name][0].double(), want.double(), rtol=1e-3, atol=1e-5)


def test_alone_it_is_fedavg(make_federation: Callable[..., Federation], model: Model) -> None:
    alone = make_federation(sizes=(12,))
    assert_same_model(run(FedCALM(), model, alone)[0].received, run(FedAvg(), model, alone)[0].received, 1e-5, 1e-6)


def test_running_statistics_stay_sound(make_model: Callable[..., Model], federation: Federation) -> None:
    outcome, _ = run(FedCALM(), make_model(batch_norm=True), federation, rounds=3)
    assert (outcome.received["norm.running_var"] > 0).all()
    mean = outcome.trained["norm.running_var"].mean(0)
    torch.testing.assert_close(row(outcome.received, 0)["norm.running_var"], mean)
