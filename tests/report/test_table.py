"""Tables by hand: Markdown, CSV and LaTeX, and in a terminal; whatever the names in them."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedc2i.methods.fedavg import FedAvg
from fedc2i.report.comparison import comparison_table
from fedc2i.report.table import Row, Table
from support.helpers import blank_federation, made_up

AB = blank_federation(("a", "b"))


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
    written = {path.suffix: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert written == {".md": SMALL.to_markdown(), ".csv": SMALL.to_csv(), ".tex": SMALL.to_latex()}


@pytest.mark.parametrize(
    ("sign", "written"),
    [
        *((sign, rf"\{sign}") for sign in "&%_#${}"),
        *(("~", r"\textasciitilde{}"), ("^", r"\textasciicircum{}"), ("\\", r"\textbackslash{}")),
        *(("γ", r"$\gamma$"), ("λ", r"$\lambda$"), ("Λ", r"$\Lambda$"), ("²", "$^2$"), ("±", r"$\pm$"), ("−", "$-$")),
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
    assert len(lines) == 2 + 4 + 1  # the last is the majority class
    assert {len(split_cells(line, "|")) for line in lines} == {len(table.header) + 2}
    assert r"\|p\|q" in lines[0]
    assert r"FedC²I:a\|b&c" in lines[-2]


def test_latex_rows_keep_their_length_and_braces_balance_whatever_the_names() -> None:
    table = awkward_table()
    text = table.to_latex()
    rows = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert len(rows) == 1 + 4 + 1
    assert {len(split_cells(line, "&")) for line in rows} == {len(table.header)}
    assert rf"\begin{{tabular}}{{ll{'r' * (len(AWKWARD) + 2)}}}" in text
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
    assert header[2:] == [name for client in (*AWKWARD, "Avg", "Worst") for name in (client, f"{client} sd")]
    assert len(rows) == len(table.rows)
    for cells, row in zip(rows, table.rows, strict=True):
        assert tuple(cells[:2]) == row.cells[:2]
        numbers = [cell.removesuffix(" ~").partition(" ± ")[::2] for cell in row.cells[2:]]
        assert cells[2:] == [part for pair in numbers for part in pair]


def test_csv_of_one_seed_has_no_columns_for_deviations() -> None:
    header, *rows = csv.reader(io.StringIO(comparison_table([made_up(AB, {0: [[50, 60]]})]).to_csv()))
    assert header == ["Method", "Local training", "a", "b", "Avg", "Worst"]
    third = [33.33] * 4  # one test sample of each of three classes
    assert [[float(cell) for cell in row[2:]] for row in rows] == [[50, 60, 55, 50], [51, 61, 56, 51], third]


@pytest.mark.parametrize(("width", "whole"), [(67, True), (66, False)])
def test_headings_are_whole_words_where_there_is_room(width: int, whole: bool) -> None:
    names = ("Hungary", "Switzerland")
    table = comparison_table([made_up(blank_federation(names), {0: [[50, 60]], 1: [[51, 61]]})])
    console = Console(file=io.StringIO(), width=width)
    console.print(table.to_rich(width))
    assert isinstance(console.file, io.StringIO)
    head = console.file.getvalue().partition("───")[0]
    assert "Hungary" in head
    assert ("Switzerland" in head) == whole


def test_names_cannot_speak_to_the_terminal() -> None:
    """Neither in the title nor in columns, cells and notes."""
    evil = "\x1b[2J\x07a\nb"
    console = Console(file=io.StringIO(), width=200, force_terminal=False)
    for width in (200, 40):
        console.print(Table(evil, ("Method", evil), rows=[Row((evil, evil))], notes=[evil]).to_rich(width))
    assert isinstance(console.file, io.StringIO)
    assert not [letter for letter in console.file.getvalue() if not letter.isprintable() and letter != "\n"]
