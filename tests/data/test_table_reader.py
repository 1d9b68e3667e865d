"""Files as tables: separators, kinds that are decided once for a client, and what is refused."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data.sources import load
from fedc2i.data.table import from_table
from fedc2i.data.table_reader import read


def table_of(tmp_path: Path, text: str, **options: Any) -> pandas.DataFrame:
    file = tmp_path / "rows.csv"
    file.write_bytes(text.encode(options.pop("encoding", "utf-8")))
    return read({"": file}, **options)[""]


@pytest.mark.parametrize(
    "text",
    [
        "age;ill\n30;0;\n40;1;\n",  # a separator after the last cell of rows
        "age;ill;\n30;0;\n40;1;\n",  # and of the header
        "\n \nage;ill\n30;0\n40;1\n",  # blank lines first
        "age\till\r\n30\t0\r\n\r\n40\t1\r\n",
        ",age,ill\n0,30,0\n1,40,1\n",  # row numbers of pandas, whose column has no name
        "age ; ill\n 30; 0\n40 ;1 \n",
    ],
)
def test_files_that_say_the_same(tmp_path: Path, text: str) -> None:
    assert table_of(tmp_path, text).to_dict("list") == {"age": [30, 40], "ill": [0, 1]}


@pytest.mark.parametrize(
    ("cells", "values"),
    [
        (["1", "-2.5", ".5", "1e3", "+4", "?"], [1, -2.5, 0.5, 1000, 4, None]),
        (["01", "02", "10"], ["01", "02", "10"]),  # codes
        (["0", "0.5", "-0"], [0, 0.5, 0]),
        (["True", "FALSE", ""], [True, False, None]),
        (["1", "x"], ["1", "x"]),
    ],
)
def test_kinds_of_cells(tmp_path: Path, cells: list[str], values: list[Any]) -> None:
    found = table_of(tmp_path, "\n".join(["a,b", *(f"{cell},1" for cell in cells)]))["a"]
    assert [None if pandas.isna(value) else value for value in found] == values


def test_decimal_commas_are_read_where_the_comma_is_no_separator(tmp_path: Path) -> None:
    text = "Temp;Puls;Ort\n36,5;80;Köln\n37;81,25;Bonn\n"
    assert table_of(tmp_path, text, encoding="latin-1").to_dict("list") == {
        "Temp": [36.5, 37],
        "Puls": [80, 81.25],
        "Ort": ["Köln", "Bonn"],
    }
    frame = pandas.DataFrame({"temp": ["36,5", "37,0"] * 10, "ill": [0, 1] * 10, "site": ["a"] * 20})
    with pytest.raises(UserError, match="'temp' holds numbers with a comma such as '36,5'; write them with a point"):
        from_table(frame, "ill", "site")


@pytest.mark.parametrize("kinds", [None, {"age": "number"}])
def test_pyarrow_never_gets_a_file_without_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kinds: dict[str, str] | None
) -> None:
    """It may abort the process at its exit, after it has refused such a file."""
    monkeypatch.setattr("pyarrow.csv.read_csv", lambda *_: pytest.fail("was called"))
    for text in ("age,ill", "age,ill\n", "\nage,ill\n\n\n", "age,ill\r\n  \r\n\t\r\n", "age\n", "age\n\n"):
        with pytest.raises(UserError, match=r"rows\.csv: no rows below the header"):
            table_of(tmp_path, text, kinds=kinds)


def test_a_single_column_may_have_empty_cells(tmp_path: Path) -> None:
    assert table_of(tmp_path, 'age\n""\n3\n')["age"].isna().tolist() == [True, False]


def test_a_column_has_one_kind_in_all_files_of_a_client(tmp_path: Path) -> None:
    """The test rows alone would pass for numbers, and 01 for 1."""
    rng = np.random.default_rng(0)
    (tmp_path / "a").mkdir()
    train = ["ward,age,ill", *(f"{rng.choice(['01', '02', 'A3'])},{30 + k},{k % 2}" for k in range(30))]
    (tmp_path / "a" / "train.csv").write_text("\n".join(train))
    (tmp_path / "a" / "test.csv").write_text("ward,age,ill\n01,50,0\n02,60,1\n")
    test = load(f"table:{tmp_path}", target="ill").clients[0].test.x
    assert test[:, :3].tolist() == [[1, 0, 0], [0, 1, 0]]


def test_none_is_a_class_and_a_missing_input(tmp_path: Path) -> None:
    rows = [f"{pain},{'-' if k % 5 else 'x'},{k % 7}" for k, pain in enumerate(["None", "mild", "severe"] * 10)]
    (tmp_path / "a.csv").write_text("\n".join(["pain,mark,age", *rows]))
    federation = load(f"table:{tmp_path}", target="pain")
    assert federation.classes == ("None", "mild", "severe")
    assert federation.notes == ()
    assert federation.input.shape == (3,)  # mark=x, mark is missing, age


def test_numbers_to_predict_are_refused() -> None:
    age = [20 + k % 40 for k in range(120)]
    frame = pandas.DataFrame({"bp": np.arange(120.0) % 11, "age": age, "site": ["a"] * 120})
    with pytest.raises(UserError, match="'age' has 40 different numbers; this package predicts classes"):
        from_table(frame, "age", "site")
    assert len(from_table(frame, "bp", "site").classes) == 11
    with pytest.raises(UserError, match="'age' has 40 different numbers"):
        from_table(pandas.concat([frame.assign(age=frame["age"] + 0.5)] * 9), "age", "site")


def test_a_target_with_many_numbers_is_warned_of_before_anything_else() -> None:
    def lines(values: int) -> list[str]:
        frame = pandas.DataFrame({"bp": np.arange(480) % 7, "age": np.arange(480) % values, "site": ["a", "b"] * 240})
        return from_table(frame, "age", "site").describe()

    assert re.match("warning: 'age' has 56 different numbers.* regression is not supported", lines(56)[1])
    assert not any("regression" in line for line in lines(20))


@pytest.mark.parametrize("date", ["2021-02-03", "03.02.2021", "2/3/21", "2021-02-03 10:30"])
def test_dates_are_refused(date: str) -> None:
    frame = pandas.DataFrame({"when": [date] * 20, "ill": [0, 1] * 10})
    with pytest.raises(UserError, match="holds dates such as"):
        from_table({"a": frame}, "ill")


def test_names_of_columns_need_not_be_text() -> None:
    x = pandas.DataFrame(np.random.default_rng(0).normal(size=(20, 3))).assign(ill=[0, 1] * 10)
    federation = from_table({"a": x}, "ill")
    assert federation.input.shape == (3,)
    assert from_table({"a": x.rename(columns={"ill": 7})}, 7).checksums == federation.checksums  # type: ignore[arg-type]
    with pytest.raises(UserError, match="two columns are called '1'"):
        from_table({"a": x.rename(columns={2: "1"})}, "ill")


def test_scale_is_checked() -> None:
    frame = pandas.DataFrame({"age": range(20), "ill": [0, 1] * 10})
    with pytest.raises(UserError, match="scale=clients, allowed are client, federated, none"):
        from_table({"a": frame}, "ill", scale="clients")


@pytest.mark.slow
def test_a_large_table_is_read_in_seconds(tmp_path: Path) -> None:
    """100,000 rows of 50 columns."""
    rng = np.random.default_rng(0)
    numbers = {f"x{k}": rng.normal(size=100_000).round(4) for k in range(40)}
    texts = {f"c{k}": rng.choice(["red", "green", "blue"], 100_000) for k in range(8)}
    labels = {"ill": rng.integers(0, 2, 100_000), "site": rng.choice(["a", "b"], 100_000)}
    pandas.DataFrame(numbers | texts | labels).to_csv(tmp_path / "t.csv", index=False)
    began = time.process_time()
    assert load(f"table:{tmp_path}/t.csv", target="ill", clients="site").input.shape == (64,)
    assert time.process_time() - began < 10
