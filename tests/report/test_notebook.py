"""Results in a notebook: tables and plots hold the numbers of the rounds, and stay readable whatever is missing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest

from fedc2i import (
    Comparison,
    Federation,
    Model,
    Result,
    UserError,
    compare,
    comparison_table,
    plot_accuracy,
    plot_influence,
    read_run,
    resume,
    run,
)
from fedc2i.data.remote import RemoteFederation
from fedc2i.engine.records import POINTS
from fedc2i.methods.fedavg import FedAvg
from fedc2i.report import notebook
from support.helpers import blank_federation, made_up

AB = blank_federation(("a", "b"))
NAN = float("nan")
LAMBDA = {0: [[[0.9, 0.1], [0.2, 0.8]], [[0.7, 0.3], [0.4, 0.6]]], 5: [[[0.5, 0.5], [0.4, 0.6]], [[0.1, 0.9], [0, 1]]]}


@pytest.fixture(autouse=True)
def _closed_figures() -> Iterator[None]:
    matplotlib.use("agg")
    from matplotlib import pyplot

    yield
    pyplot.close("all")


def two_seeds(**more: Any) -> Result:
    accuracy = {0: [[10, 20], [30, 40]], 5: [[20, 40], [50, 80]]}
    return made_up(AB, accuracy, influence={"influence_vector": LAMBDA}, **more)


def html(shown: Result | Comparison) -> str:
    """As a notebook shows it."""
    return notebook.comparison_html(shown) if isinstance(shown, Comparison) else notebook.result_html(shown)


class _Cells(HTMLParser):
    """The tables of a page as rows of texts; an unbalanced page fails."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._open: list[str] = []
        self.feed(page)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


# pandas


def test_long_table_holds_every_value() -> None:
    frame = two_seeds().to_pandas()
    assert list(frame.columns) == ["seed", "round", "client", "point", "metric", "value"]
    assert len(frame) == 2 * 2 * 2 * 2
    assert frame.iloc[0].tolist() == [0, 1, "a", "received", "accuracy", 10.0]
    assert frame.iloc[-1].tolist() == [5, 2, "b", "trained", "accuracy", 81.0]
    last = frame[(frame["round"] == 2) & (frame["point"] == "received")]
    assert last.pivot(index="seed", columns="client", values="value").to_numpy().tolist() == [[30, 40], [50, 80]]


def test_a_missing_metric_has_no_row_and_a_nan_has_one() -> None:
    result = made_up(AB, {0: [[10, 20]]})
    received, trained = (result.rounds[0].metrics[point] for point in ("received", "trained"))
    trained[0].clear()  # client a gave no answer
    received[1]["accuracy"] = trained[1]["accuracy"] = NAN  # client b diverged
    frame = result.to_pandas()
    assert frame[["client", "point"]].to_numpy().tolist() == [["a", "received"], ["b", "received"], ["b", "trained"]]
    assert frame["value"].isna().tolist() == [False, True, True]


def test_rounds_that_were_not_scored_have_no_rows() -> None:
    result = two_seeds()
    result.rounds = [replace(own, metrics={} if own.round == 1 else own.metrics) for own in result.rounds]
    assert set(result.to_pandas()["round"]) == {2}
    result.rounds.clear()
    assert list(result.to_pandas().columns) == ["seed", "round", "client", "point", "metric", "value"]


def test_comparison_says_which_method() -> None:
    frame = Comparison([two_seeds(), two_seeds(method=FedAvg(), key="fedavg:anchor=0.1")]).to_pandas()
    assert frame.columns[0] == "method"
    assert frame["method"].value_counts().to_dict() == {"fedc2i": 16, "fedavg:anchor=0.1": 16}


def test_without_pandas_one_line_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"^to_pandas needs pandas: pip install 'fedc2i\[notebook\]', or in a clone "):
        two_seeds().to_pandas()


# HTML


def test_html_shows_scores_and_influence() -> None:
    scores, influence = _Cells(html(two_seeds())).tables
    assert scores[0] == ["Method", "Local training", "a", "b", "Avg", "Worst"]
    assert scores[1] == ["FedC²I", "before", "40.00 ± 14.14", "60.00 ± 28.28", "50.00 ± 21.21", "40.00 ± 14.14"]
    assert scores[2][1:3] == ["after *", "41.00 ± 14.14"]
    assert influence == [["", "a", "b"], ["a", "0.40", "0.60"], ["b", "0.20", "0.80"]]  # means of the last rounds


def test_html_of_a_method_that_measures_nothing() -> None:
    page = html(made_up(AB, {0: [[10, 20]]}, method=FedAvg()))
    assert len(_Cells(page).tables) == 1
    assert "0.5 s; a client sends 8 B a round" in page


def test_html_marks_what_is_not_a_number() -> None:
    result = made_up(AB, {0: [[10, NAN]]}, influence={"influence_vector": {0: [[[1, NAN], [NAN, NAN]]]}})
    scores, influence = _Cells(html(result)).tables
    assert scores[1][2:] == ["10.00", "–", "10.00", "10.00"]
    assert influence[1:] == [["a", "1.00", "–"], ["b", "–", "–"]]


def test_html_is_escaped_and_has_no_colours_of_text() -> None:
    federation = blank_federation(("<script>", "b & c"), name="<i>")
    page = html(made_up(federation, {0: [[10, 20]]}, influence={"influence_vector": {0: LAMBDA[0][:1]}}))
    assert "<script>" not in page
    assert "<i>" not in page
    assert _Cells(page).tables[0][0][2:4] == ["<script>", "b & c"]
    own_colours = r"[;\"]color:(?!inherit)|background:(?!rgba\(31,119,180,0\.\d\d\))"
    assert not re.search(own_colours, page)
    assert "http" not in page


def test_html_of_many_clients_stays_compact() -> None:
    federation = blank_federation([f"c{k}" for k in range(40)])
    influence = {"influence_vector": {0: [np.full((40, 40), 1 / 40)]}}
    page = html(made_up(federation, {0: [range(40)]}, influence=influence))
    (scores,) = _Cells(page).tables
    assert scores[0] == ["Method", "Local training", *(f"c{k}" for k in range(12)), "Avg", "Worst"]
    assert scores[1][-2:] == ["19.50", "0.00"]
    assert "12 of 40 clients are shown." in page


def test_html_before_the_first_round() -> None:
    result = two_seeds()
    result.rounds.clear()
    assert html(result) == "<p>&lt;Result of FedC²I on toy: no rounds yet&gt;</p>"


def test_comparison_is_one_table() -> None:
    both = Comparison([two_seeds(), two_seeds(method=FedAvg(), lift=-5)])
    (table,) = _Cells(html(both)).tables
    assert [row[0] for row in table] == ["Method", "FedC²I", "FedC²I", "FedAvg", "FedAvg", "Majority class"]
    assert table[4][4].startswith("45.00")
    assert "| FedAvg | after | 35.00 ± 14.14 |" in str(comparison_table(both))
    assert _Cells(html(Comparison())).tables == []


def test_bold_is_the_best_of_one_point_and_nothing_of_one_run() -> None:
    both = Comparison([two_seeds(lift=30), two_seeds(method=FedAvg(), lift=-5)])  # received is the same
    rows = html(both).split("<tr>")[2:6]
    bold = [re.findall(r"font-weight:bold\">([\d.]+)", row) for row in rows]
    received, trained = ["40.00", "60.00", "50.00", "40.00"], ["70.00", "90.00", "80.00", "70.00"]
    assert bold == [received, trained, received, []]
    assert "font-weight:bold" not in html(two_seeds())


def test_results_that_do_not_belong_together_stay_apart() -> None:
    mixed = Comparison([two_seeds(), made_up(blank_federation(("x",)), {0: [[1]]}, method=FedAvg())])
    assert len(_Cells(html(mixed)).tables) == 3
    with pytest.raises(UserError, match="different clients or seeds"):
        str(comparison_table(mixed))
    with pytest.raises(UserError, match="empty"):
        str(comparison_table(Comparison()))


# Plots


def test_accuracy_lines_are_the_curve() -> None:
    ax = plot_accuracy(two_seeds(), "received")
    lines = {line.get_label(): (line.get_xdata(), line.get_ydata()) for line in ax.get_lines()}
    assert list(lines) == ["a", "b", "average of 2"]
    np.testing.assert_array_equal(lines["a"], [[1, 2], [15, 40]])
    np.testing.assert_array_equal(lines["average of 2"], [[1, 2], [22.5, 50]])
    assert ax.get_title() == "FedC²I on toy, before local training, mean of 2 seeds"


def test_accuracy_of_one_seed_at_the_headline() -> None:
    from matplotlib.figure import Figure

    own = Figure().subplots()
    assert plot_accuracy(two_seeds(), seed=5, ax=own) is own
    np.testing.assert_array_equal(own.get_lines()[1].get_ydata(), [41, 81])  # FedC²I's headline is trained
    assert own.get_title() == "FedC²I on toy, after local training"


@pytest.mark.filterwarnings("error")
def test_accuracy_has_gaps_where_nobody_answered() -> None:
    ax = plot_accuracy(made_up(AB, {0: [[10, NAN], [NAN, NAN], [30, 50]]}), "received")
    average = np.ma.filled(ax.get_lines()[-1].get_ydata().astype(float), NAN)
    np.testing.assert_array_equal(average, [10, NAN, 40])


def test_accuracy_of_a_comparison() -> None:
    both = Comparison([two_seeds(), two_seeds(method=FedAvg(), lift=-5)])
    lines = {line.get_label(): line.get_ydata().tolist() for line in plot_accuracy(both).get_lines()}
    assert lines == {"FedC²I": [23.5, 51], "FedAvg": [17.5, 45]}
    assert plot_accuracy(both, "received", seed=0).get_lines()[1].get_ydata().tolist() == [15, 35]


def test_influence_of_a_round_and_a_seed() -> None:
    result = two_seeds()
    for arguments, want in (
        ({}, [[0.4, 0.6], [0.2, 0.8]]),
        ({"round": 1}, [[0.7, 0.3], [0.3, 0.7]]),
        ({"round": 1, "seed": 5}, LAMBDA[5][0]),
    ):
        ax = plot_influence(result, **arguments)
        np.testing.assert_allclose(ax.images[0].get_array(), want)
        assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
        assert f"round {arguments.get('round', 2)}" in ax.get_title()


def test_influence_of_a_client_by_class() -> None:
    cube = np.arange(12).reshape(1, 2, 2, 3) / 12
    result = made_up(AB, {0: [[1, 2]]}, influence={"influence_matrix": {0: cube}})
    ax = plot_influence(result, client="b")
    np.testing.assert_allclose(ax.images[0].get_array(), cube[0, 1])
    assert [label.get_text() for label in ax.get_xticklabels()] == ["class 0", "class 1", "class 2"]
    with pytest.raises(UserError, match="client must be one of a, b, got 'c'"):
        plot_influence(result, client="c")
    with pytest.raises(UserError, match="measured no influence vector"):
        plot_influence(result)


def test_influence_that_is_kept_of_the_last_round_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    cube = np.arange(12).reshape(2, 2, 3) / 12
    result = made_up(AB, {0: [[1, 2]] * 3}, influence={"influence_matrix": {0: [cube] * 3}})
    for module in ("fedc2i.runs.results", "fedc2i.analysis.weights"):
        monkeypatch.setattr(f"{module}.LARGE", cube.nbytes - 1)
    result.rounds[:2] = [replace(own, influence={}) for own in result.rounds[:2]]
    assert "round 3" in plot_influence(result, client="a").get_title()
    np.testing.assert_allclose(plot_influence(result, 3, client="b").images[0].get_array(), cube[1])
    with pytest.raises(UserError, match="round must be a whole number from 3 to 3, got 1"):
        plot_influence(result, 1, client="a")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"round": 0}, "round must be a whole number from 1 to 2, got 0"),
        ({"round": 3}, "round must be a whole number from 1 to 2, got 3"),
        ({"seed": 1}, "seed must be one of 0, 5, got 1"),
    ],
)
def test_influence_says_what_is_allowed(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plot_influence(two_seeds(), **arguments)


def test_what_one_seed_did_not_measure_is_the_others() -> None:
    """A client that took no part in one seed's last round, and a seed that stopped a round earlier."""
    first, second = np.array([[[0.6, 0.4], [0.2, 0.8]]] * 2), np.array([[[0.8, 0.2], [0.4, 0.6]]])
    first[1, 1] = NAN
    accuracy = {0: [[1, 2], [3, 4]], 1: [[1, 2]]}
    result = made_up(AB, accuracy, influence={"influence_vector": {0: first, 1: second}})
    for number, expected in ((1, [[0.7, 0.3], [0.3, 0.7]]), (np.int64(2), [[0.6, 0.4], [NAN, NAN]])):
        (image,) = plot_influence(result, number).get_images()  # type: ignore[arg-type]
        np.testing.assert_allclose(np.ma.filled(image.get_array(), NAN), expected, rtol=1e-6)
    assert "0.60" in html(result)


def test_plots_of_nothing_are_refused() -> None:
    none = np.full((2, 2), NAN)
    nothing = made_up(AB, {0: [[1, 2]]}, influence={"influence_vector": {0: [none]}})
    with pytest.raises(UserError, match="measured no influence vector"):
        plot_influence(nothing)
    later = made_up(AB, {0: [[1, 2], [3, 4]]}, influence={"influence_vector": {0: [none, np.eye(2)]}})
    with pytest.raises(UserError, match="nothing was measured in round 1"):
        plot_influence(later, 1)
    with pytest.raises(UserError, match=r"whole number from 1 to 2, got 1\.5"):
        plot_influence(later, 1.5)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="point must be received or trained, got 'both'"):
        plot_accuracy(nothing, "both")  # type: ignore[arg-type]
    nothing.rounds.clear()
    with pytest.raises(UserError, match="no round was scored yet"):
        plot_accuracy(nothing)


# Real runs


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory,
    make_federation: Callable[..., Federation],
    make_model: Callable[..., Model],
) -> Path:
    """A comparison of two methods with two seeds."""
    folder = tmp_path_factory.mktemp("views") / "both"
    settings: dict[str, Any] = {"rounds": 2, "epochs": 1, "seeds": (0, 3), "executor": "looped"}
    federation = make_federation((12, 9, 7), validation=4)
    found = compare(["fedavg", "fedc2i"], federation, model=make_model(), out=folder, **settings)
    assert isinstance(found, Comparison)
    assert isinstance(found, list)
    return folder


def test_a_run_that_is_read_back_shows_the_same(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "fedc2i" / "metrics.jsonl").read_text().splitlines()]
    result = read_run(folder / "fedc2i")
    rows = result.to_pandas().to_dict("records")
    assert sorted(rows, key=repr) == sorted(lines, key=repr)
    for point in POINTS:
        assert str(result.scores(point)["Avg"]) in html(result)
    np.testing.assert_array_equal(plot_influence(result, 1, seed=3).images[0].get_array(), result.influence(seed=3)[0])


def test_a_resumed_comparison_is_one_table(folder: Path) -> None:
    found = resume(folder)
    assert isinstance(found, Comparison)
    assert str(comparison_table(found)) == (folder / "comparison.md").read_text(encoding="utf-8")


def test_a_run_of_sites_of_which_one_is_missing(folder: Path, tmp_path: Path) -> None:
    # As a run on Flower is left when site b did not answer in the last round.
    own = tmp_path / "fedc2i"
    own.mkdir()
    for name in ("config.toml", "summary.json", "influence.npz"):
        (own / name).write_bytes((folder / "fedc2i" / name).read_bytes())
    entries = [json.loads(line) for line in (folder / "fedc2i" / "metrics.jsonl").read_text().splitlines()]
    kept = [entry for entry in entries if not (entry["round"] == 2 and entry["client"] == "b")]
    (own / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    result = read_run(own)
    assert isinstance(result.federation, RemoteFederation)
    assert len(result.to_pandas()) == len(kept) < len(entries)
    row = _Cells(html(result)).tables[0][1]
    assert row[3] == "–"
    assert row[2] != "–"
    lines = {line.get_label(): line.get_ydata() for line in plot_accuracy(result).get_lines()}
    assert np.isnan(lines["b"]).tolist() == [False, True]
    assert lines["average of 3"][-1] == pytest.approx((lines["a"][-1] + lines["c"][-1]) / 2)


def test_one_run_in_memory(make_federation: Callable[..., Federation], make_model: Callable[..., Model]) -> None:
    result = run("fedc2i", make_federation(), model=make_model(), rounds=1, epochs=1, executor="looped")
    assert [cells[0] for cells in _Cells(html(result)).tables[1][1:]] == ["a", "b", "c"]
    assert plot_influence(result, client="a").images[0].get_array().shape == (3, 4)
