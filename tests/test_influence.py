"""The maths of influence, against slow oracles, hand-computed numbers and its invariants."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from fedc2i.influence import (
    class_losses,
    client_losses,
    equal_share,
    fill_empty,
    influence,
    leave_one_out,
    logsumexp_without_each,
    sharp_cross_entropy,
)
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models import split
from fedc2i.params import Params, stack
from fedc2i.training import Batch
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers

EVERYONE = torch.ones(3, dtype=torch.bool)
NAN = float("nan")
INF = float("inf")


def personalise(
    problem: Problem,
    method: FedC2I | None = None,
    dtype: torch.dtype = torch.float64,
    padding: int = 0,
    position: int | None = None,
    own: Params | None = None,
) -> tuple[Params, dict[str, Tensor]]:
    """What the package makes of a problem; padding samples are noise without weight."""
    noise = torch.randn(padding, *problem.x.shape[1:], generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    x = torch.cat([problem.x, 100 * noise]).to(dtype)
    y = torch.cat([problem.y, torch.zeros(padding, dtype=torch.int64)])
    w = torch.cat([torch.ones(len(problem.y)), torch.zeros(padding)]).to(dtype)
    received = {name: tensor.to(dtype) for name, tensor in stack(problem.models).items()}
    own = {name: tensor.to(dtype) for name, tensor in (own or problem.own).items()}
    model = split(problem.build, head="2")
    counts = torch.bincount(problem.y, minlength=model.classes)
    where = torch.tensor(problem.position if position is None else position)
    start, report = (method or FedC2I()).personalise(own, Batch(x, y, w), Site(model, counts, where, received))
    return start, dict(report)


# Against the oracle.


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("classes", [2, 10, 100])
@pytest.mark.parametrize("clients", [2, 3, 5, 17])
def test_everything_equals_the_double_loop(clients: int, classes: int, bias: bool) -> None:
    labels = None if classes == 2 else range(0, classes, 3)  # two thirds of the classes are missing
    problem = Problem.draw(clients, classes, bias, labels=labels, seed=clients * classes)
    start, report = personalise(problem, FedC2I(gamma=5.0), padding=clients % 3)

    bodies, rows = problem.client_losses(), problem.class_losses()
    vector, matrix = by_powers(bodies, 5.0), by_powers(rows, 5.0)
    assert_close(report["client_losses"], bodies, rtol=1e-6, atol=0)
    assert_close(report["class_losses"], rows, rtol=1e-6, atol=0)
    assert_close(report["influence_vector"], vector, rtol=1e-6, atol=0)
    assert_close(report["influence_matrix"], matrix, rtol=1e-6, atol=0)
    assert_same_model(start, {**problem.mixed_body(vector), **problem.mixed_head(matrix)}, rtol=1e-6)
    assert matrix.std() > 1e-4  # the case is not degenerate
    assert vector.std() > 1e-4


def confident(clients: int = 4) -> Problem:
    """Models whose loss on the batch is about 1e-9: single precision's log-softmax would round it away."""
    problem = Problem.draw(clients, classes=4, samples=8, spread=0.02, seed=3)
    problem.x = 3 * torch.nn.functional.one_hot(problem.y, 5).double()
    for number, model in enumerate(problem.models):
        model["0.weight"] += torch.eye(4, 5, dtype=torch.float64)
        model["2.weight"] += (20 + number) * torch.eye(4, dtype=torch.float64)
    return problem


def test_tiny_losses_keep_their_ratio_in_single_precision() -> None:
    problem = confident()
    start, report = personalise(problem, dtype=torch.float32)
    bodies, rows = problem.client_losses(), problem.class_losses()
    assert 0 < bodies.max() < 1e-7
    assert 0 < rows.max() < 1e-7
    assert_close(report["client_losses"].double(), bodies, rtol=1e-3, atol=0)
    assert_close(report["class_losses"].double(), rows, rtol=1e-3, atol=0)
    assert_close(report["influence_vector"].double(), by_powers(bodies, 5.0), rtol=5e-3, atol=0)
    assert_close(report["influence_matrix"].double(), by_powers(rows, 5.0), rtol=5e-3, atol=0)
    assert start["2.weight"].dtype == torch.float32


# By hand.


def test_sharp_cross_entropy_by_hand() -> None:
    logits = torch.tensor([[math.log(3), 0.0], [0.0, 0.0], [50.0, -50.0]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1])
    for w, want in (
        ([1.0, 0.0, 0.0], math.log(4 / 3)),
        ([1.0, 1.0, 0.0], (math.log(4 / 3) + math.log(2)) / 2),
        ([0.0, 0.0, 1.0], 100.0),
        ([0.0, 0.0, 0.0], 0.0),
    ):
        got = sharp_cross_entropy(logits, y, torch.tensor(w, dtype=torch.float64))
        assert float(got) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("margin", [10.0, 17.0, 25.0, 60.0])
def test_sharp_cross_entropy_does_not_round_to_nothing(margin: float) -> None:
    got = sharp_cross_entropy(torch.tensor([[0.0, margin, -3.0]]), torch.tensor([1]), torch.ones(1))
    assert float(got) == pytest.approx(math.log1p(math.exp(-margin) + math.exp(-margin - 3)), rel=1e-5)


def test_class_losses_by_hand() -> None:
    own = torch.zeros(1, 2, dtype=torch.float64)
    peers = torch.tensor([[[math.log(3), 0.0]], [[0.0, math.log(4)]]], dtype=torch.float64)
    got = class_losses(own, peers, torch.tensor([0]), torch.ones(1).double(), torch.ones(2, dtype=torch.bool))
    # Without client 0, row 0 is client 1's logit 0 and row 1 its log 4; without client 1, log 3 and 0.
    want = torch.tensor([[math.log(2), math.log(5)], [math.log(4 / 3), math.log(2)]], dtype=torch.float64)
    assert_close(got, want)


def test_class_losses_leave_invalid_rows_out_of_the_means() -> None:
    own = torch.zeros(1, 2, dtype=torch.float64)
    peers = torch.tensor([[[1.0, 1.0]], [[2.0, 7.0]], [[3.0, NAN]]], dtype=torch.float64)
    valid = torch.tensor([[True, True], [True, True], [True, False]])
    got = class_losses(own, peers, torch.tensor([0]), torch.ones(1).double(), valid)
    row_0 = torch.tensor([2.5, 2.0, 1.5], dtype=torch.float64)  # means of the other two
    row_1 = torch.tensor([7.0, 1.0], dtype=torch.float64)  # the other one
    assert_close(got[:, 0], torch.log1p(torch.exp(-row_0)))
    assert_close(got[:2, 1], torch.log1p(torch.exp(row_1)))


def test_client_losses_by_hand() -> None:
    bodies = {"a": torch.tensor([1.0, 2.0, 6.0]), "b": torch.tensor([[0.0, 3.0], [3.0, 0.0], [3.0, 3.0]])}
    got = client_losses(lambda body: body["a"] + 10 * body["b"].sum(), bodies, EVERYONE)
    assert_close(got, torch.tensor([4.0 + 45, 3.5 + 45, 1.5 + 30]))


def test_leave_one_out_of_one_model_is_finite() -> None:
    alone = {"a": torch.tensor([3.0])}
    assert torch.isfinite(leave_one_out(alone, alone, torch.tensor(1))["a"]).all()


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_logsumexp_without_each_against_brute_force(classes: int) -> None:
    logits = torch.randn(5, classes, generator=torch.Generator().manual_seed(0)) * 30
    got = logsumexp_without_each(logits)
    for b in range(5):
        for c in range(classes):
            kept = [k for k in range(classes) if k != c]
            assert_close(got[b, c], logits[b, kept].logsumexp(0))


def test_logsumexp_without_each_does_not_cancel() -> None:
    # log(S − e^100) has nothing left of 0 and 1; the running sums have.
    got = logsumexp_without_each(torch.tensor([[0.0, 100.0, 1.0]]))
    assert float(got[0, 1]) == pytest.approx(math.log(1 + math.e), rel=1e-6)


@pytest.mark.parametrize(
    ("gamma", "want"), [(0, [1 / 3] * 3), (1, [1 / 7, 2 / 7, 4 / 7]), (2, [1 / 21, 4 / 21, 16 / 21])]
)
def test_influence_by_hand(gamma: float, want: list[float]) -> None:
    assert_close(influence(torch.tensor([0.5, 1.0, 2.0]), gamma, EVERYONE), torch.tensor(want))


def test_models_that_are_not_valid_get_nothing() -> None:
    losses = torch.tensor([[1.0, 1.0], [3.0, 1.0], [5.0, 2.0]])
    by_model = torch.tensor([True, True, False])
    assert_close(influence(losses, 1.0, by_model), torch.tensor([[0.25, 0.5], [0.75, 0.5], [0, 0]]))
    by_row = torch.tensor([[True, False], [True, False], [False, True]])
    assert_close(influence(losses, 1.0, by_row), torch.tensor([[0.25, 0], [0.75, 0], [0, 1.0]]))
    assert (influence(losses, 1.0, torch.zeros(3, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_loss_that_is_not_finite_is_the_largest(broken: float) -> None:
    """Without model 0 or 2 the rest is broken, without model 1 it is not: model 1 must not get all the weight."""
    assert influence(torch.tensor([broken, 2.0, 2.0]), 5.0, EVERYONE).tolist() == [0.0, 0.5, 0.5]
    largest = influence(torch.tensor([broken, 2.0, broken]), 5.0, EVERYONE, not_finite="largest")
    assert largest.tolist() == [0.5, 0.0, 0.5]
    even = influence(torch.tensor([broken, 2.0, broken]), 0.0, EVERYONE, not_finite="largest")
    assert_close(even, torch.full((3,), 1 / 3))
    assert influence(torch.tensor([broken, broken, broken]), 5.0, EVERYONE).tolist() == [0, 0, 0]


def test_fill_empty_and_equal_share() -> None:
    weights = torch.tensor([[0.5, 0.0], [0.5, 0.0]])
    assert_close(fill_empty(weights, torch.tensor([0.2, 0.8])), torch.tensor([[0.5, 0.2], [0.5, 0.8]]))
    assert_close(fill_empty(torch.zeros(2), torch.tensor([0.2, 0.8])), torch.tensor([0.2, 0.8]))
    like = torch.zeros(1)
    assert_close(equal_share(torch.tensor([True, False, True]), like), torch.tensor([0.5, 0.0, 0.5]))
    assert_close(equal_share(torch.tensor([False, False]), like), torch.tensor([0.5, 0.5]))


# Properties.

LOSS = st.one_of(st.just(0.0), st.floats(1e-30, 1e30, allow_subnormal=False))
GAMMA = st.floats(0, 50)


@settings(max_examples=150, deadline=None)
@given(losses=st.lists(LOSS, min_size=1, max_size=40), gamma=GAMMA, data=st.data())
def test_weights_are_a_distribution_that_follows_the_losses(losses: list[float], gamma: float, data: st.DataObject):
    values = torch.tensor(losses)
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(losses), max_size=len(losses))))
    weights = influence(values, gamma, valid)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1.0 if valid.any() else 0.0, abs=1e-5)
    assert (weights[~valid] == 0).all()
    order = values[valid].argsort()
    assert (weights[valid][order].diff() >= -1e-6).all()  # a larger loss without it, a larger weight

    shuffle = torch.tensor(data.draw(st.permutations(range(len(losses)))))
    assert_close(influence(values[shuffle], gamma, valid[shuffle]), weights[shuffle], rtol=1e-4, atol=1e-7)


@settings(max_examples=50, deadline=None)
@given(
    losses=st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=20), gamma=st.floats(0, 10), unit=st.floats(0.01, 1e3)
)
def test_the_unit_of_the_loss_does_not_matter(losses: list[float], gamma: float, unit: float) -> None:
    values, valid = torch.tensor(losses, dtype=torch.float64), torch.ones(len(losses), dtype=torch.bool)
    assert_close(influence(values * unit, gamma, valid), influence(values, gamma, valid), rtol=1e-9, atol=1e-15)


def test_rows_of_a_personalised_model_are_distributions() -> None:
    _, report = personalise(Problem.draw(7, 10, labels=[0, 1]))
    assert_close(report["influence_vector"].sum(), torch.tensor(1.0).double())
    assert_close(report["influence_matrix"].sum(0), torch.ones(10).double())


def test_permuting_the_received_models_permutes_the_weights_and_keeps_the_result() -> None:
    problem, order = Problem.draw(5, 10, position=1), [3, 1, 4, 0, 2]
    start, report = personalise(problem)
    own = problem.own
    problem.models = [problem.models[i] for i in order]
    shuffled, shuffled_report = personalise(problem, position=order.index(1), own=own)
    assert_close(shuffled_report["influence_vector"], report["influence_vector"][order])
    assert_close(shuffled_report["influence_matrix"], report["influence_matrix"][order])
    assert_same_model(shuffled, start, rtol=1e-9)


def test_identical_clients_have_equal_weights() -> None:
    problem = Problem.draw(1, 5)
    problem.models = problem.models * 4
    start, report = personalise(problem)
    assert_close(report["influence_vector"], torch.full((4,), 0.25).double())
    assert_close(report["influence_matrix"], torch.full((4, 5), 0.25).double())
    assert_same_model(start, problem.own, rtol=1e-12)


def test_duplicates_share_weight_equally() -> None:
    problem = Problem.draw(4, 5)
    problem.models.append(problem.models[2])
    _, report = personalise(problem)
    for weights in (report["influence_vector"], report["influence_matrix"]):
        assert_close(weights[2], weights[4], rtol=1e-12, atol=0)
        assert not torch.isclose(weights[2], weights[3]).all()


def test_gamma_zero_is_the_plain_mean() -> None:
    problem = Problem.draw(5, 10)
    start, report = personalise(problem, FedC2I(gamma=0))
    assert_close(report["influence_vector"], torch.full((5,), 0.2).double())
    assert_close(report["influence_matrix"], torch.full((5, 10), 0.2).double())
    assert_same_model(start, {name: tensor.mean(0) for name, tensor in stack(problem.models).items()}, rtol=1e-12)


def test_a_large_gamma_leaves_the_most_influential_only() -> None:
    problem = Problem.draw(3, 2)
    start, report = personalise(problem, FedC2I(gamma=1e6))
    best = int(problem.client_losses().argmax())
    assert_close(report["influence_vector"], torch.eye(3)[best].double())
    assert_close(start["0.weight"], problem.models[best]["0.weight"])


def test_the_influence_matrix_does_nothing_when_all_heads_are_equal() -> None:
    problem = Problem.draw(4, 6)
    for model in problem.models:
        model.update({name: problem.own[name] for name in problem.head})
    start, report = personalise(problem)
    assert_close(report["influence_matrix"], torch.full((4, 6), 0.25).double())
    for name in problem.head:
        assert_close(start[name], problem.own[name])
    assert report["influence_vector"].std() > 1e-4


# Broken and missing models.


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("where", ["0.weight", "0.bias", "2.weight", "2.bias"])
def test_a_broken_peer_is_left_out(poison: float, where: str) -> None:
    healthy = Problem.draw(4, 5, position=1)
    start, report = personalise(healthy)
    broken = Problem.draw(4, 5, position=1)
    bad = {name: tensor.clone() for name, tensor in broken.models[2].items()}
    bad[where].view(-1)[0] = poison
    broken.models.append(bad)
    got, got_report = personalise(broken)
    assert got_report["left_out"].tolist() == [False] * 4 + [True]
    assert report["left_out"].tolist() == [False] * 4
    assert got_report["influence_vector"][4] == 0
    assert (got_report["influence_matrix"][4] == 0).all()
    assert_close(got_report["influence_vector"][:4], report["influence_vector"])
    assert_close(got_report["influence_matrix"][:4], report["influence_matrix"])
    assert_same_model(got, start, rtol=1e-9)


@pytest.mark.parametrize(("not_finite", "weights"), [("largest", [1 / 3, 1 / 3, 1 / 3, 0]), ("zero", [0, 0, 0, 1])])
def test_a_huge_but_finite_peer(not_finite: Literal["zero", "largest"], weights: list[float]) -> None:
    def build() -> torch.nn.Module:  # unlike tanh, relu lets it overflow
        return torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5))

    problem = Problem.draw(4, 5, position=1)
    problem.build = build
    problem.models[3] = {name: 3e38 * tensor / tensor.abs().max() for name, tensor in problem.models[3].items()}
    start, report = personalise(problem, FedC2I(not_finite=not_finite), dtype=torch.float32)
    assert report["left_out"].tolist() == [False] * 4
    assert not torch.isfinite(report["client_losses"]).all()  # else the case tests nothing
    assert report["influence_vector"].tolist() == pytest.approx(weights)
    if not_finite == "largest":
        assert_close(start["0.weight"].double(), stack(problem.models[:3])["0.weight"].mean(0))


def poisoned(model: Params) -> Params:
    return {name: torch.full_like(tensor, NAN) for name, tensor in model.items()}


def test_with_all_peers_broken_the_own_model_is_kept() -> None:
    problem = Problem.draw(3, 5)
    own = problem.own
    problem.models = [poisoned(model) for model in problem.models]
    start, report = personalise(problem, own=own)
    assert report["left_out"].all()
    for name, tensor in own.items():
        assert torch.equal(start[name], tensor)


def test_with_all_others_broken_the_own_model_is_kept() -> None:
    problem = Problem.draw(3, 5, position=1)
    problem.models = [m if i == 1 else poisoned(m) for i, m in enumerate(problem.models)]
    start, report = personalise(problem)
    assert report["influence_vector"].tolist() == [0, 1, 0]
    assert_same_model(start, problem.own, rtol=1e-12)


def test_a_broken_own_model_falls_back_to_the_mean_of_the_valid() -> None:
    problem = Problem.draw(4, 5, position=1)
    problem.models[1] = poisoned(problem.models[1])
    start, _ = personalise(problem)
    valid = [problem.models[i] for i in (0, 2, 3)]
    assert_same_model(start, {name: tensor.mean(0) for name, tensor in stack(valid).items()}, rtol=1e-12)


def test_a_newcomer_starts_from_the_mean() -> None:
    problem = Problem.draw(4, 5)
    newcomer = Problem.draw(1, 5, seed=99).own
    start, _ = personalise(problem, position=-1, own=newcomer)
    assert_same_model(start, {name: tensor.mean(0) for name, tensor in stack(problem.models).items()}, rtol=1e-12)


def test_one_client_keeps_its_model() -> None:
    problem = Problem.draw(1, 5)
    start, report = personalise(problem)
    assert report["influence_vector"].tolist() == [1.0]
    assert report["influence_matrix"].tolist() == [[1.0] * 5]
    assert_same_model(start, problem.own, rtol=0, atol=0)


def test_a_loss_of_nothing_is_not_divided_by() -> None:
    problem = confident(3)
    for model in problem.models:
        model["2.weight"] *= 100  # losses underflow to 0 even in double precision
    start, report = personalise(problem)
    assert report["client_losses"].max() == 0
    assert_close(report["influence_vector"], torch.full((3,), 1 / 3).double())
    assert all(torch.isfinite(tensor).all() for tensor in start.values())
