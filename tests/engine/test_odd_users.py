"""What ordinary users bring along: switched-off gradients, other precisions, odd diagnostics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model, split
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import prepare
from fedc2i.training.local import Batch

PIXELS = 3 * 16 * 16
QUICK = TrainingSettings(epochs=2, batch_size=8)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(PIXELS, 6), nn.Tanh(), nn.Linear(6, 4))


@pytest.mark.parametrize("executor", ["looped", "stacked"])
def test_gradients_switched_off_by_the_caller(executor: Any, federation: Federation) -> None:
    model = split(net, head="3")
    settings = EngineSettings(rounds=1, executor=executor, **vars(QUICK))
    with torch.no_grad():
        inside = simulate(FedAvg(), model, federation, settings, [0])[0]
    outside = simulate(FedAvg(), model, federation, settings, [0])[0]
    assert torch.equal(inside.received["3.weight"], outside.received["3.weight"])


def test_users_precision_settings_are_left_as_they_were(federation: Federation) -> None:
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "ieee", "tf32"
        simulate(FedAvg(), split(net, head="3"), federation, EngineSettings(rounds=1, **vars(QUICK)), [0])
        assert (matmul.fp32_precision, conv.fp32_precision) == ("ieee", "tf32")
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


def test_diagnostics_about_oneself(federation: Federation, make_model: Callable[..., Model]) -> None:
    @dataclass(frozen=True)
    class Chatty(FedAvg):
        name = "chatty"
        title = "Chatty"

        def personalise(self, own: Params, batch: Batch | None, site: Site) -> tuple[Params, Mapping[str, Tensor]]:
            start, _ = super().personalise(own, batch, site)
            return start, {"samples": site.counts.sum(), "counts": site.counts}

    reports = []
    settings = EngineSettings(rounds=2, clients_per_round=2, evaluate_every=2, **vars(QUICK))
    simulate(Chatty(), make_model(), federation, settings, [0], on_round=reports.append)
    sizes = np.array([len(client.train) for client in federation.clients], dtype=np.float32)
    assert (reports[1].influence["samples"] == sizes).all()
    assert reports[1].influence["counts"].shape == (3, 4)
    assert np.isnan(reports[0].influence["samples"]).sum() == 1  # not evaluated: only the next round's two clients


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(UserError, match=r"the name 'fedavg' is taken by fedc2i\.methods\.fedavg"):
        type("Impostor", (Method,), {"name": "fedavg", "title": "Impostor"})
    assert Method.registry["fedavg"] is FedAvg


def test_an_inherited_name_is_no_name(federation: Federation) -> None:
    @dataclass(frozen=True)
    class Nameless(FedAvg):
        mine: int = 1

    with pytest.raises(UserError, match="Nameless needs its own class attributes name and title"):
        prepare([Nameless()], {}, federation)


def test_results_print_briefly(federation: Federation) -> None:
    (plan,) = prepare(["fedavg"], {"rounds": 1, "epochs": 1}, federation, "lenet5")
    assert len(repr(federation)) < 1000
    result = execute(plan)
    assert repr(result).startswith("<Result of FedAvg on toy, seeds [0]: accuracy ")
    assert len(repr(result.outcomes)) < 200
