"""Diagnostics laid out over the whole federation: every number in its place, nan where nobody said anything."""

from __future__ import annotations

import numpy as np
import torch

from fedc2i.engine.records import Diagnostics, over_all_clients

NAN = float("nan")


def test_what_clients_say_of_those_they_received() -> None:
    measured = [
        Diagnostics({"vector": torch.tensor([[1.0, 2.0]])}, (0,), (0, 2)),
        Diagnostics({"vector": torch.tensor([[3.0, 4.0], [5.0, 6.0]])}, (2, 3), (2, 3)),
    ]
    np.testing.assert_array_equal(
        over_all_clients(measured, 4)["vector"],
        [[1, NAN, 2, NAN], [NAN] * 4, [NAN, NAN, 3, 4], [NAN, NAN, 5, 6]],
    )


def test_further_axes_stay() -> None:
    matrix = torch.arange(6.0).reshape(1, 2, 3)
    got = over_all_clients([Diagnostics({"matrix": matrix}, (1,), (1, 0))], 2)["matrix"]
    assert got.shape == (2, 2, 3)
    np.testing.assert_array_equal(got[1, 1], [0, 1, 2])
    np.testing.assert_array_equal(got[1, 0], [3, 4, 5])
    assert np.isnan(got[0]).all()


def test_what_clients_say_of_themselves() -> None:
    measured = [Diagnostics({"own": torch.tensor([[1.0, 2.0, 3.0]])}, (1,), (0, 1)), Diagnostics({}, (0,), (0, 1))]
    np.testing.assert_array_equal(over_all_clients(measured, 2)["own"], [[NAN] * 3, [1, 2, 3]])
    numbers = [Diagnostics({"size": torch.tensor([7, 8])}, (2, 0), (0, 1))]
    np.testing.assert_array_equal(over_all_clients(numbers, 3)["size"], [8, NAN, 7])


def test_it_is_of_others_only_if_it_is_so_for_all() -> None:
    measured = [
        Diagnostics({"pair": torch.tensor([[1.0, 2.0]])}, (0,), (0, 1)),
        Diagnostics({"pair": torch.tensor([[3.0, 4.0]])}, (1,), (0, 1, 2)),
    ]
    np.testing.assert_array_equal(over_all_clients(measured, 3)["pair"], [[1, 2], [3, 4], [NAN, NAN]])


def test_truth_values_become_numbers_and_nobody_says_nothing() -> None:
    got = over_all_clients([Diagnostics({"left_out": torch.tensor([[True, False]])}, (0,), (0, 1))], 2)["left_out"]
    np.testing.assert_array_equal(got, [[1, 0], [NAN, NAN]])
    assert over_all_clients([], 3) == {}
    assert over_all_clients([Diagnostics({}, (0,), ())], 3) == {}
