"""How far two rankings agree: the mean of scipy's ρ, its p-value by counting, and tables that share their columns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from fedc2i.analysis.rank_agreement import agree_overall


def mean_rho(influence: np.ndarray, effect: np.ndarray) -> float:
    """The mean over clients of scipy's ρ of the others."""
    rows = [[k for k in range(len(influence)) if k != m] for m in range(len(influence))]
    return float(np.mean([stats.spearmanr(influence[m, k], effect[m, k]).statistic for m, k in enumerate(rows)]))


def test_overall_is_the_mean_and_its_p_that_of_exchanged_clients() -> None:
    """Every way to give the clients of one table other names, one by one."""
    generator = np.random.default_rng(4)
    influence = generator.random((4, 4))
    effect = influence + generator.normal(size=(4, 4))
    found = agree_overall(influence, effect)
    assert found.rho == pytest.approx(mean_rho(influence, effect))
    every = [list(order) for order in itertools.permutations(range(4))]
    means = [mean_rho(influence[order][:, order], effect) for order in every]
    assert found.p == np.mean([abs(mean) >= abs(found.rho) - 1e-9 for mean in means])
    assert 0 < found.p < 1
    assert found.others == 4
    assert math.isnan(agree_overall(np.ones((4, 4)), np.ones((4, 4))).rho)


def test_overall_of_many_clients_is_drawn_and_never_nothing() -> None:
    table = np.random.default_rng(0).random((9, 9))
    found = agree_overall(table, table)
    assert (found.rho, found.p) == (pytest.approx(1.0), pytest.approx(1 / 10_000))


def test_clients_that_help_everybody_are_one_witness_not_many() -> None:
    """Both tables have columns in common over all rows, and nothing with each other: p is small one time in twenty."""
    generator = np.random.default_rng(0)
    small = 0
    for _ in range(100):
        first, second = (generator.normal(size=5) + 0.1 * generator.normal(size=(5, 5)) for _ in range(2))
        small += agree_overall(first, second).p <= 0.05
    assert small <= 10  # with orders that are drawn for each row alone, some thirty


def test_overall_where_something_was_not_measured() -> None:
    influence = np.random.default_rng(1).random((6, 6))
    effect = influence.copy()
    influence[2] = np.nan
    effect[:, 4] = np.nan
    found = agree_overall(influence, effect)
    assert (found.rho, found.others) == (pytest.approx(1.0), 5)
    assert found.p < 0.05
