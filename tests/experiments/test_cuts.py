"""Cuts of the training data: what is held out, and that a study prints every method."""

from __future__ import annotations

import pytest
import torch

import fedc2i
from experiments import cuts


@pytest.mark.parametrize("in_time", [True, False])
def test_a_quarter_of_every_class_is_tested_and_not_trained_on(in_time: bool) -> None:
    whole = fedc2i.load("heart")
    for before, after in zip(whole.clients, cuts.cut(whole, 3, in_time).clients, strict=True):
        for label in before.train.y.unique():
            count = int((before.train.y == label).sum())
            assert int((after.test.y == label).sum()) == round(count / 4)
        both = torch.cat([after.train.x, after.test.x])
        assert sorted(map(tuple, both.tolist())) == sorted(map(tuple, before.train.x.tolist()))


def test_time_order_tests_on_the_last() -> None:
    whole = fedc2i.load("heart")
    (first, *_), (other, *_) = whole.clients, cuts.cut(whole, 0, in_time=True).clients
    tested = {tuple(row) for row in other.test.x.tolist()}
    assert tuple(first.train.x[-1].tolist()) in tested
    assert tuple(first.train.x[0].tolist()) not in tested


def test_other_numbers_are_other_cuts() -> None:
    whole = fedc2i.load("heart")
    one, two = (cuts.cut(whole, number).clients[0].test.x for number in (0, 1))
    assert not torch.equal(one, two)


@pytest.mark.slow
def test_the_command_prints_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert cuts.main(["--cuts", "0", "--seeds", "1", "--methods", "fedavg", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["local", "fedavg"]
    assert "+0.00 / +0.00" in lines[0]
