"""Quadratic programmes: feasible, optimal by their own conditions, no worse than scipy or any random point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.testing import assert_close

from fedc2i.methods.math.quadratic_program import box_qp, combination_weights, project_simplex, simplex_qp
from oracles.quadratic import box_residual, simplex_by_scipy, simplex_residual

Array = NDArray[np.float64]


@st.composite
def problems(draw: st.DrawFn) -> tuple[Array, Array]:
    """Q of any rank, with duplicates and rows of zeros among its clients, and a linear term that may be zero.

    Few clients, or so many that the solvers warm up.
    """
    clients, rank = draw(st.integers(1, 7) | st.just(18)), draw(st.integers(0, 8))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    points = rng.normal(size=(clients, rank)) * 10.0 ** draw(st.integers(-3, 3))
    linear = rng.normal(size=clients) * 10.0 ** draw(st.integers(-3, 3)) * draw(st.sampled_from([0, 1]))
    copies = draw(st.integers(0, clients - 1))
    points[:copies], linear[:copies] = points[-1], linear[-1]
    if draw(st.booleans()):
        points[0] = 0
    return points @ points.T, linear


@given(problems())
@settings(max_examples=150, deadline=None)
def test_simplex_qp_is_optimal(problem: tuple[Array, Array]) -> None:
    q, b = problem
    weights = simplex_qp(torch.from_numpy(q), torch.from_numpy(b)).numpy()
    assert simplex_residual(q, b, weights) < 1e-8
    others = np.random.default_rng(0).dirichlet(np.full(len(b), 0.5), 200)
    best = weights @ q @ weights + b @ weights
    values = np.einsum("ni,ij,nj->n", others, q, others) + others @ b
    assert best <= values.min() + 1e-9 * max(np.abs(q).max(), np.abs(b).max())


@given(problems(), st.sampled_from([0.01, 1.0, 30.0]))
@settings(max_examples=150, deadline=None)
def test_box_qp_is_optimal(problem: tuple[Array, Array], upper: float) -> None:
    g, b = problem
    found = box_qp(torch.from_numpy(g), torch.from_numpy(b), upper).numpy()
    assert box_residual(g, b, found, upper) < 1e-8
    others = np.random.default_rng(0).uniform(0, upper, (200, len(b)))
    best = b @ found - found @ g @ found / 2
    values = others @ b - np.einsum("ni,ij,nj->n", others, g, others) / 2
    assert best >= values.max() - 1e-9 * max(np.abs(g).max() * upper, np.abs(b).max()) * upper


@pytest.mark.parametrize("seed", range(5))
def test_simplex_qp_agrees_with_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    points, b = rng.normal(size=(5, 6)), rng.normal(size=5)
    q = points @ points.T + 0.1 * np.eye(5)  # one optimum
    got = simplex_qp(torch.from_numpy(q), torch.from_numpy(b)).numpy()
    np.testing.assert_allclose(got, simplex_by_scipy(q, b), atol=1e-6)


def test_simplex_qp_by_hand() -> None:
    """α_i ∝ 1/q_i for a diagonal Q; the cheaper corner where only the linear term counts."""
    weights = simplex_qp(torch.diag(torch.tensor([1.0, 2.0, 4.0])))
    assert_close(weights, torch.tensor([4.0, 2.0, 1.0]).double() / 7)
    assert simplex_qp(torch.zeros(2, 2), torch.tensor([1.0, -1.0])).tolist() == [0, 1]
    assert simplex_qp(torch.tensor([[3.0]])).tolist() == [1]
    assert_close(simplex_qp(torch.zeros(4, 4)), torch.full((4,), 0.25).double())


def test_simplex_qp_serves_many_problems_at_once_and_knows_no_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 2, 5, 4, generator=generator).double()
    q, b = points @ points.mT, torch.randn(3, 2, 5, generator=generator).double()
    together = simplex_qp(q, b)
    assert together.shape == (3, 2, 5)
    for i, j in np.ndindex(3, 2):
        assert_close(together[i, j], simplex_qp(q[i, j], b[i, j]), rtol=0, atol=1e-9)
    assert_close(simplex_qp(q * 1e-9, b * 1e-9), together, rtol=0, atol=1e-9)


@given(problems(), st.integers(0, 2**18 - 1), st.sampled_from([1.0, 1e-6, 1e6]))
@settings(max_examples=150, deadline=None)
def test_simplex_qp_of_members_is_their_own_problem(problem: tuple[Array, Array], bits: int, scale: float) -> None:
    """Optimal among members, whatever the others hold and however large it is; nothing for the others."""
    q, b = problem
    members = np.array([bool(bits >> k & 1) for k in range(len(b))])
    members[-1] |= not members.any()
    size, inside = max(np.abs(q).max(), np.abs(b).max()), np.ix_(members, members)
    others_q, others_b = np.full_like(q, -1e3 * size), np.full_like(b, -1e3 * size)
    others_q[inside], others_b[members] = q[inside], b[members]
    given = (torch.from_numpy(scale * others_q), torch.from_numpy(scale * others_b), torch.from_numpy(members))
    weights = simplex_qp(*given).numpy()
    assert (weights[~members] == 0).all()
    own, own_q, own_b = weights[members], q[inside], b[members]
    assert simplex_residual(own_q, own_b, own) < 1e-8
    alone = simplex_qp(torch.from_numpy(own_q), torch.from_numpy(own_b)).numpy()
    values = [a @ own_q @ a + own_b @ a for a in (own, alone)]
    assert values[0] == pytest.approx(values[1], rel=0, abs=1e-9 * size)


def test_simplex_qp_broadcasts_and_bounds_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One Q for all, a b for each, clusters for some: as if written out, also when worked off in pieces."""
    generator = torch.Generator().manual_seed(1)
    points = torch.randn(3, 1, 4, 6, generator=generator).double()
    q, b = points @ points.mT, torch.randn(5, 4, generator=generator).double()
    members = torch.rand(3, 5, 4, generator=generator) < 0.7
    members[..., 0] = True
    together = simplex_qp(q, b, members)
    assert together.shape == (3, 5, 4)
    for i, j in np.ndindex(3, 5):
        assert_close(together[i, j], simplex_qp(q[i, 0], b[j], members[i, j]), rtol=0, atol=1e-9)
    monkeypatch.setattr("fedc2i.methods.math.quadratic_program._AT_ONCE", 50)
    assert_close(simplex_qp(q, b, members), together, rtol=0, atol=1e-9)


@pytest.mark.parametrize("clients", [5, 40])
def test_many_clients_and_few_are_solved_alike(clients: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without the first-order steps before the active set."""
    generator = torch.Generator().manual_seed(2)
    points = torch.randn(4, clients, 50, generator=generator).double()
    q, b = points @ points.mT, 30 * torch.randn(4, clients, generator=generator).double()
    found = []
    for few in (0, 1000):
        monkeypatch.setattr("fedc2i.methods.math.quadratic_program._FEW", few)
        found.append((simplex_qp(q, b), box_qp(q, b, 0.5)))
    for one, two in zip(*found, strict=True):
        assert_close(one, two, rtol=0, atol=1e-7)
        assert 0 < (one > 0).double().mean() < 1


def test_box_qp_serves_many_problems_at_once_and_knows_no_scale() -> None:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(3, 2, 5, 9, generator=generator).double()
    g, b = points @ points.mT, torch.randn(3, 2, 5, generator=generator).double()
    g[0, 0], b[0, 0] = 0, 0
    together = box_qp(g, b, 0.1)
    assert together.shape == (3, 2, 5)
    for i, j in np.ndindex(3, 2):
        assert_close(together[i, j], box_qp(g[i, j], b[i, j], 0.1), rtol=0, atol=1e-9)
    assert_close(box_qp(g * 1e-9, b * 1e-9, 0.1), together, rtol=0, atol=1e-9)


def test_box_qp_by_hand() -> None:
    """Independent coordinates: b/g, clipped. Two opposite clients: what one gains the other loses."""
    g = torch.diag(torch.tensor([1.0, 2.0, 1.0, 0.0, 0.0]))
    assert box_qp(g, torch.tensor([0.5, -1.0, 9.0, 1.0, -1.0]), 2.0).tolist() == [0.5, 0, 2, 2, 0]
    opposite = torch.tensor([[1.0, -1.0], [-1.0, 1.0]])
    both = box_qp(opposite, torch.tensor([0.1, 0.1]), 1.0)
    assert both.tolist() == [1, 1]
    assert box_qp(torch.zeros(2, 2), torch.zeros(2), 1.0).tolist() == [0, 0]


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8))
@settings(max_examples=100, deadline=None)
def test_projection_is_the_simplex_qp_with_the_identity(point: list[float]) -> None:
    """‖a − x‖² = aᵀa − 2xᵀa + …"""
    x = torch.tensor(point, dtype=torch.float64)
    assert_close(project_simplex(x), simplex_qp(torch.eye(len(x)), -2 * x), rtol=0, atol=1e-7)
    assert project_simplex(x).sum().item() == pytest.approx(1)
    assert (project_simplex(x) >= 0).all()


def test_projection_keeps_a_point_of_the_simplex_and_works_row_by_row() -> None:
    points = torch.tensor([[0.2, 0.3, 0.5], [3.0, 0.0, 0.0], [1.0, 1.0, 0.0]])
    want = torch.tensor([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [0.5, 0.5, 0.0]]).double()
    assert_close(project_simplex(points), want, rtol=0, atol=1e-7)


def test_combination_weights_of_copies_and_of_strangers() -> None:
    """Copies share by precision 1/V; who is far off gets nothing."""
    points = torch.tensor([[1.0, 0.0], [1.0, 0.0], [100.0, 0.0]])
    weights = combination_weights(torch.tensor([0.1, 0.3, 0.1]), points)
    assert_close(weights[0, :2], torch.tensor([0.75, 0.25]).double(), rtol=0, atol=1e-3)
    assert weights[0, 2] < 1e-4
    assert weights[2, 2] > 0.999


@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_combination_weights_inside_clusters(scale: float) -> None:
    """Each cluster as if it were alone, far from the origin and from each other; who is in none has itself."""
    generator = torch.Generator().manual_seed(4)
    camps = 10 * torch.randn(2, 3, generator=generator)[[0, 1, 0, 1, 0, 0]]
    points = (camps + scale * torch.randn(2, 6, 3, generator=generator)).double()
    variances = scale**2 * torch.rand(2, 6, generator=generator)
    same = torch.zeros(2, 6, 6, dtype=torch.bool)
    for c, *who in ((0, 0, 2, 4), (0, 1, 3), (1, 0, 1, 2, 3, 4, 5)):
        same[c, torch.tensor(who)[:, None], torch.tensor(who)] = True
    weights = combination_weights(variances, points, same)
    assert (weights[0][~(same[0] | torch.eye(6, dtype=torch.bool))] == 0).all()
    assert weights[0, 5, 5] == 1
    for who in ([0, 2, 4], [1, 3]):
        alone = combination_weights(variances[0, who], points[0, who])
        assert_close(weights[0][who][:, who], alone, rtol=0, atol=1e-7)
    assert_close(weights[1], combination_weights(variances[1], points[1]), rtol=0, atol=1e-7)
    for m in range(6):  # the programme as it is written
        away = points[1, m] - points[1]
        q = away @ away.mT + torch.diag(variances[1])
        assert simplex_residual(q.numpy(), np.zeros(6), weights[1, m].numpy()) < 1e-8
