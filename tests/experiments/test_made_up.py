"""Federations that are made to try methods on: their clients, other draws, and what a study prints."""

from __future__ import annotations

import pytest
import torch

from experiments import made_up

CLIENTS = {"one_distribution": 10, "contradiction": 8, "label_skew": 15, "by_quantile": 6, "rotated": 4}


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_client_has_samples_to_train_and_to_test(kind: str) -> None:
    one, same, other = (made_up.federation(kind, number) for number in (100, 100, 101))
    assert len(one.clients) == CLIENTS[kind]
    assert all(len(own.train) and len(own.test) and not len(own.validation) for own in one.clients)
    assert torch.equal(one.clients[0].train.x, same.clients[0].train.x)
    assert not torch.equal(one.clients[0].train.x[:5], other.clients[0].train.x[:5])


@pytest.mark.slow
def test_sharing_helps_where_it_must_and_the_guard_limits_harm(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = ("one_distribution", "contradiction")
    command = ["--data", *kinds, "--methods", "fedavg", "fedc2i-plus", "--draws", "1", "--device", "cpu"]
    assert made_up.main(command) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {(kind, method): float(before) for kind, method, before, *_ in lines}
    assert found["one_distribution", "fedavg"] > found["one_distribution", "fedc2i-plus"]
    assert found["one_distribution", "fedc2i-plus"] > found["one_distribution", "local"]
    assert found["contradiction", "fedavg"] < found["contradiction", "local"] - 5
    assert found["contradiction", "fedc2i-plus"] > found["contradiction", "local"] - 3
