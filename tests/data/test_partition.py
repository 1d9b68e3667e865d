from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Federation, Split, stratified_order
from fedc2i.data.partition import partition


def numbered(labels: list[int], start: int = 0) -> Split:
    """Images whose first two bytes number them."""
    y = np.array(labels, dtype=np.int64)
    x = np.zeros((len(y), 8, 8), np.uint8)
    x[:, 0, 0], x[:, 0, 1] = divmod(np.arange(start, start + len(y)), 256)
    return Split.from_numpy(x, y)


def numbers(split: Split) -> list[int]:
    return [int(x[0, 0, 0]) * 256 + int(x[0, 0, 1]) for x in split.x]


def client(name: str, train: list[int], test: list[int], validation: list[int]) -> Client:
    return Client(name, numbered(train), numbered(validation, 20_000), numbered(test, 40_000))


def even(per_class: int = 40, classes: int = 5) -> Federation:
    labels = [c for c in range(classes) for _ in range(per_class)]
    sites = (client("a", labels, labels, labels[::4]), client("b", labels[::2], labels[::2], []))
    return Federation("even", sites, tuple(map(str, range(classes))))


SPECS = ("iid:4", "dirichlet:4:0.5", "shards:4:2", "quantity:4:0.8")
labels_lists = st.lists(st.integers(0, 4), min_size=12, max_size=80)


@given(labels_lists, labels_lists, st.lists(st.integers(0, 4), max_size=15), st.integers(0, 2**32), st.data())
@settings(max_examples=120, deadline=None)
def test_every_sample_is_in_exactly_one_client_and_tests_follow_training(
    train: list[int], test: list[int], validation: list[int], seed: int, data: st.DataObject
) -> None:
    spec = data.draw(st.sampled_from(("iid:3", "dirichlet:2:1.0", "dirichlet:3:5", "shards:3:2", "quantity:3:2")))
    whole = Federation("any", (client("c", train, test, validation),), tuple("01234"))
    try:
        parts = partition(whole, spec, seed).clients
    except UserError:
        reject()
    count = int(spec.split(":")[1])
    assert [part.name for part in parts] == [f"c/{k + 1}" for k in range(count)]
    for name in ("train", "validation", "test"):
        got = sorted(number for part in parts for number in numbers(getattr(part, name)))
        assert got == sorted(numbers(getattr(whole.clients[0], name)))
    assert min(len(part.train) for part in parts) >= 2
    assert min(len(part.test) for part in parts) >= 1
    counts = {
        name: np.stack([np.bincount(getattr(part, name).y, minlength=5) for part in parts])
        for name in ("train", "validation", "test")
    }
    sizes = counts["train"].sum(axis=1, keepdims=True)
    in_class = counts["train"].sum(axis=0)
    shares = np.where(in_class > 0, counts["train"] / np.maximum(in_class, 1), sizes / sizes.sum())
    for name in ("validation", "test"):
        assert (abs(counts[name] - shares * counts[name].sum(axis=0)) < 1).all()


@pytest.mark.parametrize("spec", SPECS)
def test_deterministic_in_seed_without_global_state(spec: str) -> None:
    first = partition(even(), spec, seed=3)
    random.seed(0)
    torch.manual_seed(0)
    state = torch.random.get_rng_state()
    again = partition(even(), spec, seed=3)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert first.checksums == again.checksums
    assert first.checksums != partition(even(), spec, seed=4).checksums
    assert first.name == f"even [{spec}]"
    assert spec in first.notes[-1]


def test_a_client_is_split_alike_in_any_company() -> None:
    alone = partition(even().select(["b"]), "dirichlet:4:0.5").checksums
    together = partition(even(), "dirichlet:4:0.5").checksums
    assert alone == {name: together[name] for name in ("b/1", "b/2", "b/3", "b/4")}
    assert len(together) == 8


def test_averages_follow_their_clients() -> None:
    whole = replace(even(), averages={"Avg of b": ("b",)})
    assert partition(whole, "iid:2").averages == {"Avg of b": ("b/1", "b/2")}


def test_iid_sizes_are_equal_and_one_client_keeps_all() -> None:
    assert [len(part.train) for part in partition(even(), "iid:3").clients[:3]] == [67, 67, 66]
    (only, _) = partition(even(), "iid:1").clients
    assert numbers(only.train) == numbers(even().clients[0].train)


def test_shards_limit_the_classes_of_a_client() -> None:
    for part in partition(even(), "shards:5:2").clients[:5]:
        assert len(part.train) == 40
        assert len(set(part.train.y.tolist())) <= 2
        assert set(part.test.y.tolist()) == set(part.train.y.tolist())


def skew(spec: str) -> float:
    parts = partition(even(), spec, seed=1).clients[:4]
    shares = [np.bincount(part.train.y, minlength=5) / len(part.train) for part in parts]
    return float(np.abs(np.stack(shares) - 0.2).mean())


def test_a_smaller_alpha_is_more_skewed() -> None:
    assert skew("dirichlet:4:1000") < 0.05 < skew("dirichlet:4:0.3")
    sizes = {a: [len(c.train) for c in partition(even(), f"quantity:4:{a}", 1).clients[:4]] for a in ("0.5", "1000")}
    assert np.ptp(sizes["1000"]) < 20 < np.ptp(sizes["0.5"])
    assert skew("quantity:4:1000") < 0.1


def test_a_class_that_is_only_tested_goes_by_size() -> None:
    whole = Federation("w", (client("c", [0] * 40, [0] * 4 + [1] * 8, []),), ("0", "1"))
    for part in partition(whole, "iid:4").clients:
        assert part.test.y.tolist() == [0, 1, 1]


@pytest.mark.parametrize(
    "spec",
    [
        *("", "iid", "iid:0", "iid:-1", "iid:2.5", "iid:2:1", "iid:٣", "iid:1_0", "iid: 3", "iid:" + "9" * 5000),
        *("dirichlet:3", "dirichlet:3:0", "dirichlet:3:-1", "dirichlet:3:nan", "dirichlet:3:inf", "dirichlet:3:x"),
        *("shards:3:0", "shards:3:1.5", "quantity:3:1e9", "Iid:3", "pathological:3:2"),
    ],
)
def test_malformed_specs_list_the_allowed_forms(spec: str) -> None:
    with pytest.raises(UserError, match="is not understood, allowed are iid:K, dirichlet:K:ALPHA, shards:K:S or"):
        partition(even(), spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("iid:101", "'a' has 200 training samples but at least 202 are needed; use a smaller K$"),
        ("iid:999999999", "use a smaller K$"),
        ("shards:50:5", "'a' has 200 training samples but at least 250 are needed; use a smaller K or S"),
        ("dirichlet:101:1", "use a smaller K$"),
        ("quantity:40:0.001", "after 100 redraws some new client still has fewer than 2 .*K or a larger ALPHA$"),
    ],
)
def test_impossible_settings(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        partition(even(), spec)


def test_too_few_test_samples_and_min_samples() -> None:
    whole = Federation("w", (client("c", [0, 1] * 20, [0, 1], []),), ("0", "1"))
    with pytest.raises(UserError, match="'c' has 2 test samples but at least 3 are needed"):
        partition(whole, "iid:3")
    with pytest.raises(UserError, match="40 training samples but at least 42 are needed"):
        partition(whole, "iid:2", min_samples=21)
    assert [len(part.test) for part in partition(whole, "iid:2", min_samples=20).clients] == [1, 1]


def test_stratified_order_by_hand() -> None:
    labels = np.array([0, 0, 0, 0, 1, 1])
    keys = np.array([4.0, 3.0, 2.0, 1.0, 6.0, 5.0])
    # class 0 stands at 1/8, 3/8, 5/8, 7/8 in the order of its keys, class 1 at 1/4 and 3/4
    assert stratified_order(labels, keys).tolist() == [3, 5, 2, 1, 4, 0]
    one_of_five = np.array([0, 1, 1, 1, 1])  # at 1/2, between those at 1/8, 3/8, 5/8 and 7/8
    assert stratified_order(one_of_five, np.arange(5)).tolist() == [1, 2, 0, 3, 4]
