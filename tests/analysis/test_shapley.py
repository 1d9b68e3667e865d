"""Shapley values against their definition: every order of givers, one by one, on small games."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from fedc2i.analysis.contribution import shapley
from fedc2i.analysis.contribution.shapley import Coalition, Ring, mean_contrast

Game = Callable[[Coalition], float]


def by_definition(game: Game, receiver: int, giver: int, clients: int) -> float:
    """The mean of what the giver adds over all orders in which givers may join the receiver."""
    givers = [i for i in range(clients) if i != receiver]
    added = []
    for order in itertools.permutations(givers):
        before = frozenset({receiver, *order[: order.index(giver)]})
        added.append(game(before | {giver}) - game(before))
    return float(np.mean(added))


def worth(contrast: Mapping[Coalition, float], game: Game) -> float:
    return sum(weight * game(coalition) for coalition, weight in contrast.items())


def random_game(seed: int) -> Game:
    generator, known = np.random.default_rng(seed), dict[Coalition, float]()

    def game(coalition: Coalition) -> float:
        return known.setdefault(coalition, float(generator.normal()))

    return game


def pairs(clients: int) -> list[tuple[int, int]]:
    return list(itertools.permutations(range(clients), 2))


@pytest.mark.parametrize("clients", [2, 3, 4, 5])
def test_exact_values_are_those_of_the_definition(clients: int) -> None:
    game = random_game(clients)
    for receiver, giver in pairs(clients):
        found = worth(shapley.shapley(receiver, giver, clients), game)
        assert found == pytest.approx(by_definition(game, receiver, giver, clients))


def test_every_coalition_is_run_once_and_large_ones_first() -> None:
    found = shapley.every_coalition(4)
    assert len(found) == len({*found}) == 2**4 - 1 - 4
    assert [len(own) for own in found] == [4, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2]
    needed = {own for pair in pairs(4) for own in shapley.shapley(*pair, 4)}
    assert needed == {*found, *(frozenset({i}) for i in range(4))}


@pytest.mark.parametrize("clients", [3, 6])
def test_values_add_up_to_the_gain(clients: int) -> None:
    game = random_game(clients)
    for receiver in range(clients):
        givers = [i for i in range(clients) if i != receiver]
        total = sum(worth(shapley.shapley(receiver, giver, clients), game) for giver in givers)
        assert total == pytest.approx(worth(shapley.gain(receiver, clients), game))


def test_equal_givers_have_equal_values_and_a_null_player_has_none() -> None:
    def game(coalition: Coalition) -> float:  # givers 1 and 2 do the same, 3 does nothing
        return float(len(coalition & {1, 2}) ** 1.5 + (4 in coalition) * len(coalition & {1, 2}))

    values = {giver: worth(shapley.shapley(0, giver, 5), game) for giver in (1, 2, 3, 4)}
    assert values[1] == pytest.approx(values[2])
    assert values[3] == pytest.approx(0.0)
    assert min(values[1], values[4]) > 0.5


def test_by_hand_in_an_additive_game() -> None:
    """Every measure of a giver is its own share."""
    shares = {0: 5.0, 1: 1.0, 2: -2.0, 3: 0.25}

    def game(coalition: Coalition) -> float:
        return sum(shares[i] for i in coalition)

    for giver in (1, 2, 3):
        contrasts = (
            shapley.shapley(0, giver, 4),
            shapley.leave_one_out(giver, 4),
            shapley.pairwise(0, giver),
            Ring.draw(4, 7).contrasts(0)[giver],
        )
        assert [worth(own, game) for own in contrasts] == pytest.approx([shares[giver]] * 4)


def test_leave_one_out_and_pairwise_by_hand() -> None:
    values = {frozenset({0}): 1.0, frozenset({0, 1}): 4.0, frozenset({0, 2}): 2.0, frozenset({0, 1, 2}): 9.0}
    game = values.__getitem__
    assert worth(shapley.pairwise(0, 1), game) == 3.0
    assert worth(shapley.leave_one_out(1, 3), game) == 7.0
    assert worth(shapley.shapley(0, 1, 3), game) == (3.0 + 7.0) / 2


def test_rings_are_two_reversed_orders_of_each_receiver() -> None:
    ring = Ring((2, 0, 3, 1))
    assert list(ring.joining(0, forward=True)) == [3, 1, 2]
    assert list(ring.joining(0, forward=False)) == [2, 1, 3]
    game = random_game(1)
    for giver in (1, 2, 3):
        orders = []
        for order in ([3, 1, 2], [2, 1, 3]):
            before = frozenset({0, *order[: order.index(giver)]})
            orders.append(game(before | {giver}) - game(before))
        assert worth(ring.contrasts(0)[giver], game) == pytest.approx(np.mean(orders))


def test_a_ring_needs_few_runs() -> None:
    clients = 9
    ring = Ring.draw(clients, 0)
    needed = {own for r in range(clients) for contrast in ring.contrasts(r).values() for own in contrast}
    assert len([own for own in needed if len(own) > 1]) == clients * (clients - 2) + 1


def test_the_mean_over_all_rings_is_exact() -> None:
    game = random_game(3)
    rings = [Ring(order) for order in itertools.permutations(range(4))]
    for receiver, giver in pairs(4):
        contrast = mean_contrast([ring.contrasts(receiver)[giver] for ring in rings])
        assert worth(contrast, game) == pytest.approx(by_definition(game, receiver, giver, 4))


def test_truncated_orders_still_add_up_to_the_gain() -> None:
    """The giver that joins where an order ends is given what is left."""
    game, ring = random_game(5), Ring.draw(6, 2)
    whole = ring.contrasts(2)
    cut = ring.contrasts(2, stops=lambda receiver, forward: 3)
    assert cut != whole
    assert max(len(own) for contrast in cut.values() for own in contrast if len(own) < 6) == 3
    assert sum(worth(own, game) for own in cut.values()) == pytest.approx(worth(shapley.gain(2, 6), game))
