"""The table of results: cells, marks and notes, the published figures beside them, and who helps whom."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table as RichTable

from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedcalm import FedCALM
from fedc2i.methods.fedic import FedIC
from fedc2i.methods.local import Local
from fedc2i.report.comparison import BEST, DIFFERENCE_NOTE, comparison_table, influence_table, published_row
from fedc2i.report.published import PUBLISHED
from fedc2i.report.table import Table
from fedc2i.runs.results import Result
from support.helpers import DIGIT5, blank_federation, made_up

AB = blank_federation(("a", "b"))


OFFICE = ("Amazon", "Caltech", "DSLR", "WebCam")


MAIN_DIGITS = blank_federation(
    DIGIT5, name="digit5", notes=("one domain is a stand-in",), averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")}
)


OFFICE10 = blank_federation(OFFICE, name="office10")


HALF = 0.5**0.5  # two seeds this far from their mean have a sample deviation of 1


METHODS = ("local", "fedavg", "fedprox", "fedrep", "fedrod", "fedproto", "fedcalm", "fedic", "fedc2i")
AVERAGE_ONLY = (
    *(f"fedc2i-{variant}" for variant in ("client", "class-local", "class-global")),
    *(f"fedc2i:gamma={gamma}" for gamma in (0.5, 1.0, 2.0, 10.0)),
)


def rendered(table: RichTable, width: int, **options: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), **options)
    console.print(table)
    return console.export_text(styles=bool(options))


def attacked(result: Result, attack: str) -> Result:
    return replace(result, config=replace(result.config, attack=attack))


def two_methods(seeds: Sequence[int] = (0, 1)) -> list[Result]:
    return [
        made_up(AB, {seed: [[50 + 2 * seed, 80]] for seed in seeds}, method=FedAvg(), lift=-10),
        made_up(AB, {seed: [[60, 70]] for seed in seeds}, method=FedC2I(gamma=2), key="fedc2i:gamma=2.0", lift=5),
    ]


def test_cells_of_a_comparison() -> None:
    table = comparison_table(two_methods())
    assert table.title == "Test accuracy (%) on toy, lenet5, 1 round, 2 seeds, mean ± sample sd"
    assert table.header == ("Method", "Local training", "a", "b", "Avg", "Worst")
    assert [row.cells for row in table.rows] == [
        ("FedAvg", "before *", "51.00 ± 1.41", "80.00 ± 0.00", "65.50 ± 0.71", "51.00 ± 1.41"),
        ("FedAvg", "after", "41.00 ± 1.41", "70.00 ± 0.00", "55.50 ± 0.71", "41.00 ± 1.41"),
        ("FedC²I:gamma=2.0", "before", "60.00 ± 0.00", "70.00 ± 0.00", "65.00 ± 0.00 ~", "60.00 ± 0.00"),
        ("FedC²I:gamma=2.0", "after *", "65.00 ± 0.00", "75.00 ± 0.00", "70.00 ± 0.00", "65.00 ± 0.00"),
        ("Majority class", "", "33.33", "33.33", "33.33", "33.33"),
    ]
    assert [row.ends_section for row in table.rows] == [False, True, False, True, True]


def test_best_of_every_column_at_its_point_is_marked() -> None:
    table = comparison_table(two_methods())
    assert [row.best for row in table.rows] == [{3, 4}, frozenset(), {2, 5}, {2, 3, 4, 5}, frozenset()]
    assert table.bold == BEST
    alone = comparison_table(two_methods()[:1])
    assert not alone.bold
    assert not any(row.best for row in alone.rows)


def test_ties_as_printed_are_all_best() -> None:
    results = [made_up(AB, {0: [[50.001, 40]]}, method=Local(), lift=0), made_up(AB, {0: [[50.004, 30]]}, lift=0)]
    assert [2 in row.best for row in comparison_table(results).rows[:-1]] == [True] * 4
    assert [3 in row.best for row in comparison_table(results).rows[:-1]] == [True, True, False, False]


@pytest.mark.parametrize(("method", "starred"), [(Local(), "after"), (FedAvg(), "before"), (FedC2I(), "after")])
def test_star_at_the_point_that_the_authors_report(method: Any, starred: str) -> None:
    points = [row.cells[1] for row in comparison_table([made_up(AB, {0: [[1, 2]]}, method=method)]).rows[:2]]
    assert [point.removesuffix(" *") for point in points] == ["before", "after"]
    assert [point for point in points if point.endswith("*")] == [f"{starred} *"]


def test_one_seed_is_named_and_has_no_deviation() -> None:
    table = comparison_table(two_methods((3,)))
    assert table.title.endswith("seed 3")
    assert "±" not in table.title + "".join(cell for row in table.rows for cell in row.cells)


def test_notes_name_attackers_once() -> None:
    first, second = two_methods()
    assert not any("attack" in note for note in comparison_table([first, second]).notes)
    both = [attacked(first, "nan@a"), attacked(second, "nan@a")]
    said = "Under attack: nan by a (seeds 0, 1); averages include the attackers."
    assert [note for note in comparison_table(both).notes if "attack" in note] == [said]
    one = comparison_table([first, both[1]]).notes
    assert said.replace("attack:", f"attack ({second.label}):") in one
    several = comparison_table([attacked(first, "nan@a,b;scaled@b")]).notes
    assert any("nan by a and b (seeds 0, 1); scaled:10 by b (seeds 0, 1); averages" in note for note in several)


def test_notes_on_many_attackers_are_short() -> None:
    federation = blank_federation(tuple(f"c{m:02}" for m in range(40)))
    result = attacked(made_up(federation, {seed: [[1.0] * 40] for seed in range(9)}, method=FedAvg()), "nan@50%")
    (said,) = (note for note in comparison_table([result]).notes if "attack" in note)
    assert said.count(" and 12 more (seed ") == 6
    assert said.count(", c") == 6 * 7 + 5  # eight clients a draw, and the next draw after a comma
    assert "and others in 3 more draws, see summary.json; averages" in said


def test_reconstructions_are_named_once_below_the_table() -> None:
    methods: list[tuple[Method, str]] = [
        (Local(), "local"),
        (FedCALM(), "fedcalm"),
        (FedIC(), "fedic"),
        (FedCALM(), "fedcalm:x"),
    ]
    table = comparison_table([made_up(AB, {0: [[1, 2]]}, method=method, key=key) for method, key in methods])
    said = [note for note in table.notes if "reconstruction" in note]
    assert said == [FedCALM.reconstruction, FedIC.reconstruction]
    assert [note.split()[0] for note in said] == ["FedCALM", "FedIC"]
    assert not any("reconstruction" in note for note in comparison_table([made_up(AB, {0: [[1, 2]]})]).notes)


# Beside the paper.


@pytest.mark.parametrize(("data", "domains"), [("digit5", DIGIT5), ("office10", OFFICE)])
def test_printed_averages_are_those_of_the_columns(data: str, domains: tuple[str, ...]) -> None:
    assert [*PUBLISHED[data]] == [*METHODS, *AVERAGE_ONLY]
    for method in METHODS:
        row = PUBLISHED[data][method]
        assert tuple(row) == (*domains, "Avg")
        meant = {name: row[name].mean for name in domains}
        if (data, method) == ("office10", "fedavg"):
            assert meant["Caltech"] == 38.90  # as printed, and certainly a misprint (shared METHODS.md, B.3)
            meant["Caltech"] = 38.96
        assert np.mean(list(meant.values())) == pytest.approx(row["Avg"].mean, abs=0.02)
        assert all(score.sd is not None and 0 < score.sd < 5 for score in row.values())
    assert all(list(PUBLISHED[data][key]) == ["Avg"] for key in AVERAGE_ONLY)
    averages = {key: row["Avg"].mean for key, row in PUBLISHED[data].items()}
    assert max(averages, key=averages.__getitem__) == "fedc2i"
    assert averages["fedc2i-class-local"] == (79.32 if data == "digit5" else 62.53)


@pytest.mark.parametrize(("method", "average"), [("local", 81.03), ("fedavg", 83.42), ("fedc2i", 86.62)])
def test_average_over_the_four_published_domains(method: str, average: float) -> None:
    row = published_row(made_up(MAIN_DIGITS, {0: [[90.0] * 5]}, key=method))
    assert (row["Avg-4"].mean, row["Avg-4"].sd) == (pytest.approx(average, abs=0.0051), None)


def test_published_rows_stand_below_ours() -> None:
    results = [made_up(MAIN_DIGITS, {0: [[90.0] * 5]}, method=method) for method in (Local(), FedC2I())]
    results.append(made_up(MAIN_DIGITS, {0: [[91.0] * 5]}, key="fedc2i:gamma=3.0"))
    results.append(made_up(MAIN_DIGITS, {0: [[91.0] * 5]}, key="fedc2i:gamma=2.0"))
    table = comparison_table(results)
    assert table.header == ("Method", "Local training", *DIGIT5, "Avg", "Avg-4", "Worst")
    printed = [row for row in table.rows if row.kind == "published"]
    assert [row.cells[:3] for row in printed] == [
        ("Local", "published", "94.02 ± 0.44"),
        ("FedC²I", "published", "95.00 ± 0.93"),
        ("FedC²I:gamma=2.0", "published", ""),  # the study of γ prints averages only
    ]
    assert [row.cells[-3:] for row in printed] == [
        ("79.81 ± 0.60", "81.03", ""),
        ("85.50 ± 0.63", "86.62", ""),
        ("85.48 ± 0.27", "", ""),
    ]
    assert not any(row.best for row in printed)  # marks compare our own runs
    assert [row.kind for row in table.rows].index("published") == 2
    assert table.notes[-1] == "one domain is a stand-in"


@pytest.mark.parametrize("name", ["toy", "digit5 [dirichlet:2:0.5]"])
def test_no_published_rows_on_other_data(name: str) -> None:
    result = made_up(blank_federation(DIGIT5, name=name), {0: [[90.0] * 5]}, method=FedAvg())
    result.config = type(result.config)(data="digit5", model="lenet5", rounds=1)  # what a partition of it is run with
    assert [row.kind for row in comparison_table([result]).rows] == ["plain", "plain", "majority"]


def around(means: Sequence[float], sd: float = 1.0) -> dict[int, list[list[float]]]:
    """Two seeds with these means, and this sample deviation for every client."""
    return {seed: [[mean + sign * sd * HALF for mean in means]] for seed, sign in ((0, -1), (1, 1))}


def cells_of(table: Table, point: str) -> dict[str, str]:
    (row,) = (row for row in table.rows if row.cells[1] == point)
    return dict(zip(table.header, row.cells, strict=True))


def test_difference_in_pooled_deviations() -> None:
    # published FedAvg: 58.68(1.08) 38.90(2.28) 77.08(4.77) 84.75(3.39) 64.87(2.49)
    result = made_up(OFFICE10, around((60.68, 38.90, 70.08, 84.75)), method=FedAvg(), lift=2)
    table = comparison_table([result], against_paper=True)
    assert [row.cells[1] for row in table.rows] == [
        "before *",
        "after",
        "published",
        "difference, before",
        "difference, after",
    ]
    received, trained = cells_of(table, "difference, before"), cells_of(table, "difference, after")
    assert received == {
        "Method": "FedAvg",
        "Local training": "difference, before",
        "Amazon": "+1.9 sd",  # 2 / √((1 + 1.08²) / 2) = 1.92
        "Caltech": "+0.0 sd",
        "DSLR": "-2.0 sd",  # -7 / √((1 + 4.77²) / 2) = -2.03
        "WebCam": "+0.0 sd",
        "Avg": "-0.7 sd",  # (63.6025 - 64.87) / √((1 + 2.49²) / 2) = -0.67
        "Worst": "",
    }
    assert trained["Amazon"] == "+3.8 sd"
    assert DIFFERENCE_NOTE in table.notes
    assert all(row.kind == "published" and not row.best for row in table.rows[2:])
    assert [row.ends_section for row in table.rows] == [False] * 4 + [True]


def test_difference_of_a_single_seed_is_in_points() -> None:
    table = comparison_table([made_up(OFFICE10, {0: [[60.68, 38, 70.08, 84.75]]}, method=FedAvg())], True)
    away = cells_of(table, "difference, before")
    assert [away[name] for name in (*OFFICE, "Avg")] == ["+2.00 pt", "-0.90 pt", "-7.00 pt", "+0.00 pt", "-1.49 pt"]


def test_stand_in_is_not_held_against_the_paper() -> None:
    # published FedAvg: 95.45(0.52) 68.17(0.95) 93.22(0.89) 80.73(0.49) 76.82(1.08) 82.88(0.04); four of them: 83.415
    result = made_up(MAIN_DIGITS, around((95.45, 70.17, 93.22, 99, 76.82), 0.95), method=FedAvg(), lift=0)
    table = comparison_table([result], against_paper=True)
    away = cells_of(table, "difference, before")
    assert away["SVHN"] == "+2.1 sd"  # 2 / 0.95
    assert (away["SynthDigits"], away["Avg"]) == ("", "")
    assert away["Avg-4"] == "+0.50 pt"  # the paper prints no deviation of it
    assert [away[name] for name in ("MNIST", "USPS", "MNIST-M")] == ["+0.0 sd"] * 3
    assert cells_of(table, "published")["SynthDigits"] == "80.73 ± 0.49"  # printed, but not compared


def test_published_average_is_compared_where_all_data_is_the_papers() -> None:
    federation = blank_federation(DIGIT5, name="digit5")
    result = made_up(federation, around((95.45, 68.17, 93.22, 80.73, 76.82)), method=FedAvg(), lift=0)
    away = cells_of(comparison_table([result], against_paper=True), "difference, before")
    assert [away[name] for name in (*DIGIT5, "Avg")] == ["+0.0 sd"] * 6


def test_columns_that_the_paper_leaves_out_have_no_difference() -> None:
    result = made_up(OFFICE10, around((60, 40, 70, 85)), key="fedc2i:gamma=2.0")  # averages only are printed
    away = cells_of(comparison_table([result], against_paper=True), "difference, before")
    assert [away[name] for name in OFFICE] == [""] * 4
    assert away["Avg"].endswith(" sd")


def test_differences_only_where_asked_for_and_printed() -> None:
    printed = made_up(OFFICE10, around((60, 40, 70, 85)), method=FedAvg())
    assert not [row for row in comparison_table([printed]).rows if row.cells[1].startswith("difference")]
    other = made_up(OFFICE10, around((60, 40, 70, 85)), key="fedc2i:gamma=3.0")
    assert [row.cells[1] for row in comparison_table([other], against_paper=True).rows] == ["before", "after *"]


# Ties.


def tied(table: Table, column: int = -2) -> set[tuple[str, str]]:
    """Methods and points with a mark; no cell but this one may carry it."""
    marked = column % len(table.header)
    assert not any("~" in cell for row in table.rows for k, cell in enumerate(row.cells) if k != marked)
    return {(row.cells[0], row.cells[1].removesuffix(" *")) for row in table.rows if row.cells[marked].endswith("~")}


def by_seed(*averages: float, federation: Federation = AB, key: str = "fedc2i", lift: float = 0.0) -> Result:
    accuracy = {seed: [[mean] * len(federation.names)] for seed, mean in enumerate(averages)}
    return made_up(federation, accuracy, key=key, lift=lift)


def test_ties_are_marked_at_each_point_and_never_on_the_best_row() -> None:
    best, mixed = by_seed(80, 82, 84, key="best"), by_seed(79, 83, 81, key="mixed")
    below, same = by_seed(79, 81, 83, key="below"), by_seed(80, 82, 84, key="same")
    table = comparison_table([below, best, mixed, same])
    assert tied(table) == {(name, point) for name in ("mixed", "same") for point in ("before", "after")}
    assert any(note.startswith("~: the difference of Avg") and "may be chance" in note for note in table.notes)


def test_best_of_each_point_is_its_own() -> None:
    falling, rising = by_seed(80, 82, key="falling", lift=-10), by_seed(70, 72, key="rising", lift=10)
    table = comparison_table([falling, rising, by_seed(79, 83, key="mixed", lift=-30)])
    assert tied(table) == {("mixed", "before")}


def test_ties_need_two_seeds() -> None:
    table = comparison_table([by_seed(80, key="best"), by_seed(80, key="same"), by_seed(79, key="below")])
    assert tied(table) == set()
    assert not any(note.startswith("~") for note in table.notes)
    assert not any(note.startswith("~") for note in comparison_table([by_seed(80, 82), by_seed(1, 2, key="x")]).notes)


def test_ties_go_by_the_average_without_the_stand_in() -> None:
    best = made_up(MAIN_DIGITS, {seed: [[80, 80, 80, 0, 80]] for seed in (0, 1)}, key="best", lift=0)
    other = made_up(MAIN_DIGITS, {seed: [[79, 79, 79, 99, 79]] for seed in (0, 1)}, key="other", lift=0)
    near = made_up(MAIN_DIGITS, {0: [[81, 81, 81, 0, 81]], 1: [[78, 78, 78, 0, 78]]}, key="near", lift=0)
    table = comparison_table([best, other, near])
    assert tied(table) == {("near", point) for point in ("before", "after")}
    assert any(note.startswith("~: the difference of Avg-4 ") for note in table.notes)


# In a terminal.


@pytest.mark.parametrize("width", [60, 70, 80, 100, 200])
def test_terminal_of_any_width_shows_methods_and_averages(width: int) -> None:
    accuracy = {0: [[90.0, 81, 72, 63, 54]], 1: [[91.0, 82, 73, 64, 55]]}
    results = [made_up(MAIN_DIGITS, accuracy, method=method) for method in (Local(), FedAvg(), FedC2I())]
    text = rendered(comparison_table(results).to_rich(width), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Local", "FedAvg", "FedC²I", "before *", "after *", "published", "Avg-4", "74.75"):
        assert word in text
    assert "…" not in text
    assert [mean in text for mean in ("90.50", "81.50", "63.50")].count(True) == {60: 0, 70: 2, 80: 2}.get(width, 3)
    assert ("clients fit here" in text) == (width < 100)
    assert ("90.50 ± 0.71" in text) == (width == 200)


def test_many_clients_leave_room_for_method_and_average() -> None:
    seen = {"influence_vector": {0: np.full((1, 60, 60), 1 / 60)}}
    result = made_up(blank_federation([f"client {k}" for k in range(60)]), {0: [range(60)]}, influence=seen)
    text = rendered(comparison_table([result]).to_rich(120), 120)
    average = result.scores("trained")["Avg"]
    assert all(word in text for word in ("FedC²I", "after *", "client", f"{average}", "of 60 clients fit here"))
    assert str(influence_table(result, 120)).startswith(
        "Whose model weighs most: FedC²I, 60 clients, see influence.png"
    )


def test_long_method_names_are_folded() -> None:
    result = made_up(MAIN_DIGITS, {0: [[90.0] * 5]}, key="fedc2i:gamma=2.0,gamma_class=5.0,influence=first-order")
    text = rendered(comparison_table([result]).to_rich(80), 80)
    assert all(word in text for word in ("FedC²I", "after *", "90.00", "Avg-4"))


def test_square_brackets_in_names_are_text() -> None:
    federation = blank_federation(("[/b]x", "[red]y"), name="folder:my[old]data")
    result = made_up(federation, {0: [[1, 2]]}, influence={"influence_vector": {0: [[[0.5, 0.5], [0.5, 0.5]]]}})
    text = rendered(comparison_table([result]).to_rich(120), 120)
    assert all(name in text for name in ("[/b]x", "[red]y", "my[old]data"))
    matrix = influence_table(result, 100)
    assert matrix is not None
    assert rendered(matrix, 120).count("[/b]x") == 2


def test_influence_is_shaded_against_an_equal_share() -> None:
    vectors = [[[0.0, 0.0], [0.0, 0.0]], [[0.9, 0.1], [0.5, np.nan]]]
    result = made_up(AB, {0: [[1, 2], [3, 4]]}, influence={"influence_vector": {0: vectors}})
    matrix = influence_table(result, 100)
    assert isinstance(matrix, RichTable)
    cells = [[(cell.plain, str(cell.style)) for cell in column.cells] for column in matrix.columns[1:]]  # type: ignore[union-attr]
    assert cells == [[("0.900", "bold green"), ("0.500", "")], [("0.100", "dim"), ("-", "dim")]]
    assert "\x1b[1;32m0.900" in rendered(matrix, 100, force_terminal=True, color_system="standard")
    by_seed = {0: [[[0.9, 0.1], [0.5, 0.5]]], 1: [[[0.7, 0.3], [0.5, 0.5]]]}
    seeds = made_up(AB, {0: [[1, 2]], 1: [[1, 2]]}, influence={"influence_vector": by_seed})
    text = rendered(influence_table(seeds, 100), 100)
    assert "0.800" in text
    assert "0.200" in text
    assert influence_table(made_up(AB, {0: [[1, 2]]}, method=Local()), 100) is None


def test_an_undefined_score_is_a_dash_and_averages_say_over_how_many_clients() -> None:
    result = made_up(AB, {0: [[50, 60]]})
    for report in result.rounds:
        for point in POINTS:
            report.metrics[point][0]["auroc"] = 80.0  # b's test data has one class
    table = comparison_table([result], metric="auroc")
    assert table.title.startswith("Test AUROC (%) on toy")
    assert [row.cells[2:] for row in table.rows] == [("80.00", "–", "80.00", "80.00")] * 2
    assert (
        "–: AUROC is not defined, as the test data has one class (b); averages and Worst are over 1 of 2 clients."
        in table.notes
    )


def test_the_majority_class_stands_below_the_methods() -> None:
    federation = blank_federation(("a", "b"), classes=4)
    lopsided = replace(federation.clients[1], test=federation.clients[1].test.take([0, 0, 0, 1]))
    federation = replace(federation, clients=(federation.clients[0], lopsided))
    result = made_up(federation, {0: [[50, 60]]})
    assert result.majority == {"a": 25.0, "b": 75.0}
    row = comparison_table([result]).rows[-1]
    assert row.cells == ("Majority class", "", "25.00", "75.00", "50.00", "25.00")
    assert all(row.kind == "plain" for row in comparison_table([result], metric="f1").rows)
