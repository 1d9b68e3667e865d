"""Clients whose training diverges: they are rejected, and the others go on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from fedc2i.core.params import Params, rows
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.model import Model
from fedc2i.training.local import Batch
from oracles import assert_same_model
from support.simulation import run


def poisoned(base: type[Method], samples: set[int], first: int = 1) -> Method:
    """The method, with uploads of the clients of these sizes turned to nan from round ``first`` on."""

    @dataclass(frozen=True)
    class Poisoned(base):  # type: ignore[misc, valid-type]
        def upload(self, params: Params, data: Batch, site: Site) -> Params:
            hit = sum((site.counts.sum() == size for size in samples), torch.tensor(False))
            factor = torch.where(hit.bool() & torch.tensor(site.round >= first), torch.nan, 1.0)
            return {name: tensor * factor for name, tensor in super().upload(params, data, site).items()}

    return Poisoned()


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("base", [FedAvg, FedC2I])
def test_a_client_that_diverges_is_refused_and_the_others_go_on(
    base: type[Method], executor: str, model: Model, federation: Federation
) -> None:
    outcome, reports = run(poisoned(base, {20}), model, federation, executor=executor)
    assert [report.refused for report in reports] == [("b",)] * 3
    assert all(torch.isfinite(tensor).all() for tensor in outcome.received.values())
    without, _ = run(base(), model, federation.select(["a", "c"]), executor=executor)
    assert_same_model(rows(outcome.trained, [0, 2]), without.trained, rtol=1e-4, atol=1e-6)
    if base is FedC2I:
        vector = reports[-1].influence["influence_vector"]
        assert np.isnan(vector[:, 1]).all()  # never received
        np.testing.assert_allclose(vector[0, [0, 2]].sum(), 1, rtol=1e-5)


def test_the_earlier_upload_of_a_client_that_diverges_later_stays(model: Model, federation: Federation) -> None:
    _, healthy = run(FedC2I(), model, federation, rounds=1)
    _, reports = run(poisoned(FedC2I, {20}, first=2), model, federation, rounds=2)
    assert [report.refused for report in reports] == [(), ("b",)]
    np.testing.assert_array_equal(reports[0].influence["influence_vector"], healthy[0].influence["influence_vector"])
    assert np.isfinite(reports[1].influence["influence_vector"]).all()


def test_training_that_really_diverges_does_not_reach_the_others(
    make_model: Callable[..., Model], federation: Federation
) -> None:
    model = make_model()

    @dataclass(frozen=True)
    class Explosive(FedAvg):
        def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
            return super().loss(params, batch, site) * torch.where(site.counts.sum() == 7, torch.inf, 1.0)

    outcome, reports = run(Explosive(), model, federation, rounds=2)
    assert [report.refused for report in reports] == [("c",), ("c",)]
    assert not torch.isfinite(outcome.trained["head.weight"][2]).all()
    assert torch.isfinite(outcome.trained["head.weight"][:2]).all()
    assert torch.isfinite(outcome.received["head.weight"]).all()  # and it starts again from the mean


@pytest.mark.parametrize("executor", ["looped", "stacked"])
@pytest.mark.parametrize("base", [FedAvg, FedC2I])
def test_when_everyone_diverges_at_once_all_keep_their_own(
    base: type[Method], executor: str, model: Model, federation: Federation
) -> None:
    outcome, reports = run(poisoned(base, {12, 20, 7}), model, federation, rounds=2, executor=executor)
    assert reports[0].refused == ("a", "b", "c")
    assert_same_model(outcome.received, outcome.trained, rtol=0, atol=0)
    assert reports[0].influence == {}
    later, _ = run(poisoned(base, {12, 20, 7}, first=2), model, federation, rounds=2, executor=executor)
    once, _ = run(base(), model, federation, rounds=1, executor=executor)
    if base is FedAvg:  # the download of round 1 is still the last one
        assert_same_model(later.received, once.received, rtol=0, atol=0)
