"""Rows of the table of pretrained networks, from lines that runs left."""

from __future__ import annotations

from typing import Any

import pytest
from experiments.backbones_table import joined

LINE: dict[str, Any] = {"rounds": 5, "epochs": 1, "most": 0, "seconds": 2.0}


def line(seeds: str, *scores: float, **changes: Any) -> dict[str, Any]:
    found = {"balanced_accuracy": list(scores), "auroc": list(scores)}
    return {**LINE, "seeds": seeds, "scores": found, **changes}


def test_lines_with_other_seeds_are_one_row() -> None:
    row = joined(joined(line("0", 1.0), line("1-2", 2.0, 3.0)), line("3", 4.0))
    assert row["scores"]["auroc"] == [1.0, 2.0, 3.0, 4.0]
    assert row["seeds"] == "0,1,2,3"
    assert row["seconds"] == 6.0


@pytest.mark.parametrize(
    ("first", "later"),
    [
        (line("0", 1.0), line("0-2", 2.0, 3.0, 4.0)),
        (line("0", 1.0), line("1", 2.0, rounds=20)),
        ({**LINE, "seeds": "0", "refused": "no"}, line("1", 2.0)),
        (line("0", 1.0), {**LINE, "seeds": "1", "refused": "no"}),
    ],
    ids=["a seed again", "another protocol", "refused first", "refused later"],
)
def test_otherwise_the_later_line_counts(first: dict[str, Any], later: dict[str, Any]) -> None:
    assert joined(first, later) == later
