"""Class prototypes by hand: padding, chunks, missing classes."""

from __future__ import annotations

import pytest
import torch
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
