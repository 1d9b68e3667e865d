"""What is shown of runs in a row: lines and headings in their order, in a terminal and elsewhere."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fedc2i.data.federation import Federation
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.report.progress import ProgressView
from fedc2i.runs.driver import compute
from fedc2i.runs.plan import prepare
from support.helpers import blank_federation, made_up


@pytest.mark.parametrize("terminal", [True, False])
def test_a_heading_comes_after_the_runs_before_it(terminal: bool) -> None:
    result = made_up(blank_federation(("a", "b")), {0: [[50.0, 70.0]]}, method=FedAvg())
    file = io.StringIO()
    with ProgressView(Console(file=file, force_terminal=terminal, width=160), 3) as view:
        for part in ("first part", "second part"):
            view.heading(part)
            view.begin(result)
            view.round(result.rounds[0])
        view.heading("third part")  # nothing is left to run
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    order = ["first part", "[1/3]", "second part", "[2/3]", "third part"]
    places = [shown.rindex(text) for text in order]
    assert places == sorted(places)
    assert [shown.count(text) for text in order[::2]] == [1, 1, 1]
    assert shown.count("60.00 % before local training, 61.00 % after local training") >= 2


def test_the_time_of_a_line_is_that_of_its_rounds_as_in_the_summary() -> None:
    """Half a second each; two of the four were computed before the run was resumed."""
    result = made_up(blank_federation(("a", "b")), {0: [[50.0, 70.0]] * 4}, method=FedAvg())
    file = io.StringIO()
    with ProgressView(Console(file=file, width=160), 1) as view:
        view.begin(replace(result, rounds=result.rounds[:2]))
        for report in result.rounds[2:]:
            view.round(report)
    assert "4 rounds in 2.0 s, " in file.getvalue()
    assert result.seconds == 2.0


def test_a_narrow_terminal_shows_the_round_and_both_scores() -> None:
    result = made_up(blank_federation(("a", "b")), {0: [[50.0, 70.0]] * 12}, method=FedAvg())
    file = io.StringIO()
    with ProgressView(Console(file=file, force_terminal=True, width=80), 3) as view:
        view.begin(result)
        for report in result.rounds:
            view.round(report)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert re.search(r"\[1/3\] FedAvg ━{8} +12/12 .*60\.00 % before, 61\.00 % after", shown)


@pytest.mark.parametrize(
    ("attack", "said"),
    [
        ("nan@b", r"seed 0, round 1: the upload of b is not finite; rejected"),
        ("scaled:1e6@b", r"seed 0, round 1: the upload of b is \S+ times the usual size; rejected"),
    ],
)
def test_an_upload_that_is_left_out_has_a_reason(federation: Federation, model: Model, attack: str, said: str) -> None:
    file = io.StringIO()
    (planned,) = prepare(["fedavg"], {"rounds": 2, "epochs": 1, "attack": attack, "device": "cpu"}, federation, model)
    with ProgressView(Console(file=file, width=160), 1) as view:
        result = compute(planned, view)
    lines = [line for line in file.getvalue().splitlines() if "the upload of" in line]
    assert len(lines) == 1  # once, not in every round
    assert re.fullmatch(said, lines[0])
    assert all(list(report.why) == ["b"] and report.why["b"] in file.getvalue() for report in result.rounds[:1])


def test_an_engine_that_says_itself_what_it_left_out_is_not_repeated(federation: Federation, model: Model) -> None:
    file = io.StringIO()
    (planned,) = prepare(["fedavg"], {"rounds": 1, "epochs": 1, "attack": "nan@b", "device": "cpu"}, federation, model)
    result = compute(planned)
    with ProgressView(Console(file=file, width=160), 1) as view:
        view.begin(replace(result, config=replace(result.config, engine="flower-sim")))
        view.round(result.rounds[0])
    assert "the upload of" not in file.getvalue()
    assert "rejected uploads: b 1" in file.getvalue()
