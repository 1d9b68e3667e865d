"""The study of cheap measures: planted clients, and how well a table of values shows them, by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from experiments.agreement_collusion import TRICKS, Tricked, standing, trick
from experiments.agreement_plants import PLANTS, Planted, joined_twice, plant
from experiments.agreement_probe import PREFIX, PROBED
from experiments.agreement_tables import (
    agreement,
    agreement_table,
    auc,
    interval,
    reliability,
    standing_table,
    twice_row,
    worth_table,
)
from experiments.agreement_truth import Truth

from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.runs.driver import compute
from fedc2i.runs.plan import prepare

for kind in PROBED.values():  # they are the study's: tests of every method do not see them
    del Method.registry[kind.name]


def test_auc_by_hand(make_federation: Callable[..., Federation]) -> None:
    federation = make_federation((8, 8, 8, 8))
    last = np.array([[9, 1, 2, 3], [0, 0, 0, 0], [5, 1, 9, 3], [5, 4, 3, 9]], dtype=float)
    assert auc(last, Planted(federation, 1)) == pytest.approx((1 + 1 + 0.5) / 3)
    near = np.array([[9, 1, 2, 3], [0, 0, 0, 0], [5, 5, 9, 1], [5, 1, 4, 9]], dtype=float)
    # To client 2 both are equal; to client 3 they are the farthest of three pairs.
    assert auc(near, Planted(federation, 1, copy_of=0)) == pytest.approx((1 + 0) / 2)


@pytest.mark.parametrize("kind", PLANTS)
def test_plants_change_one_client(kind: str, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation((12, 12, 12), validation=4)
    own = plant(kind, federation)
    assert own is not None
    same = [a.train.x.equal(b.train.x) for a, b in zip(own.federation.clients, federation.clients, strict=True)]
    if own.attack:
        assert (own.federation, own.client) == (federation, 1)
    elif kind == "other classes":
        classes = [{*client.train.y.tolist()} for client in own.federation.clients]
        assert [sorted(one) for one in classes] == [[0, 1], [2, 3], [0, 1]]
    else:
        assert same == [True, False, True]
        assert own.federation.clients[1].train.x.equal(federation.clients[0].train.x) == (kind == "duplicate")


def test_a_measure_is_compared_with_lambda_over_data_sets() -> None:
    one, other = np.random.default_rng(0).normal(size=(2, 2, 5, 5))
    found = {
        name: Truth({"trained": own, "received": own}, {"λ, mean of rounds": -own, "right": own * 2})
        for name, own in (("a", one[:1].repeat(2, 0)), ("b", other[:1].repeat(2, 0)))
    }
    cells = {row.cells[0]: row.cells[-2:] for row in agreement_table(found, "trained").rows}
    assert cells["λ, mean of rounds"] == ("-1.00", "")
    assert cells["right"] == ("+1.00", "+2.00 (+2.00 to +2.00)")


def test_agreement_of_a_perfect_measure() -> None:
    values = np.random.default_rng(0).normal(size=(2, 5, 5))
    truth = Truth({"received": values, "trained": values}, {"same": np.stack([values.mean(0)] * 2)})
    rho, p, sign = agreement(truth, "same", "trained")
    assert rho == pytest.approx([1.0, 1.0])
    assert p < 0.05
    assert sign == 1.0
    assert interval([0.5, 0.5]) == "+0.50 (+0.50 to +0.50)"
    assert interval([math.nan]) == "–"


def test_a_client_that_joins_twice_by_hand(make_federation: Callable[..., Federation]) -> None:
    federation = make_federation((8, 7, 6))
    again = joined_twice(federation, 1)
    assert again.names == (*federation.names, "b again")
    assert again.clients[3].train.x.equal(federation.clients[1].train.x)
    once = np.zeros((2, 3, 3))
    once[:, [0, 2], 1] = [[0.1, 0.3], [0.2, 0.4]]  # worth 0.2 and 0.3 to the others, on average
    twice = np.zeros((2, 4, 4))
    twice[:, [0, 2], 1] = twice[:, [0, 2], 3] = [[0.1, 0.3], [0.2, 0.4]]
    twice[:, 3, 1] = 9.0  # what one name is worth to the other does not count
    name, _, one, both, more = twice_row(once, twice, 1, "b").cells
    assert (name, one[:6], both[:6], more[:6]) == ("b", "+0.250", "+0.500", "+0.250")


@pytest.mark.parametrize("kind", TRICKS)
def test_tricks_are_of_the_second_and_the_third_client(kind: str, make_federation: Callable[..., Federation]) -> None:
    federation = make_federation((8, 7, 6, 5))
    own = trick(kind, federation)
    assert own.members == ((1,) if kind == "boost" else (1, 2))
    attack = {"one model": "", "push and pull": 'push:5@"b";pull:5@"c"', "boost": 'scaled:3@"b"'}
    assert own.attack == attack.get(kind, 'scaled:3@"b","c"')
    second, third = (own.federation.clients[m].train.x for m in (1, 2))
    assert (second.shape == third.shape and second.equal(third)) == (kind in ("one model", "one, boosted"))


def test_what_a_trick_earns_by_hand(make_federation: Callable[..., Federation]) -> None:
    before = np.array([[9, 1, 2, 3], [0, 0, 0, 0], [0, 0, 0, 0], [5, 6, 1, 9]], dtype=float)  # honest are 0 and 3
    assert standing(before, (1, 2)) == pytest.approx((0 + 0 + 1 + 0) / 4)
    assert standing(before, (1,)) == pytest.approx((0 + 0.5 + 1) / 3)  # the third is honest, and all are equal to it
    after = before.copy()
    after[0, 1:3], after[3, 1:3] = 3, 7
    assert standing(after, (1, 2)) == pytest.approx((0.5 + 0.5 + 1 + 1) / 4)
    honest, tricked = (
        Truth({"received": own[None], "trained": own[None]}, {"λ, mean of rounds": own[None] / 10})
        for own in (before, after)
    )
    found = {"all": (honest, tricked, Tricked(make_federation((8, 8, 8, 8)), (1, 2)))}
    (row,) = worth_table(found).rows
    assert row.cells == ("all", "", "+2.500", "+5.000", "+2.500", "+0.250", "+0.500", "+0.250")
    assert [row.cells for row in standing_table(found).rows] == [
        ("Shapley value", "", "0.25 → 0.75"),
        ("λ, mean of rounds", "", "0.25 → 0.75"),
    ]


def test_exact_values_of_seeds_agree_with_each_other_or_not() -> None:
    values = np.random.default_rng(0).normal(size=(5, 5))
    same, other = np.stack([values, values]), np.stack([values, -values])
    assert reliability(Truth({"trained": same, "received": same}, {}), "trained") == pytest.approx([1, 1])
    assert reliability(Truth({"trained": other, "received": other}, {}), "trained") == pytest.approx([-1, -1])
    one = Truth({"trained": same[:1], "received": same[:1]}, {"λ, mean of rounds": same[:1]})
    assert reliability(one, "trained") == []
    (row, _) = agreement_table({"toy": one}, "trained").rows
    assert row.cells == ("Shapley value of one seed, with other seeds", "", "–", "–", "")


def test_intervals_of_a_share_stay_within_what_is_possible(make_federation: Callable[..., Federation]) -> None:
    """Two clients together have at most all of λ, so each half of it."""
    shares = np.full((3, 4, 4), 0.25)
    for seed, share in enumerate((0.45, 0.3, 0.5)):
        shares[seed, :, 1:3] = share
    truth = Truth({"trained": np.zeros((3, 4, 4)), "received": np.zeros((3, 4, 4))}, {"λ, mean of rounds": shares})
    (row,) = worth_table({"all": (truth, truth, Tricked(make_federation((8, 8, 8, 8)), (1, 2)))}).rows
    assert row.cells[5] == "+0.417 (+0.158 to +0.500)"


@pytest.mark.parametrize("method", sorted(PROBED))
def test_the_probe_changes_nothing_and_measures_every_model(
    method: str, make_federation: Callable[..., Federation], model: Model
) -> None:
    settings = {"rounds": 2, "epochs": 1, "device": "cpu"}
    federation = make_federation((12, 10, 8), validation=6)
    plain, probed = prepare([method, PROBED[method]()], settings, federation, model)
    first, second = compute(plain), compute(probed)
    np.testing.assert_array_equal(first.accuracy("trained", "loss"), second.accuracy("trained", "loss"))
    measured, where = second.rounds[-1].influence, "held-out" if method == "fedc2i-plus" else "training"
    rise, order = (measured[f"{PREFIX}{name}, {where}"] for name in ("rise", "first order"))
    assert rise.shape == order.shape == (3, 3)
    assert np.isfinite(rise).all()
    assert np.corrcoef(rise.flat, order.flat)[0, 1] > 0.9  # models are near each other after two rounds
    np.testing.assert_allclose(np.diag(measured[f"{PREFIX}step, training"]), 0, atol=1e-6)
    np.testing.assert_allclose(np.diag(measured[f"{PREFIX}similarity"]), 1, atol=1e-4)
