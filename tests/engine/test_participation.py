"""Who takes part in a round, and when a run is over early."""

from __future__ import annotations

from collections import Counter

import pytest

from fedc2i.engine.participation import EarlyStopping, choose
from fedc2i.engine.records import Round
from fedc2i.engine.settings import EngineSettings


def test_all_take_part_unless_told_otherwise() -> None:
    assert choose(0, EngineSettings(), 5, 1) == (0, 1, 2, 3, 4)


def test_a_share_is_drawn_anew_every_round_and_repeatably() -> None:
    settings = EngineSettings(clients_per_round="40%")
    drawn = [choose(3, settings, 10, number) for number in range(1, 200)]
    assert all(list(own) == sorted(set(own)) and len(own) == 4 for own in drawn)
    counts = Counter(client for own in drawn for client in own)
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 2 * min(counts.values())
    assert drawn == [choose(3, settings, 10, number) for number in range(1, 200)]
    assert drawn != [choose(4, settings, 10, number) for number in range(1, 200)]


def scored(accuracy: float, point: str = "trained") -> Round:
    metrics = [{"accuracy": 99.0, "validation_accuracy": accuracy + off} for off in (-1, 1)]
    nothing = [{"validation_accuracy": 0.0}] * 2
    points = {"received": nothing, "trained": nothing, point: metrics}
    return Round(0, 1, 0.0, (), points, {}, (), 0, 0)  # type: ignore[arg-type]


def ends(patience: int, *accuracies: float) -> list[bool]:
    course = EarlyStopping(patience)
    return [course.should_stop(scored(own), "trained") for own in accuracies]


@pytest.mark.parametrize(
    ("patience", "accuracies", "over"),
    [
        (1, (50, 60, 60), [False, False, True]),
        (2, (50, 40, 45), [False, False, True]),
        (2, (50, 40, 51, 50, 51), [False, False, False, False, True]),
        (0, (50, 40, 30), [False, False, False]),
    ],
)
def test_it_is_over_when_the_accuracy_has_not_risen(
    patience: int, accuracies: tuple[float, ...], over: list[bool]
) -> None:
    assert ends(patience, *accuracies) == over


def test_only_the_methods_own_point_counts() -> None:
    course = EarlyStopping(1)
    assert [course.should_stop(scored(own, "received"), "received") for own in (10, 20, 19)] == [False, False, True]


def test_its_state_is_enough_to_go_on() -> None:
    first, second = EarlyStopping(2), EarlyStopping(2)
    for own in (50, 40):
        first.should_stop(scored(own), "trained")
    second.state = first.state
    assert second.should_stop(scored(45), "trained")
