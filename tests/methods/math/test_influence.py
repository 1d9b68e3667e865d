"""The maths of influence, against slow oracles, hand-computed numbers and its invariants."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.testing import assert_close

from fedc2i.core.params import Params, floating, stack
from fedc2i.methods.base import Site
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.first_order import first_order_changes, first_order_losses
from fedc2i.methods.math.influence import (
    Influence,
    class_losses,
    client_losses,
    equal_share,
    influence,
    logsumexp_without_each,
    sharp_cross_entropy,
)
from fedc2i.methods.messages import relay
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from oracles import assert_same_model
from oracles.fedc2i import Problem, by_powers
from support.method_checks import personalise

EVERYONE = torch.ones(3, dtype=torch.bool)
NAN = float("nan")
INF = float("inf")


# Against the oracle.


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("clients", "classes"), [(2, 2), (2, 10), (3, 10), (5, 2), (5, 10), (3, 100), (17, 10)])
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
    """One sample with the feature 1, so that a head's logits are its rows."""
    own = torch.zeros(1, 2, dtype=torch.float64)
    weight = torch.tensor([[[math.log(3)], [0.0]], [[0.0], [math.log(4)]], [[0.0], [0.0]]], dtype=torch.float64)
    valid, one = torch.tensor([True, True, False]), torch.ones(1).double()
    got = class_losses(own, one[:, None], weight, None, torch.tensor([0]), one, valid)
    # Without client 0, row 0 is client 1's logit 0 and row 1 its log 4; without client 1, log 3 and 0.
    want = torch.tensor([[math.log(2), math.log(5)], [math.log(4 / 3), math.log(2)]], dtype=torch.float64)
    assert_close(got[:2], want)


def test_client_losses_by_hand() -> None:
    bodies = {"a": torch.tensor([1.0, 2.0, 6.0]), "b": torch.tensor([[0.0, 3.0], [3.0, 0.0], [3.0, 3.0]])}
    got = client_losses(lambda body: body["a"] + 10 * body["b"].sum(), bodies, EVERYONE)
    assert_close(got, torch.tensor([4.0 + 45, 3.5 + 45, 1.5 + 30]))


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


def test_gamma_may_differ_between_columns() -> None:
    losses = torch.tensor([0.5, 1.0, 2.0])[:, None].expand(-1, 3)
    want = torch.tensor([[1 / 3, 1 / 7, 1 / 21], [1 / 3, 2 / 7, 4 / 21], [1 / 3, 4 / 7, 16 / 21]])
    assert_close(influence(losses, torch.tensor([0.0, 1.0, 2.0]), EVERYONE), want)


def test_models_that_are_not_valid_get_nothing() -> None:
    losses = torch.tensor([[1.0, 1.0], [3.0, 1.0], [5.0, 2.0]])
    by_model = torch.tensor([True, True, False])
    assert_close(influence(losses, 1.0, by_model), torch.tensor([[0.25, 0.5], [0.75, 0.5], [0, 0]]))
    assert (influence(losses, 1.0, torch.zeros(3, dtype=torch.bool)) == 0).all()


@pytest.mark.parametrize("broken", [NAN, INF])
def test_a_loss_that_is_not_finite_gets_nothing(broken: float) -> None:
    assert influence(torch.tensor([broken, 2.0, 2.0]), 5.0, EVERYONE).tolist() == [0.0, 0.5, 0.5]
    assert influence(torch.tensor([broken, broken, broken]), 5.0, EVERYONE).tolist() == [0, 0, 0]


def test_or_else_and_equal_share() -> None:
    weights = torch.tensor([[0.5, 0.0], [0.5, 0.0]])
    fallback = torch.tensor([0.2, 0.8])
    assert_close(Influence(weights).or_else(fallback).weights, torch.tensor([[0.5, 0.2], [0.5, 0.8]]))
    assert_close(Influence(torch.zeros(2)).or_else(fallback).weights, fallback)
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


def test_a_huge_but_finite_peer() -> None:
    """Without any other model the loss overflows: only the loss without the huge one is finite."""
    problem = Problem.draw(4, 5, position=1)
    problem.build = lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5))
    problem.models[3] = {name: 3e38 * tensor / tensor.abs().max() for name, tensor in problem.models[3].items()}
    _, report = personalise(problem, dtype=torch.float32)
    assert report["left_out"].tolist() == [False] * 4
    assert report["influence_vector"].tolist() == [0, 0, 0, 1]


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


@pytest.mark.parametrize("how", ["exact", "first-order"])
def test_one_client_keeps_its_model(how: Literal["exact", "first-order"]) -> None:
    problem = Problem.draw(1, 5)
    start, report = personalise(problem, FedC2I(influence=how))
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


# Class-level losses in blocks.


def draw_heads(clients: int, classes: int, samples: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Own logits, features, weight, bias, labels and sample weights."""
    generator = torch.Generator().manual_seed(clients * classes)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    y = torch.randint(classes, (samples,), generator=generator)
    w = torch.ones(samples).to(dtype)
    return [draw(samples, classes), draw(samples, 6), draw(clients, classes, 6), draw(clients, classes), y, w]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("at_once", [1, 3 * 8 * 10, 2**22])
@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_blocks_do_not_change_class_losses(
    at_once: int, dtype: torch.dtype, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, h, weight, biases, y, w = draw_heads(11, 10, dtype=dtype)
    arguments = (own, h, weight, biases if bias else None, y, w, torch.ones(11, dtype=torch.bool))
    want = class_losses(*arguments)
    seen: list[int] = []

    def softplus(margins: Tensor) -> Tensor:
        seen.append(margins.numel())
        return original(margins)

    original = torch.nn.functional.softplus
    monkeypatch.setattr(torch.nn.functional, "softplus", softplus)
    monkeypatch.setattr(sys.modules["fedc2i.methods.math.influence"], "AT_ONCE", at_once)
    got = class_losses(*arguments)
    assert max(seen) <= max(at_once, own.numel())
    assert sum(seen) == 11 * own.numel()
    tight = 1e-6 if dtype == torch.float32 else 1e-14  # the rounding of a matrix product may depend on its shape
    assert_close(got, want, rtol=tight, atol=0)


# First-order influence.


def bodies_of(*rows: list[float]) -> Params:
    return {"a": torch.tensor(rows, dtype=torch.float64)}


def test_first_order_changes_of_a_linear_loss_are_exact() -> None:
    bodies = {**bodies_of([1.0, 0.0], [2.0, 2.0], [6.0, 4.0]), "b": torch.tensor([[[3.0]], [[0.0]], [[0.0]]]).double()}

    def loss(body: Params) -> Tensor:
        return 10 + body["a"][0] + 2 * body["a"][1] + 3 * body["b"].sum()

    at_mean, changes = first_order_changes(loss, bodies, EVERYONE, bodies)
    assert float(at_mean) == pytest.approx(10 + 3 + 2 * 2 + 3)
    assert_close(changes, torch.tensor([10 + 4 + 6 + 0, 10 + 3.5 + 4 + 4.5, 10 + 1.5 + 2 + 4.5]).double() - 20)
    assert_close(at_mean + changes, client_losses(loss, bodies, EVERYONE))
    # A loss that grows is exact; one that falls is bent so that it stays above zero: 20 + 2, 20·exp(-2/20).
    assert first_order_losses(loss, bodies, EVERYONE, bodies).tolist() == pytest.approx([20, 22, 20 * math.exp(-0.1)])


def curved(body: Params) -> Tensor:
    a = body["a"]
    return (a[0] - 0.3 * a[1]).exp() + (a * a).sum() + torch.log1p(a[2].exp())


def draw_bodies(clients: int, spread: float = 1.0) -> Params:
    generator = torch.Generator().manual_seed(clients)
    offsets = torch.randn(clients, 3, generator=generator, dtype=torch.float64)
    return {"a": torch.tensor([0.4, -0.2, 0.7]).double() + spread * (offsets - offsets.mean(0))}


def first_order_error(bodies: Params) -> float:
    valid = torch.ones(len(bodies["a"]), dtype=torch.bool)
    error = first_order_losses(curved, bodies, valid, bodies) - client_losses(curved, bodies, valid)
    return float(error.abs().max())


@pytest.mark.parametrize("clients", [2, 5, 20])
def test_the_first_order_error_falls_with_the_square_of_the_deviations(clients: int) -> None:
    coarse, fine = (first_order_error(draw_bodies(clients, spread)) for spread in (0.02, 0.01))
    assert coarse / fine == pytest.approx(4, rel=0.1)


def test_the_first_order_error_falls_with_the_square_of_the_number_of_models() -> None:
    """Every body twice: the same mean and deviations, K − 1 from 9 to 19."""
    few = draw_bodies(10, 0.1)
    many = {"a": torch.cat([few["a"], few["a"]])}
    assert first_order_error(few) / first_order_error(many) == pytest.approx((19 / 9) ** 2, rel=0.05)


def test_first_order_influence_keeps_the_order_of_the_exact_one() -> None:
    bodies, valid = draw_bodies(20, 0.3), torch.ones(20, dtype=torch.bool)
    exact, got = client_losses(curved, bodies, valid), first_order_losses(curved, bodies, valid, bodies)
    ranks = torch.stack([exact.argsort().argsort(), got.argsort().argsort()]).double()
    assert float(torch.corrcoef(ranks)[0, 1]) > 0.98
    distance = (influence(exact, 5.0, valid) - influence(got, 5.0, valid)).abs().sum() / 2
    assert distance < 0.05 * (influence(exact, 5.0, valid) - 1 / 20).abs().sum() / 2


def test_first_order_losses_stay_positive_and_finite() -> None:
    bodies = bodies_of([0.0], [1.0], [500.0])
    got = first_order_losses(
        lambda body: 1e-3 + torch.nn.functional.softplus(body["a"].sum()), bodies, EVERYONE, bodies
    )
    assert torch.isfinite(got).all()
    assert (got >= 0).all()
    assert got[2] < got[1] < got[0]
    nothing = first_order_losses(lambda body: 0 * body["a"].sum(), bodies, EVERYONE, bodies)
    assert nothing.tolist() == [0, 0, 0]


def test_first_order_losses_leave_invalid_models_out() -> None:
    bodies = draw_bodies(4)
    with_zero = {"a": torch.cat([bodies["a"], torch.zeros(1, 3).double()])}
    valid = torch.tensor([True] * 4 + [False])
    got = first_order_losses(curved, with_zero, valid, with_zero)[:4]
    assert_close(got, first_order_losses(curved, bodies, valid[:4], bodies))


def test_first_order_losses_of_one_model_and_of_none() -> None:
    one = draw_bodies(1)
    alone = first_order_losses(curved, one, torch.ones(1, dtype=torch.bool), one)
    assert_close(alone, curved({"a": one["a"][0]})[None])
    none = {"a": torch.zeros(2, 3).double()}
    assert torch.isfinite(first_order_losses(curved, none, torch.zeros(2, dtype=torch.bool), none)).all()


def test_names_that_do_not_count_stay_at_their_mean() -> None:
    bodies = {**draw_bodies(3), "statistics": torch.tensor([1.0, 2.0, 6.0]).double()}

    def loss(body: Params) -> Tensor:
        return curved(body) + body["statistics"]

    want = first_order_losses(lambda body: curved(body) + 3, {"a": bodies["a"]}, EVERYONE, ["a"])
    assert_close(first_order_losses(loss, bodies, EVERYONE, ["a"]), want)
    frozen = first_order_losses(loss, bodies, EVERYONE, [])
    assert_close(frozen, loss({name: tensor.mean(0) for name, tensor in bodies.items()}).expand(3))


@pytest.mark.parametrize("clients", [2, 5])
def test_first_order_personalisation_of_all_sizes(clients: int) -> None:
    problem = Problem.draw(clients, 5, spread=0.1)
    start, report = personalise(problem, FedC2I(influence="first-order"))
    weights = report["influence_vector"]
    assert float(weights.sum()) == pytest.approx(1)
    assert_close(weights, by_powers(problem.client_losses(), 5.0), rtol=0.02, atol=0)
    assert_same_model({n: start[n] for n in ("0.weight", "0.bias")}, problem.mixed_body(weights), rtol=1e-9)


def test_first_order_leaves_the_class_level_alone() -> None:
    problem = Problem.draw(5, 6)
    (start, exact), (other, first_order) = (
        personalise(problem, FedC2I(influence=how)) for how in ("exact", "first-order")
    )
    assert torch.equal(exact["influence_matrix"], first_order["influence_matrix"])
    assert all(torch.equal(start[name], other[name]) for name in problem.head)
    assert not torch.equal(exact["influence_vector"], first_order["influence_vector"])


def test_first_order_keeps_the_own_body_where_the_mean_cannot_be_measured() -> None:
    problem = Problem.draw(4, 5, position=1)
    problem.build = lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.ReLU(), torch.nn.Linear(4, 5))
    problem.models[3] = {name: 3e38 * tensor / tensor.abs().max() for name, tensor in problem.models[3].items()}
    start, report = personalise(problem, FedC2I(influence="first-order"), dtype=torch.float32)
    assert not torch.isfinite(report["client_losses"]).any()
    assert report["influence_vector"].tolist() == [0, 1, 0, 0]
    assert_close(start["0.weight"].double(), problem.own["0.weight"])


# Lifted over clients, and over seeds around them.


@pytest.mark.parametrize("how", ["exact", "first-order"])
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch-norm"])
def test_lifted_over_seeds_and_clients_is_one_after_the_other(
    how: Literal["exact", "first-order"], batch_norm: bool, make_model: Callable[..., Model]
) -> None:
    """Two seeds of four clients; each seed has its own stack of models, which its clients share."""
    model, method = make_model(batch_norm=batch_norm), FedC2I(influence=how)
    seeds = [stack([model.init(seed, number) for number in range(4)]) for seed in range(2)]
    own = stack(seeds)
    received = stack([relay(floating(seed)) for seed in seeds])
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (2, 4, 6, 3, 16, 16), generator=generator, dtype=torch.uint8)
    y = torch.randint(model.classes, (2, 4, 6), generator=generator)
    w = (torch.arange(6) < torch.tensor([6, 4, 5, 6])[:, None]).float().expand(2, 4, 6)
    counts, position = torch.ones(model.classes), torch.arange(4).expand(2, 4)

    def one(own: Params, batch: Batch, position: Tensor, received: Params) -> tuple[Params, dict[str, Tensor]]:
        start, report = method.personalise(own, batch, Site(model, counts, position, received))
        return start, dict(report)

    with torch.no_grad():
        clients = vmap(one, in_dims=(0, 0, 0, None))
        starts, reports = vmap(clients)(own, Batch(x, y, w), position, received)
        for s in range(2):
            for m in range(4):
                mine = {name: tensor[s, m] for name, tensor in own.items()}
                stacked = {name: tensor[s] for name, tensor in received.items()}
                start, report = one(mine, Batch(x[s, m], y[s, m], w[s, m]), position[s, m], stacked)
                assert_close(report["influence_vector"], reports["influence_vector"][s, m], rtol=1e-4, atol=1e-6)
                assert_close(report["influence_matrix"], reports["influence_matrix"][s, m], rtol=1e-4, atol=1e-6)
                assert_same_model(start, {name: tensor[s, m] for name, tensor in starts.items()}, rtol=1e-4, atol=1e-5)
    assert reports["influence_vector"].std() > 1e-4
