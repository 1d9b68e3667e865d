"""Models as mappings of tensors: stacking, means, and what drops out of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from fedc2i.core import params
from fedc2i.core.params import Params


def numbered(count: int) -> list[Params]:
    return [{"b": torch.full((2, 3), float(k)), "a": torch.tensor([k, 10.0 * k])} for k in range(count)]


def test_stack_and_row_are_inverse_and_keep_the_order_of_names() -> None:
    models = numbered(3)
    stacked = params.stack(models)
    assert list(stacked) == ["b", "a"]
    assert stacked["b"].shape == (3, 2, 3)
    for k, model in enumerate(models):
        assert all(torch.equal(params.row(stacked, k)[name], tensor) for name, tensor in model.items())
    assert params.stack([]) == {}


def test_rows_and_replace_rows() -> None:
    stacked = params.stack(numbered(4))
    assert params.rows(stacked, [3, 1])["a"].tolist() == [[3, 30], [1, 10]]
    new = params.stack([{"b": torch.zeros(2, 3), "a": torch.tensor([-1.0, -2.0])}])
    replaced = params.replace_rows(stacked, [2], new)
    assert replaced["a"].tolist() == [[0, 0], [1, 10], [-1, -2], [3, 30]]
    assert stacked["a"][2].tolist() == [2, 20]  # the original is untouched


def with_counters(count: int) -> params.Stacked:
    """Models with an integer, a boolean and an empty tensor."""
    extra = {"n": torch.arange(count), "f": torch.arange(count) % 2 == 0, "e": torch.zeros(count, 0)}
    return {**params.stack(numbered(count)), **extra}


@pytest.mark.parametrize("kind", [list, tuple])
def test_all_rows_in_order_are_the_stack_itself(kind: type) -> None:
    stacked = with_counters(3)
    everyone = params.rows(stacked, kind([0, 1, 2]))
    assert all(everyone[name] is tensor for name, tensor in stacked.items())
    assert params.rows(stacked, kind([0, 2, 1]))["n"].tolist() == [0, 2, 1]
    assert params.rows(stacked, kind([0, 1]))["n"].tolist() == [0, 1]
    assert params.rows(stacked, kind([0, 1, 2, 0]))["n"].tolist() == [0, 1, 2, 0]


def test_no_rows() -> None:
    none = params.rows(with_counters(3), [])
    shapes = {name: tuple(tensor.shape) for name, tensor in none.items()}
    assert shapes == {"b": (0, 2, 3), "a": (0, 2), "n": (0,), "f": (0,), "e": (0, 0)}
    assert params.rows({}, [0, 1]) == {}
    same = params.replace_rows(with_counters(3), [], none)
    assert all(torch.equal(same[name], tensor) for name, tensor in with_counters(3).items())


def test_replacing_all_rows_or_some_keeps_types_and_the_order_of_names() -> None:
    stacked = with_counters(3)
    new = {
        "e": torch.zeros(3, 0),
        "f": torch.tensor([False, False, True]),
        "n": torch.tensor([7, 8, 9], dtype=torch.int32),
        "a": torch.full((3, 2), -1.0).double(),
        "b": torch.full((3, 2, 3), -2.0),
    }
    everyone = params.replace_rows(stacked, [0, 1, 2], new)
    turned = params.replace_rows(stacked, (2, 1, 0), new)
    for got, order in ((everyone, [0, 1, 2]), (turned, [2, 1, 0])):
        assert list(got) == list(stacked)
        for name, tensor in stacked.items():
            assert got[name].dtype == tensor.dtype
            assert torch.equal(got[name], new[name].to(tensor.dtype)[order])
    assert stacked["n"].tolist() == [0, 1, 2]  # the original is untouched


@pytest.mark.parametrize("keep", [["a", "zz"], lambda name: name == "a"])
def test_select(keep: object) -> None:
    assert list(params.select(numbered(1)[0], keep)) == ["a"]


def test_floating_leaves_counters_out() -> None:
    mixed = {"w": torch.zeros(1), "n": torch.tensor(3), "h": torch.zeros(1, dtype=torch.float64)}
    assert list(params.floating(mixed)) == ["w", "h"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16, 17, 40])
def test_mix_is_the_sum_of_products(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    stacked = {"w": torch.randn(count, 4, 3, generator=generator).double(), "b": torch.randn(count, 4).double()}
    weights = torch.rand(count, generator=generator).double()
    got = params.mix(weights, stacked)
    for name, tensor in stacked.items():
        assert got[name].dtype == tensor.dtype
        assert_close(got[name], sum(weights[k] * tensor[k] for k in range(count)))
    by_class = torch.rand(count, 4, generator=generator).double()
    got_tensor = params.mix_tensor(by_class, stacked["w"])
    for c in range(4):
        assert_close(got_tensor[c], sum(by_class[k, c] * stacked["w"][k, c] for k in range(count)))


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 40), classes=st.integers(1, 12), seed=st.integers(0, 1000))
def test_mix_gives_the_same_bits_whichever_shape_the_weights_have(count: int, classes: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    stacked, weights = torch.randn(count, classes, 5, generator=generator), torch.rand(count, generator=generator)
    assert torch.equal(
        params.mix_tensor(weights, stacked), params.mix_tensor(weights[:, None].expand(-1, classes), stacked)
    )


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_finite_and_zero_where_not(bad: float) -> None:
    stacked = params.stack(numbered(3))
    stacked["a"][1, 0] = bad
    stacked["n"] = torch.tensor([5, 6, 7])
    valid = params.finite(stacked)
    assert valid.tolist() == [True, False, True]
    clean = params.zero_where_not(valid, stacked)
    assert clean["a"].tolist() == [[0, 0], [0, 0], [2, 20]]
    assert clean["b"].sum().item() == 12
    assert clean["n"].tolist() == [5, 0, 7]


def test_finite_where_there_is_nothing_to_look_at() -> None:
    counters = {"n": torch.tensor([5, 6]), "f": torch.tensor([True, False]), "e": torch.zeros(2, 0)}
    assert params.finite(counters).tolist() == [True, True]
    assert params.finite({**counters, "w": torch.tensor([1.0, float("nan")])}).tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_finite_of_the_largest_numbers(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    stacked = {
        "w": torch.tensor([[largest, 0], [-largest, 1], [0, float("inf")], [float("nan"), largest]], dtype=dtype)
    }
    assert params.finite(stacked).tolist() == [True, True, False, False]


def test_prefixes_come_and_go() -> None:
    one = {"b.weight": torch.ones(1), "a": torch.zeros(1)}
    both = params.prefixed("server1/", one) | params.prefixed("server10/", {"c": torch.ones(2)})
    assert list(both) == ["server1/b.weight", "server1/a", "server10/c"]
    assert list(params.unprefixed("server1/", both)) == ["b.weight", "a"]
    assert params.unprefixed("server1/", both)["a"] is one["a"]
    assert params.unprefixed("server2/", both) == {}
