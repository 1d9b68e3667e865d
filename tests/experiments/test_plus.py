"""The targets of the study of FedC²I⁺."""

from __future__ import annotations

import pytest
from experiments.plus import OURS, verdict

from support.helpers import blank_federation, made_up


@pytest.mark.parametrize(
    ("seeds", "wins", "said", "often"),
    [
        (10, 8, "At least 8 of 10 seeds against every rival", True),
        (10, 7, "At least 8 of 10 seeds against every rival", False),
        (3, 3, "At least 3 of 3 seeds against every rival", True),
        (3, 2, "At least 3 of 3 seeds against every rival", False),
        (5, 4, "At least 4 of 5 seeds against every rival", True),
        (1, 1, "At least 1 of 1 seed against every rival", True),
    ],
)
def test_wins_are_in_proportion_to_the_seeds(seeds: int, wins: int, said: str, often: bool) -> None:
    federation = blank_federation(("a", "b"))
    theirs = made_up(federation, {seed: [[60, 60]] for seed in range(seeds)})
    ours = made_up(federation, {seed: [[62, 62]] if seed < wins else [[59, 59]] for seed in range(seeds)})
    found = verdict({data: {OURS: ours, "local": theirs} for data in "12345"})
    assert found.sentences[1].startswith(said)
    assert found.targets["most seeds"] is often
