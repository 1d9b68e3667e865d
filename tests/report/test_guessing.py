"""Scores that say no more than guessing or rest on few samples: who is named, and where the lines are shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedc2i.data.federation import Federation, Split
from fedc2i.engine.records import POINTS
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.local import Local
from fedc2i.report.comparison import comparison_table
from fedc2i.report.guessing import few_samples_notes, guessing_notes
from fedc2i.report.html import page
from fedc2i.report.html.verdict import verdict_text
from fedc2i.runs.results import Result
from support.helpers import blank_federation, made_up

NAMES = ("north", "south", "west")  # the most frequent class of each has a third of its test samples
GOOD = made_up(blank_federation(NAMES), {0: [[50.0, 60.0, 60.0]]})
START = "No better than guessing the most frequent class: "


def scored(*row: float, method: FedAvg | Local | None = None, lift: float = 0.0) -> Result:
    return made_up(blank_federation(NAMES), {0: [list(row)]}, method=method, lift=lift)


def test_a_run_names_clients_with_both_numbers() -> None:
    (said,) = guessing_notes([scored(33.0, 60, 32.0, lift=0.5)])
    assert said == (
        f"{START}FedC²I (before and after) at north (33.0 and 33.5 %, guessing 33.3 %), "
        "west (32.0 and 32.5 %, guessing 33.3 %)."
    )
    assert "north (33.0 %, guessing 33.3 %)" in guessing_notes([scored(33.0, 60, 60)])[0]
    assert guessing_notes([GOOD]) == []


def test_every_method_is_judged_at_both_points() -> None:
    """Of two methods with the same scores both are named, whichever point their authors report."""
    both = [scored(33.0, 60, 60, method=own, lift=20) for own in (FedAvg(), Local())]
    assert guessing_notes(both) == [f"{START}FedAvg (before), Local (before) at north."]
    other = scored(60, 60, 53, lift=-20)
    assert guessing_notes([other]) == [f"{START}FedC²I (after) at west (33.0 %, guessing 33.3 %)."]
    differs = scored(33.0, 54, 60, lift=-20)
    assert guessing_notes([differs, both[0]]) == [
        f"{START}FedC²I (before), FedAvg (before) at north; FedC²I (after) at north, south."
    ]


def test_methods_with_the_same_clients_are_named_together_in_one_short_line() -> None:
    bad = [scored(33.0, 60, 60, method=own) for own in (FedAvg(), Local())]
    assert guessing_notes([bad[0], GOOD, bad[1]]) == [
        f"{START}FedAvg (before and after), Local (before and after) at north."
    ]
    assert guessing_notes(bad * 3) == [f"{START}all 6 methods (before and after) at north."]
    before = [scored(33.0, 60, 60, lift=20)] * 3
    assert "and 3 more at north" in guessing_notes([*bad, bad[0], *before])[0]  # not all at the same points
    assert guessing_notes([*before * 2, GOOD]) == [
        f"{START}FedC²I (before), FedC²I (before), FedC²I (before) and 3 more at north."
    ]
    other = [scored(*row, lift=20) for row in ((60, 33, 60), (60, 60, 33), (33, 33, 60), (33, 60, 33))]
    assert guessing_notes([before[0], *other]) == [
        f"{START}FedC²I (before) at north; FedC²I (before) at south; FedC²I (before) at west; 2 more rows."
    ]


def sized(*sizes: int) -> Federation:
    clients = [
        replace(own, test=Split(own.test.x[:1].repeat(size, 1, 1, 1), own.test.y[:1].repeat(size)))
        for own, size in zip(blank_federation("abcdefgh"[: len(sizes)]).clients, sizes, strict=True)
    ]
    return replace(blank_federation("abcdefgh"[: len(sizes)]), clients=tuple(clients))


def test_a_client_with_few_test_samples_is_named_in_a_comparison() -> None:
    results = [made_up(sized(5, 40, 50, 60), {0: [[50.0] * 4]}, method=own) for own in (FedAvg(), Local())]
    line = "a has 5 test samples: one of them is 20 points of its score, and 5 of Avg."
    assert few_samples_notes(results) == [line]
    assert line in comparison_table(results).notes
    assert line not in comparison_table(results[:1]).notes
    assert few_samples_notes([results[0].showing("loss")]) == []


def test_ten_test_samples_are_few_and_three_clients_are_named() -> None:
    assert few_samples_notes([made_up(sized(11, 40), {0: [[50.0] * 2]})]) == []
    (said,) = few_samples_notes([made_up(sized(10, 1, 8, 3, 4), {0: [[50.0] * 5]})])
    assert said == (
        "a has 10 test samples: one of them is 10 points of its score, and 2 of Avg; "
        "b has 1 test sample: one is 100 points of its score, and 20 of Avg; "
        "c has 8 test samples: one of them is 12.5 points of its score, and 2.5 of Avg; 2 more have as few."
    )


def test_of_many_clients_a_few_are_named() -> None:
    result = made_up(blank_federation([f"site {k}" for k in range(30)]), {0: [[10.0] * 30]}, lift=0.0)
    (said,) = guessing_notes([result])
    assert said.endswith("site 2 (10.0 %, guessing 33.3 %) and 27 more.")


@pytest.mark.parametrize(("metric", "chance"), [("auroc", 55), ("balanced_accuracy", 100 / 3 + 5)])
def test_other_scores_are_compared_with_chance(metric: str, chance: float) -> None:
    rounds = [
        replace(own, metrics={point: [{metric: chance + step} for step in (-1, 1, np.nan)] for point in POINTS})
        for own in GOOD.rounds
    ]
    (said,) = guessing_notes([replace(GOOD, rounds=rounds).showing(metric)])
    assert said == f"No better than guessing: FedC²I (before and after) at north ({chance - 1:.1f} %)."


def test_table_verdict_and_page_have_the_same_line() -> None:
    results = [scored(33.0, 60, 60, method=FedAvg()), GOOD]
    (said,) = guessing_notes(results)
    assert said in comparison_table(results).notes
    assert said in verdict_text(results).warnings
    pytest.importorskip("plotly")
    assert page.make(results).count(f'<p class="warning">{said}</p>') == 1
