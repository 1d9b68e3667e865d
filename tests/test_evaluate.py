"""Accuracy and loss, counted by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedc2i.evaluate import AT_ONCE, evaluate
from fedc2i.training import Batch


def batch(x: Tensor, y: list[int]) -> Batch:
    return Batch(x, torch.tensor(y), torch.ones(len(y)))


def test_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0], [0.0, math.log(3)]])
    got = evaluate(lambda x: {"": x}, batch(logits, [1, 0, 0, 1]))
    assert got["accuracy"] == 75.0
    assert got["loss"] == pytest.approx((3 * math.log(4 / 3) + math.log(4)) / 4)


def test_further_predictions_are_scored_beside_the_main_one() -> None:
    got = evaluate(
        lambda x: {"": x, "/upside": -x}, batch(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [0, 0, 0])
    )
    assert got["accuracy"] == pytest.approx(200 / 3)
    assert got["accuracy/upside"] == pytest.approx(100 / 3)
    assert got.keys() == {"accuracy", "loss", "accuracy/upside", "loss/upside"}
    assert got["loss"] < got["loss/upside"]


@pytest.mark.parametrize("count", [1, AT_ONCE - 1, AT_ONCE, AT_ONCE + 1, 2 * AT_ONCE + 3])
def test_every_sample_counts_once_however_many_there_are(count: int) -> None:
    seen = []

    def predict(x: Tensor) -> dict[str, Tensor]:
        seen.append(len(x))
        return {"": torch.nn.functional.one_hot(x.flatten() % 2, 2).float() * 1000}

    got = evaluate(predict, batch(torch.arange(count)[:, None], [0] * count))
    assert sum(seen) == count
    assert max(seen) <= AT_ONCE
    right = (count + 1) // 2
    assert got["accuracy"] == pytest.approx(100 * right / count)
    assert got["loss"] == pytest.approx(1000 * (count - right) / count)


def test_no_gradients_are_kept() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: Tensor) -> dict[str, Tensor]:
        logits = x * weight
        assert not logits.requires_grad
        return {"": logits}

    evaluate(predict, batch(torch.ones(2, 3), [0, 1]))


def test_a_broken_model_shows_in_the_loss() -> None:
    assert math.isnan(evaluate(lambda x: {"": x * float("nan")}, batch(torch.ones(2, 3), [0, 1]))["loss"])
