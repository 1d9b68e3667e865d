"""γ as an object: what each comes to, how it is written, and runs with it."""

from __future__ import annotations

import copy
import pickle
import re
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap
from torch.testing import assert_close

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.options import Limits, convert, describe
from fedc2i.core.params import Params
from fedc2i.data.federation import Federation
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_ablation import FedC2IClient
from fedc2i.methods.math.influence import LARGEST, Gamma, influence, progress
from fedc2i.models.model import Model
from fedc2i.runs.plan import prepare
from oracles.fedc2i import Problem, by_powers
from support.method_checks import personalise

EACH = ("ramp(4)", "scaled(7)", "perplexity(2)", "perplexity(40%)")
ALLOWED = re.escape(
    "a finite number of at least 0 | ramp(number from 0) | scaled(number from 0) | "
    "perplexity(number from 1 or share up to 100%, such as 40%)"
)
INF, NAN = float("inf"), float("nan")


def unread() -> float:
    """Reading the round makes recordings of a step useless for the next round; only a ramp may."""
    raise AssertionError("the round was read")


def ramp(amount: float) -> Gamma:
    return Gamma(f"ramp({amount!r})")


def perplexity(amount: float | str) -> Gamma:
    return Gamma(f"perplexity({amount})")


def everyone(losses: Tensor) -> Tensor:
    return torch.ones(losses.shape[0], dtype=torch.bool)


def effective(weights: Tensor) -> Tensor:
    """exp(entropy), the obvious way."""
    return (-torch.special.xlogy(weights.double(), weights.double()).sum(0)).exp()


# Ramp.


@pytest.mark.parametrize(
    ("round", "rounds", "want"), [(1, 5, 0.0), (2, 5, 2.5), (3, 5, 5.0), (5, 5, 10.0), (1, 1, 10.0), (1, 2, 0.0)]
)
def test_ramp_by_hand(round: int, rounds: int, want: float) -> None:
    losses = torch.tensor([0.5, 1.0, 2.0])
    weights, used = ramp(10).weights(losses, everyone(losses), partial(progress, round, rounds))
    assert used.tolist() == want
    assert torch.equal(weights, influence(losses, want, everyone(losses)))


# Scaled.


@pytest.mark.parametrize(("models", "want"), [(1, 0.0), (2, 1.25), (5, 5.0), (9, 10.0), (50, 61.25)])
def test_scaled_by_hand(models: int, want: float) -> None:
    losses = torch.rand(models, generator=torch.Generator().manual_seed(0))
    weights, used = Gamma("scaled(5)").weights(losses, everyone(losses), unread)
    assert used.tolist() == want
    assert torch.equal(weights, influence(losses, want, everyone(losses)))


def test_scaled_counts_valid_models() -> None:
    losses = torch.tensor([[1.0, 2.0], [2.0, 1.0], [4.0, NAN]])
    for valid, want in (([True, True, False], 1.0), ([True] * 3, 2.0), ([False] * 3, 0.0)):
        _, used = Gamma("scaled(4)").weights(losses, torch.tensor(valid), unread)
        assert used.tolist() == [want, want]


# Perplexity.


def test_perplexity_by_hand() -> None:
    # Losses 1 and 2 with γ = 2 weigh 1 : 4; exp of that entropy is 5 / 4^(4/5).
    wanted = perplexity(5 / 4**0.8)
    losses = torch.tensor([1.0, 2.0])
    weights, used = wanted.weights(losses, everyone(losses), unread)
    assert_close(weights, torch.tensor([0.2, 0.8]), rtol=1e-5, atol=0)
    assert float(used) == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("models", [2, 5, 50])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), share=st.floats(0, 1), spread=st.floats(0.001, 8), centre=st.floats(-12, 5))
def test_perplexity_is_reached(
    models: int, dtype: torch.dtype, seed: int, share: float, spread: float, centre: float
) -> None:
    wanted = perplexity(1 + share * (models - 1))
    noise = torch.randn(models, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    losses = (centre + spread * noise).exp().to(dtype).clamp(min=1e-11)
    best = losses.sort().values[-2:].double()
    assert torch.isfinite(losses).all()
    weights, used = wanted.weights(losses, everyone(losses), unread)
    assert weights.dtype == used.dtype == dtype
    assert float(weights.sum()) == pytest.approx(1, abs=1e-6)
    assert 0 <= float(used) <= LARGEST * 1.001
    if best.log().diff() * LARGEST > 20:  # else the two largest are too near to be told apart
        assert float(effective(weights)) == pytest.approx(wanted.amount, abs=1e-3)


@settings(max_examples=150, deadline=None)
@given(
    losses=st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([INF, NAN])), min_size=1),
    amount=st.floats(1, 10),
    data=st.data(),
)
def test_perplexity_of_anything_is_a_distribution_near_enough(
    losses: list[float], amount: float, data: st.DataObject
) -> None:
    values = torch.tensor(losses)
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(losses), max_size=len(losses))))
    weights, used = perplexity(amount).weights(values, valid, unread)
    part = valid & torch.isfinite(values)
    assert torch.isfinite(weights).all()
    assert 0 <= float(used) <= LARGEST * 1.001
    assert float(weights.sum()) == pytest.approx(1.0 if part.any() else 0.0, abs=1e-5)
    assert (weights[~part] == 0).all()
    if part.any():  # never more concentrated than asked for
        assert float(effective(weights)) >= min(amount, int((weights > 0).sum())) - 1e-3


@pytest.mark.parametrize("amount", [3, 3.5, 100])
def test_with_no_more_than_k_models_gamma_is_zero_to_the_bit(amount: float) -> None:
    losses = torch.tensor([0.1, 7.0, 3.0, 5.0])
    valid = torch.tensor([True, True, True, False])
    weights, used = perplexity(amount).weights(losses, valid, unread)
    assert used == 0
    assert torch.equal(weights, influence(losses, 0, valid))


@pytest.mark.parametrize(
    ("losses", "want"),
    [([2.0] * 4, [0.25] * 4), ([1.0, 2.0, 2.0, 2.0], [0, 1 / 3, 1 / 3, 1 / 3]), ([0.0] * 4, [0.25] * 4)],
)
def test_equal_losses_stay_equal(losses: list[float], want: list[float]) -> None:
    weights, used = perplexity(2).weights(torch.tensor(losses), torch.ones(4, dtype=torch.bool), unread)
    assert weights.tolist() == pytest.approx(want)
    assert float(used) == pytest.approx(LARGEST, rel=1e-3)


# All of them.


@pytest.mark.parametrize("text", EACH)
def test_columns_are_independent(text: str) -> None:
    losses = 0.1 + torch.rand(6, 3, generator=torch.Generator().manual_seed(1))
    valid = torch.tensor([True, True, True, True, False, True])
    weights, used = Gamma.parse(text).weights(losses, valid, partial(progress, 2, 3))
    assert (weights.shape, used.shape) == ((6, 3), (3,))
    assert (weights[~valid] == 0).all()
    for c in range(3):
        alone, gamma = Gamma.parse(text).weights(losses[:, c], valid, partial(progress, 2, 3))
        assert_close(weights[:, c], alone)
        assert_close(used[c], gamma)
        assert_close(weights[:, c], influence(losses[:, c], float(used[c]), valid), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (5, 3)], ids=["vector", "matrix"])
@pytest.mark.parametrize("text", EACH)
def test_lifted_over_clients(text: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(2)
    losses = torch.rand(4, *shape, generator=generator)
    losses[1, 2] = INF
    valid = torch.rand(4, 5, generator=generator) > 0.3
    valid[3] = False

    def weigh(losses: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        return Gamma.parse(text).weights(losses, valid, partial(progress, 2, 3))

    weights, used = vmap(weigh)(losses, valid)
    for m in range(4):
        alone, gamma = weigh(losses[m], valid[m])
        assert_close(weights[m], alone)
        assert_close(used[m], gamma)


# How it is written.


@pytest.mark.parametrize(
    ("written", "want"),
    [
        ("ramp(10)", "ramp(10)"),
        (" ramp ( 10.0 ) ", "ramp(10)"),
        ("ramp(1e1)", "ramp(10)"),
        ("ramp(-0.0)", "ramp(0)"),
        ("ramp(0.1234567890123)", "ramp(0.1234567890123)"),
        ("scaled", "scaled(5)"),
        ("scaled(2.5)", "scaled(2.5)"),
        ("perplexity(1)", "perplexity(1)"),
        ("perplexity( 40.0 % )", "perplexity(40%)"),
        (ramp(10), "ramp(10)"),
    ],
)
def test_parse(written: str, want: str) -> None:
    found = Gamma.parse(written)
    assert str(found) == f"{found}" == want
    assert found.kind == want.partition("(")[0]
    for twin in (Gamma.parse(str(found)), copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert (type(twin), twin, twin.amount, twin.is_share) == (Gamma, found, found.amount, found.is_share)


@given(st.floats(1, allow_nan=False, allow_infinity=False))
def test_format_and_parse_keep_every_digit(amount: float) -> None:
    for kind in ("ramp", "scaled", "perplexity"):
        made = Gamma(f"{kind}({amount!r})")
        assert Gamma(str(made)).amount == made.amount == amount


BAD = (
    *("ramp", "ramp()", "ramp(", "ramp(1", "ramp(1)2", "ramp(1,2)", "ramp(x)", "ramp(-1)", "ramp(nan)", "ramp(inf)"),
    *("perplexity", "perplexity(0.99)", "perplexity(-3)", "scaled()", "scaled(-1)", "Ramp(1)", "step(3)", "five", ""),
    *("ramp(40%)", "perplexity(0%)", "perplexity(101%)", "perplexity(-3%)", "perplexity(%)", "perplexity(nan%)"),
    *([1], True, None, Gamma),
)


@pytest.mark.parametrize("value", BAD, ids=lambda value: getattr(value, "__name__", str(value)))
def test_refusals_list_what_is_allowed(value: Any) -> None:
    with pytest.raises(UserError, match=f"^gamma must be {ALLOWED}, got ") as caught:
        FedC2I(gamma=value)
    assert "\n" not in str(caught.value)
    if value is not None:
        with pytest.raises(UserError, match=rf"^gamma_class must be {ALLOWED} \| none, got "):
            FedC2I(gamma_class=value)


def test_as_an_option() -> None:
    assert re.fullmatch(rf"{ALLOWED} \| none", describe(float | Gamma | None, Limits(low=0)))
    assert convert("scaled", FedC2I, "gamma") == Gamma("scaled(5)")
    assert convert("none", FedC2I, "gamma_class") is None
    for number in (convert("3", FedC2I, "gamma"), FedC2I(gamma=3).gamma):
        assert (number, type(number)) == (3.0, float)


@pytest.mark.parametrize("text", ["ramp(10)", "scaled", "perplexity(3)", "perplexity(2.25)"])
def test_specs_that_mean_the_same_are_the_same(federation: Federation, text: str) -> None:
    method = FedC2I(gamma=text, gamma_class="scaled(5.0)")  # type: ignore[arg-type]
    assert method == FedC2I(gamma=Gamma.parse(text), gamma_class=Gamma("scaled(5)"))
    assert hash(method) == hash(FedC2I(**asdict(method)))
    assert asdict(method)["gamma"] == str(Gamma.parse(text))

    spec = f"fedc2i:gamma={text},gamma_class=scaled"
    ways: list[tuple[Any, dict[str, Any]]] = [
        (spec, {}),
        (method, {}),
        ("fedc2i", {"gamma": text, "gamma_class": "scaled"}),
        ("fedc2i", {"gamma": Gamma.parse(text), "gamma_class": Gamma("scaled(5)")}),
        ("fedc2i", {"options": {"gamma": text, "gamma_class": "scaled(5)"}}),
    ]
    for wanted, values in ways:
        (plan,) = prepare([wanted], values, federation, "lenet5")
        assert plan.method == method
        assert plan.label == f"FedC²I (gamma={Gamma.parse(text)}, gamma_class=scaled(5))"
        assert plan.key == f"fedc2i:gamma={Gamma.parse(text)},gamma_class=scaled(5)"
        (again,) = prepare([plan.key], {}, federation, "lenet5")
        assert (again.method, again.config.options) == (method, plan.config.options)
    with pytest.raises(UserError, match="is named 2 times"):
        prepare([spec, method], {}, federation, "lenet5")


# In FedC²I.


def with_gamma(
    problem: Problem, round: int = 2, method: type[FedC2I] = FedC2I, **options: Any
) -> tuple[Params, dict[str, Tensor]]:
    return personalise(problem, method(**options), round=round, rounds=3)


@pytest.fixture
def problem() -> Problem:
    return Problem.draw(clients=5, classes=4, labels=[0, 1, 2], samples=7, position=2, seed=5)


@pytest.mark.parametrize("influence", ["exact", "first-order"])
@pytest.mark.parametrize("text", EACH)
def test_both_levels_use_it_and_report_it(problem: Problem, text: str, influence: str) -> None:
    _, report = with_gamma(problem, gamma=text, influence=influence)
    gamma, columns = report["gamma"], report["gamma_class"]
    assert (gamma.shape, columns.shape) == ((), (5, 4))
    assert (columns == columns[0]).all()
    vector = by_powers(report["client_losses"], float(gamma))
    assert_close(report["influence_vector"], vector, rtol=1e-6, atol=1e-9)
    for c in range(4):
        column = by_powers(problem.class_losses()[:, c], float(columns[0, c]))
        assert_close(report["influence_matrix"][:, c], column, rtol=1e-6, atol=1e-9)
    if text.startswith("perplexity"):
        assert float(effective(report["influence_vector"])) == pytest.approx(2, abs=1e-3)
        assert effective(report["influence_matrix"]).tolist() == pytest.approx([2.0] * 4, abs=1e-3)
        assert columns[0].std() > 0
    else:
        assert columns.unique().tolist() == [float(gamma)] == [{"ramp(4)": 2.0, "scaled(7)": 7.0}[text]]


def test_each_level_has_its_own(problem: Problem) -> None:
    _, report = with_gamma(problem, gamma=3, gamma_class="perplexity(2)")
    assert "gamma" not in report
    assert_close(report["influence_vector"], by_powers(problem.client_losses(), 3.0))
    assert effective(report["influence_matrix"]).tolist() == pytest.approx([2.0] * 4, abs=1e-3)
    _, report = with_gamma(problem, gamma="perplexity(2)", gamma_class=3)
    assert "gamma_class" not in report
    assert_close(report["influence_matrix"], by_powers(problem.class_losses(), 3.0))
    _, report = with_gamma(problem, method=FedC2IClient, gamma="perplexity(2)")
    assert report.keys() == {"left_out", "client_losses", "influence_vector", "gamma"}


@pytest.mark.parametrize("text", EACH)
def test_broken_models_get_nothing(problem: Problem, text: str) -> None:
    healthy, report = with_gamma(problem, gamma=text)
    problem.models.append({name: torch.full_like(tensor, NAN) for name, tensor in problem.own.items()})
    start, with_broken = with_gamma(problem, gamma=text)
    assert with_broken["influence_vector"][5] == 0
    assert (with_broken["influence_matrix"][5] == 0).all()
    assert with_broken["gamma_class"][5].isnan().all()
    assert_close(with_broken["gamma"], report["gamma"])
    for name, tensor in healthy.items():
        assert_close(start[name], tensor)
    problem.position = -1
    _, unmeasured = with_gamma(problem, gamma=text)
    assert unmeasured["gamma"].isnan()
    assert unmeasured["gamma_class"].isnan().all()


@pytest.mark.parametrize("influence", ["exact", "first-order"])
@pytest.mark.parametrize(
    ("text", "round", "number"),
    [("ramp(10)", 1, 0), ("ramp(10)", 3, 10.0), ("perplexity(5)", 2, 0), ("scaled(3)", 2, 3.0)],
)
def test_where_it_comes_to_a_number_it_is_that_to_the_bit(
    problem: Problem, text: str, round: int, number: float, influence: str
) -> None:
    got, _ = with_gamma(problem, round, gamma=text, influence=influence)
    want, _ = with_gamma(problem, round, gamma=number, influence=influence)
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor)


# Runs.


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("gamma", ["perplexity(2)", ramp(10), "scaled"])
def test_a_run_of_two_rounds(federation: Federation, model: Model, gamma: Any, executor: str) -> None:
    result = fedc2i.run("fedc2i", federation, model=model, rounds=2, epochs=1, gamma=gamma, executor=executor)
    used, columns = result.influence("gamma"), result.influence("gamma_class")
    assert (used.shape, columns.shape) == ((2, 3), (2, 3, 3, 4))
    if gamma == "perplexity(2)":
        vectors = torch.tensor(result.influence("influence_vector"))
        assert effective(vectors.permute(2, 0, 1)).flatten().tolist() == pytest.approx([2.0] * 6, abs=1e-3)
        assert (used > 0).all()
    elif gamma == "scaled":
        assert (used == 2.5).all()  # 5·(3 − 1)/4
        assert (columns == 2.5).all()
    else:
        assert used.tolist() == [[0.0] * 3, [10.0] * 3]


# Shares.


@given(
    share=st.floats(5, 100),
    losses=st.lists(st.floats(0.1, 10), min_size=3, max_size=30, unique=True),
    left_out=st.integers(0, 2),
)
@settings(max_examples=60)
def test_a_share_is_of_the_models_that_take_part(share: float, losses: list[float], left_out: int) -> None:
    values = torch.tensor(losses, dtype=torch.float64)
    valid = everyone(values)
    valid[:left_out] = False
    wanted = max(1.0, share / 100 * int(valid.sum()))
    got, gamma = perplexity(f"{share}%").weights(values, valid, unread)
    want, same = perplexity(wanted).weights(values, valid, unread)
    assert_close(got, want, rtol=1e-6, atol=1e-9)
    assert_close(gamma, same, rtol=1e-6, atol=1e-9)


def test_a_share_of_each_class_by_hand() -> None:
    """Two of four, where the largest two are equal and far above the others: half each."""
    losses = torch.tensor([[4.0, 1e-3], [4.0, 4.0], [1e-3, 4.0], [1e-3, 1e-3]])
    weights, _ = perplexity("50%").weights(losses, everyone(losses), unread)
    want = torch.tensor([[0.5, 0.0], [0.5, 0.5], [0.0, 0.5], [0.0, 0.0]])
    assert_close(weights, want, atol=1e-3, rtol=0)
