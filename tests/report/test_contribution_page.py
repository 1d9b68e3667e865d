"""A contribution on the page: sentences, verdicts, the opening table, warnings, and a CSV that can be downloaded."""

from __future__ import annotations

import base64
import io
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedc2i.analysis.contribution.records import GAIN, Agreement, Contribution, Row, Score
from fedc2i.engine.records import POINTS, Predictions
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedrep import FedRep
from fedc2i.methods.local import Local
from fedc2i.report.contribution_report import headline, member_sentence, print_contribution, reachable, sentences
from fedc2i.report.html import page
from fedc2i.report.html.chart_data import chart_data
from fedc2i.report.html.contribution import contribution_view
from fedc2i.report.html.members import MOST_METHODS, members
from support.helpers import blank_federation, made_up

NAMES = ("north", "south", "west")


def contribution() -> Contribution:
    """North gains beyond chance, most from south; west costs it; nothing else is certain."""
    values = {("south", "north"): (4.0, 0.01), ("west", "north"): (-1.0, 0.02)}
    rows, scores = [], []
    for point in POINTS:
        for receiver in NAMES:
            gain = 3.0 if receiver == "north" else -0.5
            p = 0.01 if receiver == "north" else 0.7
            rows.append(Row(GAIN, "", receiver, "accuracy", point, "", gain, gain - 2, gain + 2, p))
            scores.append(Score(receiver, "accuracy", point, 70.0, 70.0 + gain))
            for giver in NAMES:
                if giver != receiver:
                    value, p = values.get((giver, receiver), (0.25, 1.0))
                    rows.append(
                        Row("shapley", giver, receiver, "accuracy", point, "", value, value - 0.5, value + 0.5, p)
                    )
    ends = {"scores": tuple(scores), "rows": tuple(rows), "agreement": (), "notes": ("A note.",)}
    sizes = dict.fromkeys(NAMES, 50)
    many = (("0", "1", "2"), (0, 1), 5, "accuracy", "trained", True, 5, 0, 0, sizes)
    return Contribution("FedC²I", "fedc2i", "toy", NAMES, *many, **ends)


def test_a_receiver_that_nothing_changes_has_no_interval() -> None:
    own = contribution()
    nothing = {"value": 0.0, "low": 0.0, "high": 0.0, "p": 1.0}
    own = replace(own, rows=tuple(replace(row, **nothing) if row.receiver == "west" else row for row in own.rows))
    assert sentences(own)[2] == ("west: taking part changes its accuracy in no seed (50 test samples).")
    view = contribution_view(own)
    assert [bar.text for bar in view.bars] == ["+3.00 (+1.00 to +5.00)", "-0.50 (-2.50 to +1.50)", "+0.00 (no change)"]
    assert [cell and cell.ends for cell in view.rows[2]] == ["no change", "no change", None]


def test_intervals_end_where_no_difference_can_reach() -> None:
    wide = {"value": 8.1, "low": -99.86, "high": 116.05, "p": 0.7}
    own = contribution()
    own = replace(own, rows=tuple(replace(row, **wide) if row.receiver == "west" else row for row in own.rows))
    assert "may be chance (95 % interval -99.86 to 100.00)" in sentences(own)[2]
    view = contribution_view(own)
    assert view.bars[2].text == "+8.10 (-99.86 to +100.00)"
    assert view.bars[2].high == 100
    assert view.rows[2][0].ends == "-99.86 to +100.00"  # type: ignore[union-attr]
    assert (reachable(-400.0, "accuracy"), reachable(-400.0, "loss")) == (-100.0, -400.0)


def test_a_receiver_without_an_interval_says_so() -> None:
    own, unknown = contribution(), {"low": math.nan, "high": math.nan, "p": math.nan}
    own = replace(own, rows=tuple(replace(row, **unknown) if row.receiver == "north" else row for row in own.rows))
    assert "+3.00 points of accuracy from taking part may be chance (no interval)" in sentences(own)[0]
    view = contribution_view(own)
    assert view.bars[0].text == "+3.00 (no interval)"
    assert math.isfinite(view.bars[0].low)
    assert (view.rows[0][1].ends, view.rows[0][1].told) == ("no interval", False)  # type: ignore[union-attr]
    console = Console(width=120, file=io.StringIO())
    print_contribution(console, own)
    assert "nan" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_loser_is_not_said_to_owe_its_loss_to_who_helps_it() -> None:
    own = contribution()
    loses = {"value": -3.0, "low": -5.0, "high": -1.0}
    rows = (replace(row, **loses) if (row.measure, row.receiver) == (GAIN, "north") else row for row in own.rows)
    assert sentences(replace(own, rows=tuple(rows)))[0] == (
        "north loses 3.00 points of accuracy from taking part (95 % interval 1.00 to 5.00); south adds most (+4.00); "
        "west (-1.00) costs it."
    )


def test_what_rounding_hides_is_no_difference() -> None:
    federation = blank_federation(NAMES)
    local = made_up(federation, {0: [[65, 60, 80]]}, method=Local())
    found = members([local, made_up(federation, {0: [[65 - 1.4e-14, 60 - 0.0049, 80]]})], [None, None])
    assert found is not None
    assert [row.difference for row in found.rows] == ["+0.00", "+0.00", "+0.00"]
    assert found.warnings == ()


def predicted(right: list[list[bool]], labels: list[int], seeds: tuple[int, ...]) -> Predictions:
    """Of one client for every list of guesses, the same with each seed."""
    logs = [np.log([[0.9, 0.1] if (own == 0) == hit else [0.1, 0.9]]) for row in right
            for own, hit in zip(labels, row, strict=True)]  # fmt: skip
    every = np.concatenate(logs).astype(np.float32)
    found = {(seed, point): every for seed in seeds for point in POINTS}
    return Predictions(np.array(labels * len(right)), tuple(len(labels) for _ in right), found)


@pytest.mark.parametrize(("labels", "metric", "has_interval"), [
    ([0] + [1] * 15, "accuracy", True),
    ([0] + [1] * 15, "balanced_accuracy", False),
    ([0] * 5 + [1] * 11, "balanced_accuracy", True),
])  # fmt: skip
def test_beside_local_two_seeds_that_agree_are_no_proof(labels: list[int], metric: str, has_interval: bool) -> None:
    federation = blank_federation(("north",))
    score = {0: [[60.0]], 1: [[60.0]]}
    together, local = (made_up(federation, score, method=own) for own in (FedAvg(), Local()))
    config = replace(together.config, metric=metric)
    hits = [k >= 4 for k in range(16)]
    ours = replace(together, config=config, predictions=predicted([hits], labels, (0, 1)))
    alone = replace(local, config=config, predictions=predicted([[True] * 16], labels, (0, 1)))
    found = members([alone, ours], [None, None])
    assert found is not None
    assert bool(found.rows[0].ends) == has_interval
    assert not found.rows[0].is_certain
    assert ("fewer than 5 test samples of a class at north" in found.note) == (not has_interval)


def test_sentences_say_what_is_certain_and_what_is_not() -> None:
    own = contribution()
    assert headline(own) == (
        "1 of 3 clients gains from taking part beyond chance; 2 of 6 pairs (giver, receiver) have an effect beyond "
        "chance."
    )
    north, south, _ = sentences(own)
    assert north == (
        "north gains 3.00 points of accuracy from taking part (95 % interval 1.00 to 5.00); most comes from south "
        "(+4.00); west (-1.00) costs it."
    )
    assert "a difference of -0.50 points of accuracy from taking part may be chance" in south
    assert "north adds most (+0.25, may be chance)" in south


def test_a_loss_is_written_without_percent() -> None:
    own = contribution()
    rows = tuple(replace(row, metric="loss", value=row.value / 100) for row in own.rows)
    scores = tuple(replace(score, metric="loss") for score in own.scores)
    said = member_sentence(replace(own, metric="loss", rows=rows, scores=scores), "north")
    assert said.startswith("north gains 0.030 log-loss from taking part")


def test_cells_are_pale_unless_they_are_certain() -> None:
    view = contribution_view(contribution())
    south, west = view.rows[0][1], view.rows[0][2]
    assert view.rows[0][0] is None
    assert (south.shade, south.told) == (1.0, True)  # type: ignore[union-attr]
    assert (west.shade, west.told) == (-0.25, True)  # type: ignore[union-attr]
    pale = view.rows[1][0]
    assert pale is not None
    assert (pale.told, pale.shade) == (False, pytest.approx(0.25 / 4 * 0.25, abs=1e-3))
    assert [bar.kind for bar in view.bars] == ["plus", "unproven", "unproven"]
    assert all(0 <= end <= 100 for bar in view.bars for end in (bar.left, bar.left + bar.width, bar.low, bar.high))


def test_page_opens_with_each_client_and_offers_the_csv(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    own, federation = contribution(), blank_federation(NAMES)
    result = made_up(federation, {0: [[60, 60, 60]], 1: [[60, 60, 60]]})
    own.write(tmp_path)
    text = page.make([replace(result, federation=federation)], folders=[tmp_path])
    assert text.index('id="members"') < text.index('id="scores"')
    assert ">evidence</th>" in text
    assert "helps: adds +4.00, p 0.01" in text
    assert "Worse than training alone (after local training), which may be chance: south (-0.50), west (-0.50)." in text
    assert '<section id="contribution">' in text
    stored = re.search(r'href="data:text/csv;base64,([^"]+)"', text)
    assert stored
    assert base64.b64decode(stored[1]).decode() == own.to_csv()
    assert '<section id="contribution">' not in page.make([result], folders=[tmp_path / "other"])


def test_beside_local_the_words_are_not_helps() -> None:
    federation = blank_federation(NAMES)
    weights = {"influence_vector": {seed: [[[0.2, 0.7, 0.1], [0.3, 0.4, 0.3], [0.1, 0.8, 0.1]]] for seed in (0, 1)}}
    ours = made_up(federation, {0: [[60, 70, 80]], 1: [[60, 70, 80]]}, influence=weights)
    local = made_up(federation, {0: [[65, 60, 80]], 1: [[65, 60, 80]]}, method=Local())
    found = members([local, ours], [None, None])
    assert found is not None
    assert found.first == "weighs most"
    assert [(row.name, row.difference, row.helper) for row in found.rows] == [
        ("north", "-5.00", "south"),
        ("south", "+10.00", "north"),
        ("west", "+0.00", "south"),
    ]
    assert all("not checked" in row.proof for row in found.rows)
    assert found.warnings == ("Worse than training alone (after local training), which may be chance: north (-5.00).",)
    assert members([ours], [None]) is None


def test_warnings_of_a_comparison_name_the_method() -> None:
    federation = blank_federation(NAMES)
    local = made_up(federation, {0: [[65, 60, 80]]}, method=Local())
    ours = made_up(federation, {0: [[60, 70, 80]]})
    worse = made_up(federation, {0: [[70, 55, 80]]}, method=FedAvg())
    better = made_up(federation, {0: [[70, 70, 90]]}, method=FedRep())
    found = members([local, ours, worse, better], [None] * 4)
    assert found is not None
    assert found.warnings == (
        f"{ours.label}: worse than training alone (after local training), which may be chance: north (-5.00).",
        "FedAvg: worse than training alone (before local training), which may be chance: south (-5.00).",
    )
    many = [local, *(made_up(federation, {0: [[60, 70, 80]]}) for _ in range(6))]
    found = members(many, [None] * 7)
    assert found is not None
    assert found.warnings[-1] == "The same holds for 2 other methods."
    assert len(found.warnings) == MOST_METHODS + 1


def test_the_run_of_the_headline_is_shown_if_it_can_be() -> None:
    """Else the best with influence; the player of influence starts with it too."""
    federation = blank_federation(NAMES)
    weights = {"influence_vector": {0: [[[0.2, 0.7, 0.1], [0.3, 0.4, 0.3], [0.1, 0.8, 0.1]]]}}
    low, high = (
        made_up(federation, {0: [[own] * 3]}, influence=weights, key=f"fedc2i:gamma={own}") for own in (60, 70)
    )
    plain = made_up(federation, {0: [[50] * 3]}, method=FedAvg())
    for alone, results in ((65, [low, plain, high]), (90, [high, plain, low])):
        local = made_up(federation, {0: [[alone] * 3]}, method=Local())
        found = members([local, *results], [None] * 4)
        assert found is not None
        assert found.title.startswith(f"{high.label}: each client alone (Local) and together, ")
        assert chart_data([local, *results])["first"] == 1 + results.index(high)
    winner = made_up(federation, {0: [[95] * 3]}, method=FedAvg())
    found = members([local, low, winner], [None] * 3)
    assert found is not None
    assert found.title.startswith("FedAvg: ")
    assert chart_data([local, low, winner])["first"] == 1
    measured = members([local, low, high, winner], [None, contribution(), contribution(), None])
    assert measured is not None
    assert measured.title.startswith("FedAvg: ")
    measured = members([local, low, high], [None, contribution(), contribution()])
    assert measured is not None
    assert measured.title.startswith(f"{high.label}: each client alone and together, ")


@pytest.mark.parametrize("measured", [False, True])
def test_the_picture_says_which_number_it_draws_and_how_far_it_is_checked(measured: bool, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    federation = blank_federation(NAMES)
    weights = {0: np.full((1, 3, 3), 1 / 3)}
    result = made_up(federation, {0: [[60, 60, 60]]}, influence={"influence_vector": weights})
    if measured:
        found = Agreement("λ mean of rounds", "accuracy", "trained", 0.5, 0.2, 0.75)
        replace(contribution(), agreement=(found,)).write(tmp_path)
    text = page.make([replace(result, federation=federation)], folders=[tmp_path])
    drawn = text[text.index('<section id="graph">') : text.index('<section id="client">')]
    assert "The arrows draw λ, a weight in a mixture of models" in drawn
    assert (
        "ranks givers with ρ +0.50 to measured contributions (p 0.20, which chance alone may give)" in drawn
    ) == measured
    assert ("not checked on these runs" in drawn) == (not measured)


def test_a_narrow_terminal_cuts_no_name_or_number_off() -> None:
    own, longer = contribution(), {"north": "Hernan North", "south": "Hunan South", "west": "Long Beach West"}
    rows = tuple(replace(row, giver=longer.get(row.giver, ""), receiver=longer[row.receiver]) for row in own.rows)
    scores = tuple(replace(score, receiver=longer[score.receiver]) for score in own.scores)
    console = Console(width=80, file=io.StringIO())
    print_contribution(console, replace(own, clients=tuple(longer.values()), rows=rows, scores=scores))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for line in ("Hernan North", "Hunan South", "Long Beach West", "-2.50 .. +1.50", "gains"):
        assert line in text[text.index("Alone and together") : text.index("Who helps whom")], text
