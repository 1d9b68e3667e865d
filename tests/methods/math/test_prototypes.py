"""Class prototypes by hand: padding, chunks, missing classes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import vmap

from fedc2i.methods.math import prototypes
from fedc2i.training.local import Batch

FEATURES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 0.0], [100.0, 100.0]])
Y = torch.tensor([0, 0, 2, 0])
W = torch.tensor([1.0, 1.0, 1.0, 0.0])  # the last one is padding


def test_class_means_by_hand() -> None:
    means, counts = prototypes.class_means(FEATURES, Y, W, 3)
    assert means.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 0.0]]
    assert counts.tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize("at_once", [1, 2, 3, 4, 100])
def test_chunks_make_no_difference(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "AT_ONCE", at_once)
    seen: list[int] = []

    def features(x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return x

    means, counts = prototypes.prototypes(features, Batch(FEATURES, Y, W), 3)
    assert means.tolist() == [[2.0, 3.0], [0.0, 0.0], [5.0, 0.0]]
    assert counts.tolist() == [2.0, 0.0, 1.0]
    assert sum(seen) == 4
    assert max(seen) <= at_once


def test_it_lifts_over_clients() -> None:
    data = Batch(torch.stack([FEATURES, 2 * FEATURES]), torch.stack([Y, Y]), torch.stack([W, W]))
    means, counts = vmap(lambda own: prototypes.prototypes(lambda x: x, own, 3))(data)
    assert means[1].tolist() == [[4.0, 6.0], [0.0, 0.0], [10.0, 0.0]]
    assert counts.tolist() == [[2.0, 0.0, 1.0]] * 2


def test_average_by_hand() -> None:
    means = torch.tensor([[[2.0], [7.0], [0.0]], [[5.0], [0.0], [0.0]]])  # two clients, three classes
    weights = torch.tensor([[1.0, 4.0, 0.0], [2.0, 0.0, 0.0]])
    found = prototypes.average(means, weights)
    assert found.prototypes.flatten().tolist() == pytest.approx([4.0, 7.0, 0.0])
    assert found.known.tolist() == [True, True, False]
    assert found.distances(torch.tensor([[5.0], [5.0]]), torch.tensor([1, 2])).tolist() == [4.0, 0.0]


def test_bounded_by_hand() -> None:
    means = torch.tensor([[[3.0, 4.0], [0.0, 1.0]], [[30.0, 40.0], [9.0, 9.0]], [[0.0, 6.0], [2.0, 0.0]]])
    present = torch.tensor([[True, True], [True, False], [True, True]])
    found = prototypes.bounded(means, present)
    assert found[:, 0].norm(dim=1).tolist() == pytest.approx([5.0, 6.0, 6.0])  # lengths were 5, 50 and 6
    assert found[1, 0].tolist() == pytest.approx([3.6, 4.8])
    assert found[:, 1].norm(dim=1)[present[:, 1]].tolist() == [1.0, 1.0]  # lengths of those who have it were 1 and 2


def test_bounded_leaves_alone_what_has_one_length_and_what_nobody_has() -> None:
    means = torch.tensor([[[1.0, 0.0], [5.0, 5.0]], [[0.0, 1.0], [0.0, 0.0]], [[-1.0, 0.0], [0.0, 0.0]]])
    present = torch.tensor([[True, False], [True, False], [True, False]])
    assert torch.equal(prototypes.bounded(means, present), means)


@given(st.integers(3, 9), st.floats(0, 1e6), st.integers(0, 2**31))
def test_a_minority_cannot_lengthen_the_mean(clients: int, factor: float, seed: int) -> None:
    means = torch.randn(clients, 4, 5, generator=torch.Generator().manual_seed(seed))
    longest = means.norm(dim=2).amax(0)
    means[: (clients - 1) // 2] *= factor
    found = prototypes.average(
        prototypes.bounded(means, torch.ones(clients, 4, dtype=torch.bool)), torch.ones(clients, 4)
    )
    assert (found.prototypes.norm(dim=1) <= longest * (1 + 1e-5)).all()
