"""Paired comparisons over seeds: intervals by hand, what counts as a tie, and differences in pooled deviations."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedc2i.analysis.significance import DIGITS, bootstrap_interval, pooled_deviations
from fedc2i.runs.results import Array

SAMPLED = (0.4, -1.0, 2.5, 0.0, 1.5, 3.0, 0.5)  # one more than is enumerated

differences = st.one_of(
    st.lists(st.floats(-100, 100), min_size=1, max_size=5), st.lists(st.floats(-100, 100), min_size=7, max_size=9)
).map(np.array)


@pytest.mark.parametrize(
    ("given_differences", "interval"),
    [
        ((3,), (3, 3)),
        ((1, 5), (1, 5)),  # means 1, 3, 3, 5: 2.5 % of four draws is the first, 97.5 % the last
        ((6, 0, 3), (0, 6)),  # 27 draws: again the first and the last, as 27 · 0.025 < 1
        ((0, 0, 0, 4), (0, 3)),  # means 0, 1, 2, 3, 4 in 81, 108, 54, 12, 1 of 256 draws: the 7th and the 250th
        ((1, 1, 1, -0.1), (0.175, 1)),  # mirrored: -0.1 once, 0.175 in the next 12, and so on
    ],
    ids=["1 seed", "2 seeds", "3 seeds", "4 seeds", "4 seeds mirrored"],
)
def test_interval_by_hand(given_differences: tuple[float, ...], interval: tuple[float, float]) -> None:
    assert bootstrap_interval(np.array(given_differences)) == pytest.approx(interval)


def enumerated(values: Array) -> tuple[float, float]:
    """The interval from all draws, however many."""
    sums = np.sort(functools.reduce(lambda above, _: np.add.outer(above, values).ravel(), values[1:], values))
    ends = [sums[int(np.ceil(len(sums) * share)) - 1] / len(values) for share in (0.025, 0.975)]
    return float(ends[0]), float(ends[1])


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_few_seeds_are_enumerated(count: int) -> None:
    values = np.array(SAMPLED[:count])
    assert bootstrap_interval(values) == pytest.approx(enumerated(values))


def test_many_seeds_are_sampled_with_a_fixed_seed() -> None:
    values = np.array(SAMPLED)
    first = bootstrap_interval(values)
    np.random.default_rng().random(10)
    np.random.seed(1)  # noqa: NPY002 - no global state may enter
    assert bootstrap_interval(values) == first
    assert first == pytest.approx(enumerated(values), abs=0.05)  # the interval is 2 wide
    assert first[0] > values.min()
    assert first[1] < values.max()


@settings(deadline=None, max_examples=60)
@given(differences, st.floats(-100, 100), st.floats(0.01, 100))
def test_interval_follows_shift_scale_and_sign(values: Array, shift: float, scale: float) -> None:
    low, high = bootstrap_interval(values)
    assert values.min() - 1e-9 <= low <= high <= values.max() + 1e-9
    moved = bootstrap_interval(scale * values + shift)
    assert moved == pytest.approx((scale * low + shift, scale * high + shift), abs=1e-7)
    assert bootstrap_interval(-values) == pytest.approx((-high, -low), abs=1e-9)


@pytest.mark.parametrize(
    ("best", "other", "tied"),
    [
        ((80 + 1e-9, 81 + 1e-9), (80, 81), True),  # the rounding of sums in another order
        ((80, 81, 82), (80, 81, 82), True),
        ((80, 81, 82), (79, 80, 80), False),
        ((80, 90), (79.99, 89.99), False),  # paired: seeds far apart do not hide a steady difference
        ((80, 81, 82), (79, 81.5, 79), True),
        ((80, 81, 82), (79, 81, 79), True),  # zero is reached
        ((81, 81, 81, 80), (80, 80, 80, 80.1), False),  # one seed against three: the interval begins at 0.175
        ((81,) * 7 + (80,), (80,) * 7 + (80.1,), False),
        ((81, 81, 81, 81, 80, 80, 80), (80, 80, 80, 80, 81, 81, 81), True),
    ],
    ids=["rounding", "identical", "clear", "small", "mixed", "zero", "3 of 4", "7 of 8", "4 of 7"],
)
def test_whether_the_interval_reaches_zero(best: tuple[float, ...], other: tuple[float, ...], tied: bool) -> None:
    differences = np.round(np.array(best) - np.array(other), DIGITS)
    assert (bootstrap_interval(differences)[0] <= 0) is tied


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [
        ((80, 3), (75, 4), 5 / 12.5**0.5),
        ((75, 4), (80, 3), -5 / 12.5**0.5),
        ((80, 2), (75, 2), 2.5),
        ((80, 0), (75, 2), 5 / 2**0.5),
        ((80, 2), (80, 2), 0),
        ((80, None), (75, 2), None),
        ((80, 2), (75, None), None),
        ((80, None), (75, None), None),
        ((80, 0), (75, 0), None),
    ],
)
def test_pooled_deviations(
    ours: tuple[float, float | None], theirs: tuple[float, float | None], expected: float | None
) -> None:
    found = pooled_deviations(*ours, *theirs)
    assert found == (None if expected is None else pytest.approx(expected))


@given(st.floats(0, 100), st.floats(0.01, 10), st.floats(0, 100), st.floats(0.01, 10))
def test_pooled_deviations_change_sign_with_the_sides(a: float, a_sd: float, b: float, b_sd: float) -> None:
    found = pooled_deviations(a, a_sd, b, b_sd)
    assert found is not None
    assert pooled_deviations(b, b_sd, a, a_sd) == pytest.approx(-found)
    assert abs(found) * min(a_sd, b_sd) <= abs(a - b) * (1 + 1e-9)
    assert abs(found) * max(a_sd, b_sd) >= abs(a - b) * (1 - 1e-9)
