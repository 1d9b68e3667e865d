"""Scores of one client, by hand, and of its own data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.testing import assert_close

from fedc2i.core.params import Params
from fedc2i.data.federation import Federation
from fedc2i.engine import client as client_module
from fedc2i.engine.client import LocalClient, predict_all
from fedc2i.methods.base import Method, Site
from fedc2i.models.model import Model
from fedc2i.training.local import Batch, gradient_and_value
from fedc2i.training.metrics import means, score
from support.method_checks import local_client


def batch(x: Tensor, y: list[int]) -> Batch:
    return Batch(x, torch.tensor(y), torch.ones(len(y)))


def as_they_are(x: Tensor) -> dict[str, Tensor]:
    return {"": x}


# score


def test_sums_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)], [math.log(3), 0.0], [0.0, math.log(3)]])
    got = score(as_they_are, batch(logits, [1, 0, 0, 1]))
    assert got["accuracy"].item() == 300.0
    assert got["loss"].item() == pytest.approx(3 * math.log(4 / 3) + math.log(4))


def test_further_predictions_are_scored_beside_the_main_one() -> None:
    piece = batch(torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), [0, 0, 0])
    got = score(lambda x: {"": x, "/upside": -x}, piece)
    assert got.keys() == {"accuracy", "loss", "logits", "accuracy/upside", "loss/upside"}
    assert (got["accuracy"].item(), got["accuracy/upside"].item()) == (200, 100)
    assert got["loss"] < got["loss/upside"]


def test_no_gradients_are_kept() -> None:
    weight = torch.ones(1, requires_grad=True)

    def predict(x: Tensor) -> dict[str, Tensor]:
        logits = x * weight
        assert not logits.requires_grad
        return {"": logits}

    assert not any(value.requires_grad for value in score(predict, batch(torch.ones(2, 3), [0, 1])).values())


def test_a_broken_model_shows_in_the_loss() -> None:
    assert math.isnan(score(lambda x: {"": x * float("nan")}, batch(torch.ones(2, 3), [0, 1]))["loss"])


# means


def test_means_of_pieces_are_over_all_samples() -> None:
    pieces = [
        {"accuracy": torch.tensor(100.0), "loss": torch.tensor(1.5)},
        {"accuracy": torch.tensor(300.0), "loss": torch.tensor(2.5)},
    ]
    got = means(pieces, 8)
    assert {name: value.item() for name, value in got.items()} == {"accuracy": 50.0, "loss": 0.5}
    assert all(value.dtype == torch.float64 for value in got.values())


def test_means_in_double_precision() -> None:
    """In single precision 2²⁴ + 1 is 2²⁴."""
    pieces = [{"loss": torch.tensor(2.0**24)}, {"loss": torch.tensor(1.0)}]
    assert means(pieces, 1)["loss"].item() == 2**24 + 1


def test_no_samples_no_means() -> None:
    assert means([], 0) == {}


# A client's own data.


def client_of(
    model: Model, federation: Federation, method: Method | None = None, **splits: Batch
) -> tuple[LocalClient, Params]:
    client = local_client(method or Method(), model, federation)
    client.data = replace(client.data, **splits)
    return client, model.init(0)


@pytest.mark.parametrize("validation", [0, 5])
def test_a_client_is_scored_on_its_own_data(
    validation: int, model: Model, make_federation: Callable[..., Federation]
) -> None:
    federation = make_federation(validation=validation)
    client, params = client_of(model, federation)
    got = client.evaluate(params, {}, -1, 1)
    own = federation.clients[0]
    for split, prefix in ((own.test, ""), (own.validation, "validation_")):
        if len(split):
            logits = model.head(params, model.features(params, split.x))
            right = int((logits.argmax(1) == split.y).sum())
            assert got[f"{prefix}accuracy"] == pytest.approx(100 * right / len(split))
            assert got[f"{prefix}loss"] == pytest.approx(F.cross_entropy(logits, split.y).item(), rel=1e-5)
    beside = ("validation_accuracy", "validation_loss") if validation else ()
    assert list(got) == ["accuracy", "loss", "balanced_accuracy", "f1", "auroc", "calibration_error", *beside]
    assert all(type(value) is float for value in got.values())


@pytest.mark.parametrize("count", [1, 6, 7, 8, 17])
def test_every_sample_counts_once_however_many_there_are(
    count: int, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AT_ONCE", 7)
    seen: list[int] = []

    class Reading(Method):
        """Reads the class, 0 or 1, from the first pixel."""

        def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
            seen.append(len(x))
            return F.one_hot(x[:, 0, 0, 0].long(), 4).float() * 1000

    x = (torch.arange(count) % 2)[:, None, None, None].expand(count, 3, 2, 2).to(torch.uint8)
    test = batch(x, [0] * count)
    client, params = client_of(model, federation, Reading(), test=test, validation=test)
    got = client.evaluate(params, {}, -1, 1)
    assert sum(seen) == 2 * count
    assert max(seen) <= 7
    right = (count + 1) // 2
    for prefix in ("", "validation_"):
        assert got[f"{prefix}accuracy"] == pytest.approx(100 * right / count)
        assert got[f"{prefix}loss"] == pytest.approx(1000 * (count - right) / count)


class Telling(Method):
    """Predicts what it was told: the class is the round, by the position, or what it received."""

    def predict(self, params: Params, x: Tensor, site: Site) -> Tensor:
        return F.one_hot(torch.tensor(site.round - 1), 4).float().expand(len(x), 4)

    def other_predictions(self, params: Params, x: Tensor, site: Site) -> Mapping[str, Tensor]:
        place = F.one_hot(site.position, 4).float().expand(len(x), 4)
        return {"position": place, "received": site.received["told"].expand(len(x), 4)}


@pytest.mark.parametrize(("round", "position", "told", "want"), [(2, 0, 3, (1, 0, 3)), (1, 2, 1, (0, 2, 1))])
def test_predictions_see_the_round_the_position_and_what_was_received(
    round: int, position: int, told: int, want: tuple[int, ...], model: Model, federation: Federation
) -> None:
    client, params = client_of(model, federation, Telling())
    got = client.evaluate(params, {"told": F.one_hot(torch.tensor(told), 4).float()}, position, round)
    labels = client.data.test.y
    named = dict(zip(("", "/position", "/received"), want, strict=True))
    shares = {name: 100 * float((labels == c).double().mean()) for name, c in named.items()}
    assert {name: got[f"accuracy{name}"] for name in shares} == pytest.approx(shares)


def test_names_of_predictions(model: Model, federation: Federation) -> None:
    client, params = client_of(model, federation)
    site = Site(model, client.data.counts, torch.tensor(0), {"told": torch.zeros(4)})
    x: Any = client.data.test.x[:2]
    assert list(predict_all(Telling(), params, x, site)) == ["", "/position", "/received"]
    assert list(predict_all(Method(), params, x, site)) == [""]


def test_a_gradient_is_the_one_by_hand_also_inside_vmap() -> None:
    def loss(params: Params) -> Tensor:
        return (params["a"] ** 2).sum() * 3

    params = {"a": torch.tensor([[1.0, -2.0], [0.5, 4.0]]), "unused": torch.ones(2, 3)}
    gradient, value = gradient_and_value(loss, params)
    assert_close(gradient, {"a": 6 * params["a"], "unused": torch.zeros(2, 3)})
    assert_close(value, torch.tensor(3 * 21.25))
    assert not value.requires_grad
    assert not params["a"].requires_grad
    lifted, values = torch.func.vmap(lambda own: gradient_and_value(loss, own))(params)
    assert_close(lifted, gradient)
    assert_close(values, torch.tensor([15.0, 48.75]))
    assert_close(gradient_and_value(lambda own: torch.tensor(2.0), params)[0]["a"], torch.zeros(2, 2))
    assert gradient_and_value(lambda own: torch.tensor(2.0), {}) == ({}, torch.tensor(2.0))
