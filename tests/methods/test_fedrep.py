"""FedRep: which part is trained when, what is shared, and what a client starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fedc2i.core.params import select
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Phase
from fedc2i.methods.fedrep import FedRep
from fedc2i.models.model import Model, scale, split
from oracles import assert_same_model
from oracles.fedrep import local_run
from support.method_checks import (
    TRAINING,
    local_client,
    place,
    run,
)


@pytest.mark.parametrize(
    ("epochs", "body_epochs", "want"),
    [
        (2, 1, (Phase(1, "head"), Phase(1, "body"))),
        (5, 1, (Phase(4, "head"), Phase(1, "body"))),
        (15, 5, (Phase(10, "head"), Phase(5, "body"))),
        (3, 9, (Phase(1, "head"), Phase(2, "body"))),
        (1, 1, (Phase(1, "all"),)),
    ],
)
def test_how_epochs_are_shared_out(epochs: int, body_epochs: int, want: Sequence[Phase]) -> None:
    assert FedRep(body_epochs=body_epochs).phases(epochs) == want


@dataclass(frozen=True)
class OnePart(FedRep):
    part: Any = "head"

    def phases(self, epochs: int) -> Sequence[Phase]:
        return (Phase(epochs, self.part),)


@pytest.mark.parametrize("part", ["head", "body"])
def test_the_other_part_is_frozen_with_its_statistics(
    part: str, make_model: Callable[..., Model], federation: Federation
) -> None:
    model = make_model(batch_norm=True)
    start = model.init(0)
    trained = local_client(OnePart(part=part), model, federation).train(start, {}, -1, 1)
    moved = {name for name, tensor in trained.items() if not torch.equal(tensor, start[name])}
    assert moved == set(model.head_names if part == "head" else model.body_names)


def test_local_run_is_the_oracle_s(federation: Federation) -> None:
    def build() -> nn.Module:
        hidden = nn.Linear(768, 6, bias=False)  # before a norm a bias has no gradient but noise
        return nn.Sequential(nn.Flatten(), hidden, nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))

    model, data = split(build, head="4"), place(federation)
    start = model.init(0)
    client = local_client(FedRep(), model, federation)
    trained = client.train(start, {}, -1, 1)
    net = build()
    net.load_state_dict(start)
    head, body = client.context.epochs(data, 1)
    x = scale(data.train.x, torch.float32)
    want = local_run(net, x, data.train.y, head, body, lambda leaves: torch.optim.Adam(leaves, lr=TRAINING.lr))
    assert_same_model(trained, want, rtol=1e-4, atol=1e-5)


def test_clients_receive_the_mean_body_and_keep_their_head(model: Model, federation: Federation) -> None:
    outcome, _ = run(FedRep(), model, federation)
    for name in model.body_names:
        assert torch.allclose(
            outcome.received[name], outcome.trained[name].mean(0).expand(3, *outcome.trained[name][0].shape)
        )
    heads = select(outcome.trained, model.head_names)
    assert_same_model(select(outcome.received, model.head_names), heads, rtol=0, atol=0)
    assert not torch.equal(heads["head.weight"][0], heads["head.weight"][1])
