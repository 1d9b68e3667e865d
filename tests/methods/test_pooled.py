"""Pooled training: one model on the union, scored on each client's own data, and nowhere but in simulation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, row
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.methods.base import Method
from fedc2i.methods.local import Local
from fedc2i.methods.pooled import Pooled
from fedc2i.models.model import Model
from fedc2i.runs.settings import make
from support.method_checks import SIZES, run

EXECUTORS = ("looped", "stacked", pytest.param("workers", marks=pytest.mark.slow))


def union(federation: Federation) -> Federation:
    """One client, under the name of the first, with everybody's training data."""
    parts = [client.train for client in federation.clients]
    both = Split(torch.cat([own.x for own in parts]), torch.cat([own.y for own in parts]))
    first = federation.clients[0]
    return Federation("union", (Client(first.name, both, first.validation, first.test),), federation.classes)


def assert_close(got: Params, want: Params) -> None:
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_everyone_has_the_model_of_one_client_with_all_data(
    executor: str, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    federation, model = make_federation(sizes=SIZES, validation=2), make_model(dropout=0.5)
    pooled, reports = run(Pooled(), model, federation, executor=executor)
    alone, _ = run(Local(), model, union(federation), executor=executor)
    for k in range(len(SIZES)):
        for got in (pooled.trained, pooled.received):
            assert_close(row(got, k), row(alone.trained, 0))
    for report in reports:
        assert report.metrics["trained"] == report.metrics["received"]
        assert (report.bytes_up, report.bytes_down) == (0, 0)


def test_each_client_is_scored_on_its_own_test_data(
    make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    federation, model = make_federation(sizes=SIZES), make_model()
    outcome, reports = run(Pooled(), model, federation)
    params = row(outcome.trained, 0)
    for client, scores in zip(federation.clients, reports[-1].metrics["trained"], strict=True):
        right = model.head(params, model.features(params, client.test.x, False)).argmax(1) == client.test.y
        assert scores["accuracy"] == pytest.approx(100 * float(right.float().mean()))


def test_it_is_the_only_method_that_sees_more_than_a_client_has() -> None:
    assert [name for name, kind in Method.registry.items() if kind.pools_data] == ["pooled"]


@pytest.mark.parametrize("engine", ["flower", "flower-sim"])
def test_sites_refuse_it(engine: str) -> None:
    with pytest.raises(UserError, match=r"^pooled trains on the data of all sites, which do not share it"):
        make(Pooled, {"engine": engine})


@pytest.mark.parametrize(
    "settings", [{"clients_per_round": "50%"}, {"attack": "label-flip@50%"}, {"topology": "ring"}], ids=str
)
def test_it_needs_everyone_and_their_true_data(settings: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"^pooled .* no attack, topology=full and clients_per_round=100%$"):
        fedc2i.run("pooled", data="heart", rounds=1, **settings)
