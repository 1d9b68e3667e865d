"""Median, trimmed mean and Multi-Krum: hand-computed cases, and that one wild model does not move them."""

from __future__ import annotations

import pytest
import torch

from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.median import Median
from fedc2i.methods.messages import Uploads
from fedc2i.methods.multi_krum import MultiKrum, krum_scores, squared_distances
from fedc2i.methods.trimmed_mean import TrimmedMean
from fedc2i.models.model import Model
from oracles import assert_same_model
from support.method_checks import run

ROBUST = [Median(), TrimmedMean(), MultiKrum()]


def sent(*models: list[float]) -> Uploads:
    count = len(models)
    tensors = {"w": torch.tensor(models)}
    return Uploads(tensors, tuple(range(count)), torch.full((count,), 7), torch.zeros(count, dtype=torch.int64))


def combined(method: Method, *models: list[float]) -> list[float]:
    download, state = method.combine(sent(*models), {})
    assert state == {}
    assert download.clients == tuple(range(len(models)))
    found: list[float] = download.shared["w"].tolist()
    return found


def test_the_median_is_taken_number_by_number() -> None:
    assert combined(Median(), [1.0, 9.0], [2.0, -4.0], [30.0, 5.0]) == [2.0, 5.0]
    assert combined(Median(), [1.0], [2.0], [4.0], [1e30]) == [3.0]
    assert combined(Median(), [1.0], [2.0]) == [1.5]
    assert combined(Median(), [8.0]) == [8.0]


def test_the_trimmed_mean_leaves_the_extremes_of_each_number_out() -> None:
    models = [1.0, 50.0], [2.0, 1.0], [3.0, 2.0], [7.0, 3.0], [100.0, -9.0]
    assert combined(TrimmedMean(), *models) == [4.0, 2.0]  # (2+3+7)/3 and (1+2+3)/3
    assert combined(TrimmedMean(trim=0.4), *models) == [3.0, 2.0]  # two at each end: the median
    assert combined(TrimmedMean(trim=0), *models) == pytest.approx([22.6, 9.4])


@pytest.mark.parametrize(
    ("count", "trim", "left"),
    [(4, 0.2, 2), (3, 0.2, 1), (2, 0.2, 2), (1, 0.4, 1), (30, 0.1, 24), (10, 0.49, 2), (5, 0.0, 5)],
)
def test_how_many_are_left(count: int, trim: float, left: int) -> None:
    # 1 at the places in the middle, and a different huge number at every other
    cut = (count - left) // 2
    values = [-1e6 - k for k in range(cut)] + [1.0] * left + [2e6 + k for k in range(cut)]
    assert combined(TrimmedMean(trim=trim), *([value] for value in values)) == pytest.approx([1.0])


def test_krum_by_hand() -> None:
    models = [0.0], [1.0], [3.0], [4.0], [20.0]
    distances = squared_distances(sent(*models).tensors)
    assert distances.tolist() == [
        [0, 1, 9, 16, 400],
        [1, 0, 4, 9, 361],
        [9, 4, 0, 1, 289],
        [16, 9, 1, 0, 256],
        [400, 361, 289, 256, 0],
    ]
    assert krum_scores(distances, 1).tolist() == [10, 5, 5, 10, 545]  # the two nearest of each
    assert combined(MultiKrum(), *models) == [2.0]  # all but the last: (0+1+3+4)/4
    assert combined(MultiKrum(keep=1), *models) == [1.0]  # a tie goes to the first
    assert combined(MultiKrum(keep=2), *models) == [2.0]  # (1+3)/2
    assert combined(MultiKrum(attackers=0), *models) == pytest.approx([5.6])
    assert combined(MultiKrum(keep=99), *models) == pytest.approx([5.6])


def test_krum_with_few_clients_or_many_attackers() -> None:
    assert krum_scores(squared_distances(sent([0.0], [1.0], [5.0]).tensors), 1).tolist() == [1, 1, 16]
    assert combined(MultiKrum(), [0.0], [1.0], [5.0]) == [0.5]  # one neighbour, though n − f − 2 is 0
    assert combined(MultiKrum(attackers=9), [0.0], [4.0], [5.0]) == [4.0]  # one is kept, though n − f is below 0
    assert combined(MultiKrum(), [2.0], [4.0]) == [3.0]
    assert combined(MultiKrum(), [2.0]) == [2.0]


def test_distances_are_over_all_tensors_and_survive_a_huge_model() -> None:
    models = {"a": torch.tensor([[0.0, 1.0], [3.0, 1.0], [1e20, 1e20]]), "b": torch.tensor([[0.0], [4.0], [-1e20]])}
    found = squared_distances(models)
    assert found[0, 1].item() == found[1, 0].item() == 25
    assert found[0, 2].item() == pytest.approx(3e40)


@pytest.mark.parametrize("method", ROBUST, ids=lambda method: method.name)
def test_one_wild_model_of_five_hardly_counts(method: Method) -> None:
    models = [[1.0, 2.0], [1.1, 2.1], [0.9, 1.9], [1.0, 2.0]]
    for wild in ([1e30, -1e30], [-50.0, 50.0], [0.0, 0.0]):
        got = combined(method, *models[:2], wild, *models[2:])
        assert got == pytest.approx([1.0, 2.0], abs=0.11), wild
        assert combined(FedAvg(), *models[:2], wild, *models[2:]) != pytest.approx([1.0, 2.0], abs=0.11)


@pytest.mark.parametrize("method", [TrimmedMean(trim=0), MultiKrum(attackers=0)], ids=lambda method: method.name)
def test_with_nothing_left_out_it_is_fedavg(method: Method, model: Model, federation: Federation) -> None:
    ours, mean = (run(own, model, federation)[0] for own in (method, FedAvg()))
    assert_same_model(ours.received, mean.received, rtol=0, atol=0)
