"""Scores that say no more than guessing: who is named, and where the line is shown."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedc2i.engine.records import POINTS
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.local import Local
from fedc2i.report.comparison import comparison_table
from fedc2i.report.guessing import guessing_notes
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
    (said,) = guessing_notes([scored(33.0, 60, 34.0)])
    assert said == f"{START}FedC²I (after) at north (33.0 %, guessing 33.3 %), west (34.0 %, guessing 33.3 %)."
    assert guessing_notes([GOOD]) == []


def test_the_point_is_that_of_the_authors() -> None:
    assert guessing_notes([scored(33.0, 60, 60, lift=20)]) == []  # FedC²I's is after local training
    (said,) = guessing_notes([scored(33.0, 60, 60, method=FedAvg(), lift=20)])
    assert said.startswith(f"{START}FedAvg (before) at north (33.0 %")


def test_methods_with_the_same_clients_are_named_together_in_one_short_line() -> None:
    bad = [scored(33.0, 60, 60, method=own) for own in (FedAvg(), Local())]
    assert guessing_notes([bad[0], GOOD, bad[1]]) == [f"{START}FedAvg (before), Local (after) at north."]
    assert guessing_notes(bad * 3) == [f"{START}all 6 methods at north."]
    assert guessing_notes([*bad * 3, GOOD]) == [
        f"{START}FedAvg (before), Local (after), FedAvg (before) and 3 more at north."
    ]
    other = [scored(*row) for row in ((60, 33, 60), (60, 60, 33), (33, 33, 60), (33, 60, 33))]
    assert guessing_notes([bad[0], *other]) == [
        f"{START}FedAvg (before) at north; FedC²I (after) at south; FedC²I (after) at west; 2 other methods."
    ]


def test_of_many_clients_a_few_are_named() -> None:
    result = made_up(blank_federation([f"site {k}" for k in range(30)]), {0: [[10.0] * 30]})
    (said,) = guessing_notes([result])
    assert said.endswith("site 2 (11.0 %, guessing 33.3 %) and 27 more.")


@pytest.mark.parametrize(("metric", "chance"), [("auroc", 55), ("balanced_accuracy", 100 / 3 + 5)])
def test_other_scores_are_compared_with_chance(metric: str, chance: float) -> None:
    rounds = [
        replace(own, metrics={point: [{metric: chance + step} for step in (-1, 1, np.nan)] for point in POINTS})
        for own in GOOD.rounds
    ]
    (said,) = guessing_notes([replace(GOOD, rounds=rounds).showing(metric)])
    assert said == f"No better than guessing: FedC²I (after) at north ({chance - 1:.1f} %)."


def test_table_verdict_and_page_have_the_same_line() -> None:
    results = [scored(33.0, 60, 60, method=FedAvg()), GOOD]
    (said,) = guessing_notes(results)
    assert said in comparison_table(results).notes
    assert said in verdict_text(results).warnings
    pytest.importorskip("plotly")
    assert page.make(results).count(f'<p class="warning">{said}</p>') == 1
