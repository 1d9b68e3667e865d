"""Tables on paper: Markdown, CSV and LaTeX by hand, differences from the published rows, ties, γ chosen, cost."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedcalm import FedCALM
from fedc2i.methods.fedic import FedIC
from fedc2i.methods.local import Local
from fedc2i.report.comparison import DIFFERENCE_NOTE, comparison_table
from fedc2i.report.reproduction import PUBLISHED_NOTE, averages_table, cost_table, gamma_table
from fedc2i.report.table import Row, Table
from fedc2i.runs.results import Result
from support.helpers import DIGIT5, blank_federation, made_up

AB = blank_federation(("a", "b"))
OFFICE = ("Amazon", "Caltech", "DSLR", "WebCam")
WITH_STAND_IN = blank_federation(DIGIT5, name="digit5", averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")})
OFFICE10 = blank_federation(OFFICE, name="office10")
HALF = 0.5**0.5  # two seeds this far from their mean have a sample deviation of 1

SMALL = Table(
    "Test accuracy (%) on x_y",
    ("Method", "Local training", "a", "Avg"),
    rows=[
        Row(("FedC²I (γ=2)", "after *", "80.00 ± 1.00", "75.50 ± 0.50 ~"), best=frozenset({2})),
        Row(("FedC²I (γ=2)", "published", "", "76.00 ± 0.10"), "published"),
        Row(("FedC²I (γ=2)", "difference, after", "", "-1.4 sd"), "published", ends_section=True),
        Row(("Local", "after *", "70.00", "60.00"), best=frozenset({3}), ends_section=True),
    ],
    notes=["100 % by hand"],
)


# Media.


def test_markdown_by_hand() -> None:
    assert SMALL.to_markdown() == (
        "**Test accuracy (%) on x_y**\n"
        "\n"
        "| Method | Local training | a | Avg |\n"
        "|---|---|---:|---:|\n"
        "| FedC²I (γ=2) | after * | **80.00 ± 1.00** | 75.50 ± 0.50 ~ |\n"
        "| *FedC²I (γ=2)* | *published* |  | *76.00 ± 0.10* |\n"
        "| *FedC²I (γ=2)* | *difference, after* |  | *-1.4 sd* |\n"
        "| Local | after * | 70.00 | **60.00** |\n"
        "\n"
        "- 100 % by hand\n"
    )


def test_csv_by_hand() -> None:
    assert SMALL.to_csv() == (
        "Method,Local training,a,a sd,Avg,Avg sd\n"
        "FedC²I (γ=2),after *,80.00,1.00,75.50,0.50\n"
        "FedC²I (γ=2),published,,,76.00,0.10\n"
        'FedC²I (γ=2),"difference, after",,,-1.4 sd,\n'
        "Local,after *,70.00,,60.00,\n"
    )


def test_latex_by_hand() -> None:
    assert SMALL.to_latex() == (
        "% needs \\usepackage{booktabs}\n"
        "\\begin{table}\n"
        "\\caption{Test accuracy (\\%) on x\\_y}\n"
        "\\begin{tabular}{llrr}\n"
        "\\toprule\n"
        "Method & Local training & a & Avg \\\\\n"
        "\\midrule\n"
        "FedC$^2$I ($\\gamma$=2) & after * & \\textbf{80.00 $\\pm$ 1.00} & "
        "75.50 $\\pm$ 0.50 \\textasciitilde{} \\\\\n"
        "\\textit{FedC$^2$I ($\\gamma$=2)} & \\textit{published} &  & \\textit{76.00 $\\pm$ 0.10} \\\\\n"
        "\\textit{FedC$^2$I ($\\gamma$=2)} & \\textit{difference, after} &  & \\textit{-1.4 sd} \\\\\n"
        "\\midrule\n"
        "Local & after * & 70.00 & \\textbf{60.00} \\\\\n"
        "\\bottomrule\n"
        "\\end{tabular}\n"
        "% 100 % by hand\n"
        "\\end{table}\n"
    )


def test_three_files_are_written(tmp_path: Path) -> None:
    assert SMALL.write(tmp_path / "new", "small") == ["small.md", "small.csv", "small.tex"]
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert written == {
        "small.md": SMALL.to_markdown(),
        "small.csv": SMALL.to_csv(),
        "small.tex": SMALL.to_latex(),
    }


@pytest.mark.parametrize(
    ("sign", "written"),
    [
        ("&", r"\&"),
        ("%", r"\%"),
        ("_", r"\_"),
        ("#", r"\#"),
        ("$", r"\$"),
        ("{", r"\{"),
        ("}", r"\}"),
        ("~", r"\textasciitilde{}"),
        ("^", r"\textasciicircum{}"),
        ("\\", r"\textbackslash{}"),
        ("γ", r"$\gamma$"),
        ("λ", r"$\lambda$"),
        ("Λ", r"$\Lambda$"),
        ("²", "$^2$"),
        ("±", r"$\pm$"),
        ("−", "$-$"),
    ],
)
def test_latex_of_special_signs_everywhere(sign: str, written: str) -> None:
    name = f"a{sign}b{sign}"
    lines = Table(name, (name, "p", name), rows=[Row((name, "p", name), best=frozenset({2}))]).to_latex().splitlines()
    text = f"a{written}b{written}"
    assert lines[2] == rf"\caption{{{text}}}"
    assert lines[5] == rf"{text} & p & {text} \\"
    assert lines[7] == rf"{text} & p & \textbf{{{text}}} \\"


AWKWARD = ("a&b", "50%_#$", "{x}~^\\", "γλΛ²±", "|p|q", '"a, b"', "[old]")


def awkward_table() -> Table:
    federation = blank_federation(AWKWARD, name="folder:my & {your} | data_#1", notes=("100 % & {more} \\ | notes",))
    accuracy = {seed: [[50 + seed + k for k in range(len(AWKWARD))]] for seed in (0, 1)}
    results = [
        made_up(federation, accuracy, method=FedAvg(), lift=0),
        made_up(federation, accuracy, key="fedc2i:a|b&c"),
    ]
    return comparison_table(results)


def split_cells(line: str, sign: str) -> list[str]:
    """The cells of a line between signs that no backslash precedes."""
    return re.split(rf"(?<!\\){re.escape(sign)}", line)


def test_markdown_rows_keep_their_length_whatever_the_names() -> None:
    table = awkward_table()
    lines = [line for line in table.to_markdown().splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4
    assert {len(split_cells(line, "|")) for line in lines} == {len(table.header) + 2}
    assert r"\|p\|q" in lines[0]
    assert r"FedC²I:a\|b&c" in lines[-1]


def test_latex_rows_keep_their_length_and_braces_balance_whatever_the_names() -> None:
    table = awkward_table()
    text = table.to_latex()
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + 4
    assert {len(split_cells(line, "&")) for line in rows} == {len(table.header)}
    assert rf"\begin{{tabular}}{{ll{'r' * (len(AWKWARD) + 1)}}}" in text
    visible = "".join(line for line in text.splitlines() if not line.startswith("%"))
    depth = 0
    for sign in re.sub(r"\\[{}]", "", visible):
        depth += {"{": 1, "}": -1}.get(sign, 0)
        assert depth >= 0
    assert depth == 0
    assert len(split_cells(visible, "$")) % 2  # formulas are closed
    assert not re.search(r"(?<!\\)[#_~%]", visible)
    assert visible.isascii() or not set(visible) & set("γλΛ²±−")


def test_csv_reads_back_to_the_same_names_and_numbers() -> None:
    table = awkward_table()
    header, *rows = csv.reader(io.StringIO(table.to_csv()))
    assert header[:2] == ["Method", "Local training"]
    assert header[2:] == [name for client in (*AWKWARD, "Avg") for name in (client, f"{client} sd")]
    assert len(rows) == len(table.rows)
    for cells, row in zip(rows, table.rows, strict=True):
        assert tuple(cells[:2]) == row.cells[:2]
        numbers = [cell.removesuffix(" ~").split(" ± ") for cell in row.cells[2:]]
        assert [float(cell) for cell in cells[2:]] == [float(part) for pair in numbers for part in pair]


def test_csv_of_one_seed_has_no_columns_for_deviations() -> None:
    header, *rows = csv.reader(io.StringIO(comparison_table([made_up(AB, {0: [[50, 60]]})]).to_csv()))
    assert header == ["Method", "Local training", "a", "b", "Avg"]
    assert [[float(cell) for cell in row[2:]] for row in rows] == [[50, 60, 55], [51, 61, 56]]


# Beside the paper.


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
    result = made_up(WITH_STAND_IN, around((95.45, 70.17, 93.22, 99, 76.82), 0.95), method=FedAvg(), lift=0)
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


# Ties and notes.


def tied(table: Table, column: int = -1) -> set[tuple[str, str]]:
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


def test_no_note_where_nothing_is_tied() -> None:
    assert not any(note.startswith("~") for note in comparison_table([by_seed(80, 82), by_seed(1, 2, key="x")]).notes)


def test_ties_go_by_the_average_without_the_stand_in() -> None:
    best = made_up(WITH_STAND_IN, {seed: [[80, 80, 80, 0, 80]] for seed in (0, 1)}, key="best", lift=0)
    other = made_up(WITH_STAND_IN, {seed: [[79, 79, 79, 99, 79]] for seed in (0, 1)}, key="other", lift=0)
    near = made_up(WITH_STAND_IN, {0: [[81, 81, 81, 0, 81]], 1: [[78, 78, 78, 0, 78]]}, key="near", lift=0)
    table = comparison_table([best, other, near])
    assert tied(table) == {("near", point) for point in ("before", "after")}
    assert any(note.startswith("~: the difference of Avg-4 ") for note in table.notes)


@pytest.mark.parametrize("make", [comparison_table, cost_table], ids=["comparison", "costs"])
def test_reconstructions_are_named_once_below_the_table(make: object) -> None:
    methods: list[tuple[Method, str]] = [
        (Local(), "local"),
        (FedCALM(), "fedcalm"),
        (FedIC(), "fedic"),
        (FedCALM(), "fedcalm:x"),
    ]
    table = make([made_up(AB, {0: [[1, 2]]}, method=method, key=key) for method, key in methods])  # type: ignore[operator]
    said = [note for note in table.notes if "reconstruction" in note]
    assert said == [FedCALM.reconstruction, FedIC.reconstruction]
    assert [note.split()[0] for note in said] == ["FedCALM", "FedIC"]
    assert not any("reconstruction" in note for note in make([made_up(AB, {0: [[1, 2]]})]).notes)  # type: ignore[operator]


# Cost.


def test_cost_is_what_the_rounds_measured() -> None:
    first, second = (made_up(AB, {seed: [[1, 2]] * 2 for seed in (0, 1)}, key=key) for key in ("fedc2i", "fedc2i:x"))
    second.rounds = [
        replace(report, seconds=number, bytes_up=1234, bytes_down=56789)
        for number, report in enumerate(second.rounds, 1)
    ]
    table = cost_table([first, second])
    assert table.title == "Cost on toy, lenet5, 2 clients"
    assert table.header == ("Method", "Device", "up (kB)", "down (kB)", "seconds a round")
    assert [row.cells for row in table.rows] == [
        ("FedC²I", "cpu", "0.0", "0.0", "0.500"),
        ("FedC²I:x", "cpu", "1.2", "56.8", "2.500"),
    ]
    header, *rows = csv.reader(io.StringIO(table.to_csv()))
    assert tuple(header) == table.header
    assert [float(cell) for cell in rows[1][2:]] == [1.2, 56.8, 2.5]


# Ablation and γ.


def test_ablation_has_the_averages_of_both_data_sets() -> None:
    digits = [
        made_up(WITH_STAND_IN, around((90, 90, 90, 40, 90)), method=Local(), lift=1),
        made_up(WITH_STAND_IN, around((80, 80, 80, 80, 80)), key="fedc2i-client", lift=1),
    ]
    office = [
        made_up(OFFICE10, around((60, 62, 64, 66)), method=Local(), lift=2),
        made_up(OFFICE10, around((70, 70, 70, 70)), key="fedc2i-client", lift=2),
    ]
    table = averages_table("Ablation: λ and Λ", [digits, office])
    assert table.title == "Ablation: λ and Λ; 2 seeds, mean ± sample sd"
    assert table.header == (
        *("Method", "Local training", "digit5 Avg", "digit5 Avg-4", "digit5 published Avg", "difference"),
        *("office10 Avg", "office10 published Avg", "difference"),
    )
    assert [row.cells for row in table.rows] == [
        ("Local", "before", "80.00 ± 1.00", "90.00 ± 1.00", "", "", "63.00 ± 1.00", "", "+3.8 sd"),
        (
            *("Local", "after *", "81.00 ± 1.00", "91.00 ± 1.00", "79.81 ± 0.60", ""),
            *("65.00 ± 1.00", "60.32 ± 0.09", "+6.6 sd"),
        ),
        ("FedC²I-client", "before", "80.00 ± 1.00", "80.00 ± 1.00", "", "", "70.00 ± 1.00", "", "+3.2 sd"),
        (
            *("FedC²I-client", "after *", "81.00 ± 1.00", "81.00 ± 1.00", "84.61 ± 0.24", ""),
            *("72.00 ± 1.00", "63.07 ± 2.85", "+4.2 sd"),
        ),
    ]
    assert [row.ends_section for row in table.rows] == [False, True, False, True]
    assert [set(row.best) for row in table.rows] == [{2, 3}, {2, 3}, {2, 6}, {2, 6}]
    assert PUBLISHED_NOTE in table.notes


def test_ablation_marks_ties() -> None:
    results = [by_seed(80, 82, 84, key="best"), by_seed(79, 83, 81, key="mixed"), by_seed(79, 81, 83, key="below")]
    table = averages_table("Ablation", [results])
    assert tied(table, column=2) == {("mixed", point) for point in ("before", "after")}


def of_gamma(
    gamma: float,
    test: Sequence[float],
    validation: Mapping[str, Sequence[float | None]],
    federation: Federation = AB,
) -> Result:
    """A result of one seed with validation accuracies by point; None: the client has no validation data."""
    result = made_up(federation, {0: [test]}, key=f"fedc2i:gamma={gamma}", lift=0)
    result.config = replace(result.config, options={"gamma": gamma})
    for point, metrics in result.rounds[-1].metrics.items():
        for own, value in zip(metrics, validation[point], strict=True):
            own.update({} if value is None else {"validation_accuracy": value})  # type: ignore[attr-defined]
    return result


def chosen(table: Table) -> dict[str, list[str]]:
    """By point, the γ with marked cells of each data set, in the order of the columns."""
    found: dict[str, list[str]] = {"before": [], "after": []}
    starts = [k for k, name in enumerate(table.header) if name.endswith("validation")]
    for start in starts:
        for row in table.rows:
            if start in row.best:
                found[row.cells[1].removesuffix(" *")].append(row.cells[0])
    return found


def both(*values: float | None) -> dict[str, Sequence[float | None]]:
    return dict.fromkeys(POINTS, values)


def test_gamma_is_chosen_by_validation_where_test_would_choose_another() -> None:
    table = gamma_table(
        [
            [
                of_gamma(0.5, (99, 99), both(70, 70)),
                of_gamma(5.0, (50, 50), both(80, 80)),
                of_gamma(10.0, (60, 60), both(75, 75)),
            ]
        ]
    )
    assert table.header == ("γ", "Local training", "toy validation", "toy Avg", "toy published Avg", "difference")
    assert [row.cells[:4] for row in table.rows] == [
        ("0.5", "before", "70.00", "99.00"),
        ("0.5", "after *", "70.00", "99.00"),
        ("5", "before", "80.00", "50.00"),
        ("5", "after *", "80.00", "50.00"),
        ("10", "before", "75.00", "60.00"),
        ("10", "after *", "75.00", "60.00"),
    ]
    assert [set(row.best) for row in table.rows] == [set(), set(), {2, 3}, {2, 3}, set(), set()]
    assert "validation accuracy chooses" in table.bold


def test_gamma_is_chosen_at_each_point_and_on_each_data_set() -> None:
    digits = [
        of_gamma(1.0, [50] * 5, {"received": [80] * 5, "trained": [70] * 5}, WITH_STAND_IN),
        of_gamma(2.0, [50] * 5, {"received": [70] * 5, "trained": [80] * 5}, WITH_STAND_IN),
    ]
    office = [of_gamma(1.0, [50] * 4, both(*[60] * 4), OFFICE10), of_gamma(2.0, [50] * 4, both(*[61] * 4), OFFICE10)]
    table = gamma_table([digits, office])
    assert table.header[2:] == (
        *("digit5 validation", "digit5 Avg", "digit5 Avg-4", "digit5 published Avg", "difference"),
        *("office10 validation", "office10 Avg", "office10 published Avg", "difference"),
    )
    assert chosen(table) == {"before": ["1", "2"], "after": ["2", "2"]}
    assert [set(row.best) for row in table.rows] == [{2, 3, 4}, set(), {7, 8}, {2, 3, 4, 7, 8}]
    published = [(row.cells[5], row.cells[9]) for row in table.rows]
    assert published == [("", ""), ("85.08 ± 0.60", "64.20 ± 1.12"), ("", ""), ("85.48 ± 0.27", "64.25 ± 2.11")]


def test_clients_without_validation_are_left_out_of_its_mean() -> None:
    table = gamma_table([[of_gamma(1.0, (50, 50), both(90, None)), of_gamma(2.0, (50, 50), both(80, None))]])
    assert [row.cells[2] for row in table.rows] == ["90.00", "90.00", "80.00", "80.00"]
    assert chosen(table) == {"before": ["1"], "after": ["1"]}


def test_validation_is_averaged_within_a_seed_first() -> None:
    result = made_up(AB, {0: [[50, 50]], 1: [[50, 50]]}, lift=0)
    result.config = replace(result.config, options={"gamma": 5.0})
    for report, values in zip(result.rounds, ((60, 80), (70, 72)), strict=True):
        for metrics in report.metrics.values():
            for own, value in zip(metrics, values, strict=True):
                own["validation_accuracy"] = value  # type: ignore[index]
    (row, _) = gamma_table([[result]]).rows
    assert row.cells[2] == "70.50 ± 0.71"


def test_names_cannot_speak_to_the_terminal() -> None:
    """Neither in the title nor in columns, cells and notes."""
    evil = "\x1b[2J\x07a\nb"
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    for width in (200, 40):
        console.print(Table(evil, ("Method", evil), rows=[Row((evil, evil))], notes=[evil]).to_rich(width))
    assert isinstance(console.file, io.StringIO)
    assert not [letter for letter in console.file.getvalue() if not letter.isprintable() and letter != "\n"]
