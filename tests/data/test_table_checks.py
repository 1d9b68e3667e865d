"""What in a table is probably a mistake: numbers mixed with text, names of rows, stray spellings."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data.sources import load
from fedc2i.data.table import from_table

CLINICS = ("Nord", "Ost", "Sued")


def clinics(rows: int = 150, **change: Any) -> pandas.DataFrame:
    """Patients of three clinics with a value that is different in each row."""
    count = 3 * rows
    columns = {"crp": np.arange(count) / 8, "ward": ["a", "b", "c"] * rows, "ill": [0, 1] * (count // 2)}
    return pandas.DataFrame(columns | {"clinic": np.repeat(CLINICS, rows)} | change)


def of_file(tmp_path: Path, table: pandas.DataFrame, **options: Any) -> Any:
    table.to_csv(tmp_path / "t.csv", index=False)
    return load(f"table:{tmp_path}/t.csv", **({"target": "ill", "clients": "clinic"} | options))


def with_texts(cells: dict[int, str], rows: int = 150) -> pandas.DataFrame:
    table = clinics(rows).astype({"crp": object})
    for row, text in cells.items():
        table.loc[row, "crp"] = text
    return table


@pytest.mark.parametrize("rows", [20, 150])  # with few, or too many, texts at each client
@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({21: "<0.5"}, "such as '<0.5' in row 22 (client 'CLINIC'); correct it"),
        ({25: "low", 21: "<0.5", 22: "<0.5"}, "such as '<0.5' in row 22 and 2 more (client 'CLINIC'); correct it"),
    ],
)
def test_a_text_among_numbers_is_found_at_its_client(
    tmp_path: Path, cells: dict[int, str], words: str, rows: int
) -> None:
    """It makes texts of the numbers of all clients."""
    with pytest.raises(UserError) as caught:
        of_file(tmp_path, with_texts(cells, rows))
    client = CLINICS[21 // rows]
    assert f"t.csv: column 'crp' holds numbers and text {words.replace('CLINIC', client)}" in str(caught.value)


def test_texts_at_several_clients_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'<1' in row 161 \(client 'Ost'\) and 'n/m' in row 301 \(client 'Sued'\);"):
        of_file(tmp_path, with_texts({160: "<1", 300: "n/m"}))


def test_a_client_with_one_text_and_no_number_is_found_too(tmp_path: Path) -> None:
    """It holds no numbers itself, but the others' have become texts."""
    table = with_texts({150: "<1", 151: "<1"})
    with pytest.raises(UserError, match=r"text such as '<1' in row 151 and 1 more \(client 'Ost'\)"):
        of_file(tmp_path, table[(table.clinic != "Ost") | (table.index < 152)])


def test_a_text_in_files_of_parts_and_in_a_frame_is_found(tmp_path: Path) -> None:
    table = with_texts({3: "<1"}).drop(columns="clinic")[:40]
    (tmp_path / "Nord").mkdir()
    table[20:].to_csv(tmp_path / "Nord" / "train.csv", index=False)
    table[:20].to_csv(tmp_path / "Nord" / "test.csv", index=False)
    with pytest.raises(UserError, match=r"'<1' in row 4 \(client 'Nord', test\)"):
        load(f"table:{tmp_path}", target="ill")
    with pytest.raises(UserError, match=r"'<1' in the row with index p3 \(client 'Nord'\)"):
        from_table({"Nord": table.set_axis([f"p{k}" for k in range(40)])}, "ill")


def test_numbers_that_a_row_without_target_has_made_texts(tmp_path: Path) -> None:
    table = with_texts({160: "<1"}).astype({"ill": object})
    table.loc[160, "ill"] = None
    with pytest.raises(UserError, match=r"'crp' holds numbers, but as text: another cell of it, .* without target, is"):
        of_file(tmp_path, table)


def test_codes_with_numbers_at_one_client_stay_categories(tmp_path: Path) -> None:
    table = clinics(ward=np.where(np.repeat(CLINICS, 150) == "Ost", "B7", "12"))
    assert of_file(tmp_path, table, drop="crp").input.shape == (2,)


def identifiers(change: dict[int, float], rows: int = 100) -> list[str]:
    frame = pandas.DataFrame({"Patient ID": np.arange(rows) + 1000.0, "bp": np.arange(rows) % 20})
    for row, value in change.items():
        frame.loc[row, "Patient ID"] = value
    frame["ill"] = [0, 1] * (rows // 2)
    found = from_table({"a": frame[: rows // 2], "b": frame[rows // 2 :]}, "ill")
    assert [f"warning: {note}" for note in found.notes] == found.describe()[1:]
    return list(found.notes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "in every row"),
        ({3: np.nan, 70: np.nan}, "in almost every row"),
        ({3: 1004, 70: 1071}, "in almost every row"),  # two visits
    ],
)
def test_columns_that_name_rows_are_noted(change: dict[int, float], words: str) -> None:
    (note,) = identifiers(change)
    assert note.startswith(f"'Patient ID' has a different whole number {words}; if it")
    assert note.endswith("drop it with --set 'drop=Patient ID'.")


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        (dict.fromkeys(range(4), 1000), 100),  # at a: 47 of 50
        (dict.fromkeys(range(31), np.nan), 100),  # at a: 19 numbers
        ({3: 1003.5}, 100),
        ({}, 38),
    ],
)
def test_columns_that_do_not_name_rows_are_not_noted(change: dict[int, float], rows: int) -> None:
    assert identifiers(change, rows) == []


def test_classes_and_categories_that_differ_only_in_case_are_noted(tmp_path: Path) -> None:
    table = clinics(ill=["home", "died "] * 225)
    table.loc[[310, 320, 330], "ill"] = ["Home", " home", "home "]
    table.loc[[5, 160, 161], "ward"] = "A"
    federation = of_file(tmp_path, table)
    assert {*federation.classes} == {"Home", "died", "home"}
    target, ward = federation.warnings
    remedy = " differ only in case; write them alike if they mean the same."
    assert target == f"target 'ill': classes 'Home' (1 row, at Sued) and 'home'{remedy}"
    assert ward == f"column 'ward': categories 'A' (3 rows, at Nord and Ost) and 'a'{remedy}"
    assert {target, ward} <= {*federation.notes}
    assert f"warning: {target}" in federation.describe()
    assert from_table(table, "ill", "clinic").warnings == federation.warnings


def test_many_spellings_give_one_line(tmp_path: Path) -> None:
    names = [chr(letter + 32 * (k % 2)) for k, letter in enumerate(np.repeat([65, 66, 67, 68, 69], 30).tolist())]
    federation = of_file(tmp_path, clinics(ward=names * 3))
    (line,) = federation.warnings
    assert re.fullmatch(
        r"column 'ward': .*, at Nord, Ost and Sued\) and 'c' differ only in case \(and 2 more\); .*", line
    )
