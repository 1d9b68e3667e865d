"""One short run on each real benchmark: the data, the model and influence work together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedc2i
from fedc2i.engine.records import POINTS
from fedc2i.runs.results import Result
from support.real_data import SHARED, needs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))


def averages(result: Result) -> dict[str, float]:
    return {point: result.scores(point)["Avg"].mean for point in POINTS}


def assert_influence(result: Result, clients: int, classes: int) -> None:
    """λ and Λ of every round are there, sum to one, and are not all equal shares."""
    vectors, matrices = result.influence("influence_vector"), result.influence("influence_matrix")
    rounds = result.config.rounds
    assert vectors.shape == (rounds, clients, clients)
    assert matrices.shape == (rounds, clients, clients, classes)
    np.testing.assert_allclose(vectors.sum(2), 1, atol=1e-5)
    np.testing.assert_allclose(matrices.sum(2), 1, atol=1e-5)
    assert np.abs(vectors - 1 / clients).max() > 1e-3


@pytest.mark.slow
@needs("digit5")
def test_digit5() -> None:
    settings = {"model": "lenet5", "rounds": 2, "epochs": 1, "evaluate_every": 2, "device": "cpu"}
    results = fedc2i.compare(["fedavg", "fedc2i"], "digit5", data_dir=str(SHARED), **settings)
    for result in results:
        assert averages(result)["received"] > 18  # chance is 10 %
        assert averages(result)["trained"] > 25
    assert_influence(results[1], clients=5, classes=10)


@needs("office10")
def test_office10() -> None:
    result = fedc2i.run("fedc2i", "office10", data_dir=str(SHARED), model="lenet5", rounds=2, device="cpu")
    assert min(averages(result).values()) > 20  # chance is 10 %
    assert_influence(result, clients=4, classes=10)
