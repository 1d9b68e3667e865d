"""Small simulated runs of several seeds, and comparisons of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from oracles import assert_same_model

Run = tuple[dict[int, Outcome], list[Round]]


def simulated(
    method: Method, model: Model, federation: Federation, seeds: Sequence[int] = (0,), **settings: Any
) -> Run:
    """Outcomes by seed, and the reports of all rounds."""
    reports: list[Round] = []
    usual = {"rounds": 2, "batch_size": 5, "lr": 0.01, "executor": "looped"}
    how = EngineSettings(**{**usual, **settings})
    return simulate(method, model, federation, how, seeds, on_round=reports.append), reports


def run(
    method: Method, model: Model, federation: Federation, rounds: int = 3, seed: int = 0, **settings: Any
) -> tuple[Outcome, list[Round]]:
    """One seed, with the report of every round."""
    outcomes, reports = simulated(method, model, federation, (seed,), rounds=rounds, **settings)
    return outcomes[seed], reports


def assert_same_outcome(got: Outcome, want: Outcome, rtol: float = 0, atol: float = 0) -> None:
    """The models at both points."""
    assert_same_model(got.trained, want.trained, rtol, atol)
    assert_same_model(got.received, want.received, rtol, atol)


def differs(got: Outcome, want: Outcome) -> bool:
    """Whether the heads after training do."""
    return not torch.equal(got.trained["head.weight"], want.trained["head.weight"])


def assert_same_run(got: Run, want: Run) -> None:
    """To the bit."""
    assert got[0].keys() == want[0].keys()
    for seed, outcome in want[0].items():
        assert_same_model(got[0][seed].trained, outcome.trained, 0, 0)
        assert_same_model(got[0][seed].received, outcome.received, 0, 0)
    for one, two in zip(got[1], want[1], strict=True):
        assert replace(one, seconds=0, influence={}) == replace(two, seconds=0, influence={})
        assert one.influence.keys() == two.influence.keys()
        for name, array in one.influence.items():
            assert array.tobytes() == two.influence[name].tobytes(), name


def assert_close_run(got: Run, want: Run, rtol: float) -> None:
    """All models by norm, all scores and diagnostics number by number."""
    assert got[0].keys() == want[0].keys()
    for seed, outcome in want[0].items():
        for mine, theirs in ((got[0][seed].trained, outcome.trained), (got[0][seed].received, outcome.received)):
            assert list(mine) == list(theirs)
            for name, tensor in theirs.items():
                assert mine[name].dtype == tensor.dtype, name
                assert torch.isfinite(tensor).all(), name
                own, other = mine[name].double(), tensor.double()
                assert torch.dist(own, other) <= rtol * other.norm() + 1e-9, f"{name}: {torch.dist(own, other)}"
    for one, two in zip(got[1], want[1], strict=True):
        assert (one.seed, one.round, one.participants) == (two.seed, two.round, two.participants)
        assert (one.bytes_up, one.bytes_down, one.refused) == (two.bytes_up, two.bytes_down, two.refused)
        assert one.metrics.keys() == two.metrics.keys()
        for point, metrics in two.metrics.items():
            for a, b in zip(one.metrics[point], metrics, strict=True):
                assert a == pytest.approx(b, rel=10 * rtol)
        assert one.influence.keys() == two.influence.keys()
        for kind, values in two.influence.items():
            np.testing.assert_allclose(one.influence[kind], values, rtol=1e-3, atol=1e-5)
