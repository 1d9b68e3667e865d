"""Tables and figures: what the cells say, what is marked, and that awkward federations can be drawn."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table as RichTable

from fedc2i.analysis import weights
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.local import Local
from fedc2i.report import figures
from fedc2i.report.comparison import BEST, comparison_table, influence_table
from fedc2i.runs.results import Result
from support.helpers import DIGIT5, blank_federation, is_drawn, made_up

AB = blank_federation(("a", "b"))
MAIN_DIGITS = blank_federation(
    DIGIT5, name="digit5", notes=("one domain is a stand-in",), averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")}
)


def rendered(table: RichTable, width: int, **options: Any) -> str:
    console = Console(width=width, record=True, file=io.StringIO(), **options)
    console.print(table)
    return console.export_text(styles=bool(options))


def attacked(result: Result, attack: str) -> Result:
    return replace(result, config=replace(result.config, attack=attack))


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


def two_methods(seeds: Sequence[int] = (0, 1)) -> list[Result]:
    return [
        made_up(AB, {seed: [[50 + 2 * seed, 80]] for seed in seeds}, method=FedAvg(), lift=-10),
        made_up(AB, {seed: [[60, 70]] for seed in seeds}, method=FedC2I(gamma=2), key="fedc2i:gamma=2.0", lift=5),
    ]


def test_cells_of_a_comparison() -> None:
    table = comparison_table(two_methods())
    assert table.title == "Test accuracy (%) on toy, lenet5, 1 round, 2 seeds, mean ± sample sd"
    assert table.header == ("Method", "Local training", "a", "b", "Avg")
    assert [row.cells for row in table.rows] == [
        ("FedAvg", "before *", "51.00 ± 1.41", "80.00 ± 0.00", "65.50 ± 0.71"),
        ("FedAvg", "after", "41.00 ± 1.41", "70.00 ± 0.00", "55.50 ± 0.71"),
        ("FedC²I:gamma=2.0", "before", "60.00 ± 0.00", "70.00 ± 0.00", "65.00 ± 0.00 ~"),
        ("FedC²I:gamma=2.0", "after *", "65.00 ± 0.00", "75.00 ± 0.00", "70.00 ± 0.00"),
    ]
    assert [row.ends_section for row in table.rows] == [False, True, False, True]


def test_best_of_every_column_at_its_point_is_marked() -> None:
    table = comparison_table(two_methods())
    assert [row.best for row in table.rows] == [{3, 4}, frozenset(), {2}, {2, 3, 4}]
    assert table.bold == BEST


def test_a_method_alone_is_not_marked_as_the_best() -> None:
    table = comparison_table(two_methods()[:1])
    assert not any(row.best for row in table.rows)
    assert not table.bold


def test_ties_as_printed_are_all_best() -> None:
    results = [made_up(AB, {0: [[50.001, 40]]}, method=Local(), lift=0), made_up(AB, {0: [[50.004, 30]]}, lift=0)]
    assert [2 in row.best for row in comparison_table(results).rows] == [True] * 4
    assert [3 in row.best for row in comparison_table(results).rows] == [True, True, False, False]


@pytest.mark.parametrize(("method", "starred"), [(Local(), "after"), (FedAvg(), "before"), (FedC2I(), "after")])
def test_star_at_the_point_that_the_authors_report(method: Any, starred: str) -> None:
    points = [row.cells[1] for row in comparison_table([made_up(AB, {0: [[1, 2]]}, method=method)]).rows]
    assert [point.removesuffix(" *") for point in points] == ["before", "after"]
    assert [point for point in points if point.endswith("*")] == [f"{starred} *"]


def test_one_seed_is_named_and_has_no_deviation() -> None:
    table = comparison_table(two_methods((3,)))
    assert table.title.endswith("seed 3")
    assert "±" not in table.title + "".join(cell for row in table.rows for cell in row.cells)


def test_published_rows_stand_below_ours() -> None:
    results = [made_up(MAIN_DIGITS, {0: [[90.0] * 5]}, method=method) for method in (Local(), FedC2I())]
    results.append(made_up(MAIN_DIGITS, {0: [[91.0] * 5]}, key="fedc2i:gamma=3.0"))
    results.append(made_up(MAIN_DIGITS, {0: [[91.0] * 5]}, key="fedc2i:gamma=2.0"))
    table = comparison_table(results)
    assert table.header == ("Method", "Local training", *DIGIT5, "Avg", "Avg-4")
    printed = [row for row in table.rows if row.kind == "published"]
    assert [row.cells[:3] for row in printed] == [
        ("Local", "published", "94.02 ± 0.44"),
        ("FedC²I", "published", "95.00 ± 0.93"),
        ("FedC²I:gamma=2.0", "published", ""),  # the study of γ prints averages only
    ]
    assert [row.cells[-2:] for row in printed] == [
        ("79.81 ± 0.60", "81.03"),
        ("85.50 ± 0.63", "86.62"),
        ("85.48 ± 0.27", ""),
    ]
    assert not any(row.best for row in printed)  # marks compare our own runs
    assert [row.kind for row in table.rows].index("published") == 2
    assert table.notes[-1] == "one domain is a stand-in"


@pytest.mark.parametrize("name", ["toy", "digit5 [dirichlet:2:0.5]"])
def test_no_published_rows_on_other_data(name: str) -> None:
    result = made_up(blank_federation(DIGIT5, name=name), {0: [[90.0] * 5]}, method=FedAvg())
    result.config = type(result.config)(data="digit5", model="lenet5", rounds=1)  # what a partition of it is run with
    assert [row.kind for row in comparison_table([result]).rows] == ["plain", "plain"]


def test_markdown_has_rows_of_equal_length() -> None:
    results = [
        made_up(MAIN_DIGITS, {0: [[90.0] * 5], 1: [[91.0] * 5]}, method=m) for m in (Local(), FedAvg(), FedC2I())
    ]
    text = comparison_table(results).to_markdown()
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 3 * 3
    assert {line.count("|") for line in lines} == {2 + len(DIGIT5) + 2 + 1}
    assert set(lines[1]) == set("|-:")
    assert text.startswith("**Test accuracy (%) on digit5")
    assert "| **91.50 ± 0.71** |" in text
    assert "| *Local* | *published* | *94.02 ± 0.44* |" in text
    assert text.endswith("- one domain is a stand-in\n")


@pytest.mark.parametrize("width", [60, 70, 80, 100, 200])
def test_terminal_of_any_width_shows_methods_and_averages(width: int) -> None:
    accuracy = {0: [[90.0, 81, 72, 63, 54]], 1: [[91.0, 82, 73, 64, 55]]}
    results = [made_up(MAIN_DIGITS, accuracy, method=method) for method in (Local(), FedAvg(), FedC2I())]
    text = rendered(comparison_table(results).to_rich(width), width)
    assert max(map(len, text.splitlines())) <= width
    for word in ("Local", "FedAvg", "FedC²I", "before *", "after *", "published", "Avg-4", "74.75"):
        assert word in text
    assert "…" not in text
    assert [mean in text for mean in ("90.50", "81.50", "63.50", "54.50")].count(True) == {60: 2, 70: 3}.get(width, 4)
    assert ("clients fit here" in text) == (width < 80)
    assert ("90.50 ± 0.71" in text) == (width == 200)


def test_many_clients_leave_room_for_method_and_average() -> None:
    result = measured(60, 3)
    text = rendered(comparison_table([result]).to_rich(120), 120)
    average = result.scores("trained")["Avg"]
    assert all(word in text for word in ("FedC²I", "after *", "client", f"{average}", "of 60 clients fit here"))
    assert str(influence_table(result, 120)).startswith("Who helps whom: FedC²I, 60 clients, see influence.png")


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
    assert matrix is not None
    cells = [[(cell.plain, str(cell.style)) for cell in column.cells] for column in matrix.columns[1:]]  # type: ignore[union-attr]
    assert cells == [[("0.900", "bold green"), ("0.500", "")], [("0.100", "dim"), ("-", "dim")]]
    assert "\x1b[1;32m0.900" in rendered(matrix, 100, force_terminal=True, color_system="standard")


def test_influence_of_several_seeds_is_averaged() -> None:
    vectors = {0: [[[0.9, 0.1], [0.5, 0.5]]], 1: [[[0.7, 0.3], [0.5, 0.5]]]}
    result = made_up(AB, {0: [[1, 2]], 1: [[1, 2]]}, influence={"influence_vector": vectors})
    matrix = influence_table(result, 100)
    assert matrix is not None
    text = rendered(matrix, 100)
    assert "0.800" in text
    assert "0.200" in text


def test_no_influence_without_measurements() -> None:
    assert influence_table(made_up(AB, {0: [[1, 2]]}, method=Local()), 100) is None


# Figures.


def measured(clients: int, classes: int, rounds: int = 3, seeds: int = 1, holes: bool = False) -> Result:
    """A result with random influence; with holes, some of it was not measured."""
    rng = np.random.default_rng(0)
    federation = blank_federation([f"client {k}" for k in range(clients)], classes)
    found: dict[str, dict[int, Any]] = {"influence_vector": {}, "influence_matrix": {}}
    for seed in range(seeds):
        for name, shape in (("influence_vector", ()), ("influence_matrix", (classes,))):
            values = rng.random((rounds, clients, clients, *shape))
            values /= values.sum(2, keepdims=True)
            if holes:
                values[0] = np.nan
                values[:, :, -1] = np.nan
            found[name][seed] = values
    accuracy = {seed: rng.uniform(0, 100, (rounds, clients)) for seed in range(seeds)}
    return made_up(federation, accuracy, influence=found)


@pytest.mark.parametrize(
    "result",
    [
        measured(1, 2),
        measured(2, 10, rounds=1),
        measured(60, 3),
        measured(3, 100),
        measured(3, 4, holes=True, seeds=2),
        measured(2, 1),
    ],
    ids=["1 client", "2 clients", "60 clients", "100 classes", "partial participation", "1 class"],
)
def test_every_figure_of_a_run(result: Result, tmp_path: Path) -> None:
    figures.draw_run(result, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"accuracy.png", "samples.png", "influence.png", "influence_classes.png"}
    assert all(is_drawn(tmp_path / name) for name in names)


def test_figure_of_a_comparison(tmp_path: Path) -> None:
    figures.draw_comparison(two_methods(), tmp_path)
    assert is_drawn(tmp_path / "comparison.png")


def test_names_that_look_like_formulas(tmp_path: Path) -> None:
    federation = blank_federation(("$\\frac$", "100$ to 200$"), name="folder:$HOME/$x_")
    vectors = {"influence_vector": {0: [[[0.9, 0.1], [0.5, 0.5]]]}}
    result = made_up(federation, {0: [[1, 2]]}, influence=vectors)
    figures.draw_run(result, tmp_path)
    figures.draw_comparison([result], tmp_path)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("lengths", [(3, 1), (1, 3)])
def test_seeds_of_unequal_length_are_drawn(lengths: tuple[int, int], tmp_path: Path) -> None:
    vectors = {seed: np.full((length, 2, 2), 0.5) for seed, length in enumerate(lengths)}
    accuracy = {seed: [[1, 2]] * length for seed, length in enumerate(lengths)}
    result = made_up(AB, accuracy, influence={"influence_vector": vectors})
    assert weights.by_round(result, "influence_vector").tolist() == [[[0.5, 0.5], [0.5, 0.5]]] * 3


def test_seed_that_measured_nothing_does_not_spoil_the_figure() -> None:
    vectors = {seed: np.full((2, 2, 2), 0.5) for seed in (0, 1)}
    result = made_up(AB, {0: [[1, 2]] * 2, 1: [[1, 2]] * 2}, influence={"influence_vector": vectors})
    for report in result.rounds[:2]:
        report.influence.clear()  # type: ignore[attr-defined]
    assert weights.by_round(result, "influence_vector").shape == (2, 2, 2)


def test_clients_that_took_part_in_some_seeds_are_drawn_by_these() -> None:
    nan = np.nan
    vectors = {0: [[[0.9, 0.1], [nan, nan]]], 1: [[[0.7, 0.3], [0.4, 0.6]]]}
    result = made_up(AB, {0: [[1, 2]], 1: [[1, 2]]}, influence={"influence_vector": vectors})
    assert np.allclose(weights.by_round(result, "influence_vector"), [[[0.8, 0.2], [0.4, 0.6]]])


def maps_of(result: Result) -> list[Any]:
    """The panels of the figure of influence vectors."""
    return [axis for axis in figures.influence_vectors(result, result.influence()).axes if axis.get_title()]


def titles(maps: Sequence[Any]) -> list[str]:
    return [axis.get_title() for axis in maps]


def test_heat_maps_carry_names_and_values() -> None:
    result = measured(3, 4, rounds=20)
    maps = maps_of(result)
    assert titles(maps) == ["round 1", "round 2", "round 10", "round 20"]
    assert [label.get_text() for label in maps[0].get_xticklabels()] == list(result.federation.names)
    assert [label.get_text() for label in maps[0].get_yticklabels()] == list(result.federation.names)
    written = [text.get_text() for text in maps[-1].texts]
    assert written == [f"{value:.2f}" for value in result.influence()[-1].flatten()]


def test_equal_share_is_in_the_middle_of_the_colours() -> None:
    shades = figures.around_equal_share(np.array([[0.7, 0.3], [0.5, np.nan]]), 2)
    assert shades(0.5) == 0.5
    assert (shades.vmin, shades.vmax) == (pytest.approx(0.3), pytest.approx(0.7))


@pytest.mark.parametrize(("rounds", "chosen"), [(1, [1]), (2, [1, 2]), (3, [1, 3]), (200, [1, 20, 100, 200])])
def test_rounds_that_are_drawn_by_default(rounds: int, chosen: list[int]) -> None:
    assert titles(maps_of(measured(2, 2, rounds=rounds))) == [f"round {number}" for number in chosen]


def test_rounds_of_the_preset_are_drawn_if_they_were_run() -> None:
    result = measured(2, 2, rounds=5)
    federation = blank_federation(result.federation.names, preset={"figure_rounds": [1, 4, 50]})
    result.federation = federation
    assert titles(maps_of(result)) == ["round 1", "round 4"]
