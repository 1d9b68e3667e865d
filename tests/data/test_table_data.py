"""Tables: encoding by hand, the agreement of clients, splits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data.encoder import Encoder
from fedc2i.data.schema import Column, Schema, agree, describe
from fedc2i.data.sources import load
from fedc2i.data.table import from_table


def patients(count: int = 20, **change: Any) -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    columns = {
        "age": rng.integers(30, 80, count).astype(float),
        "sex": ["f", "m"] * (count // 2),
        "smoker": [True, False] * (count // 2),
        "ill": ["yes", "no", "no", "no"] * (count // 4),
        "site": (["north"] * (count // 2)) + (["south"] * (count // 2)),
    }
    return pandas.DataFrame(columns | change)


def load_csv(tmp_path: Path, table: pandas.DataFrame | str, **options: Any) -> Any:
    file = tmp_path / "patients.csv"
    if isinstance(table, str):
        file.write_text(table, encoding=options.pop("encoding", "utf-8"))
    else:
        table.to_csv(file, index=False)
    return load(f"table:{file}", **({"target": "ill", "clients": "site"} | options))


def test_encoding_by_hand() -> None:
    training = pandas.DataFrame({"age": [40.0, 60.0, np.nan], "sex": ["f", "m", "f"], "smoker": [True, False, True]})
    schema = describe("here", training)
    assert schema.inputs == ("age", "age is missing", "sex=f", "sex=m", "smoker")
    encoder = Encoder.fit(schema, [training])
    new = pandas.DataFrame(
        {"sex": ["x", None], "smoker": [False, True], "age": [50 + np.sqrt(200), None], "more": [1, 2]}
    )
    assert encoder.encode("new", new).tolist() == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 1]]
    again = Encoder.from_json(json.loads(json.dumps(encoder.to_json())))
    assert again == encoder


def test_clients_agree_on_columns_and_categories_without_rows() -> None:
    a = describe("a", pandas.DataFrame({"colour": ["red", "blue"], "size": [1, 2]}))
    b = describe("b", pandas.DataFrame({"size": [3, None], "colour": ["green", "red"]}))
    assert agree("both", {"a": a, "b": b}).inputs == (
        "colour=blue",
        "colour=green",
        "colour=red",
        "size",
        "size is missing",
    )
    assert Schema.from_json(json.loads(json.dumps(a.to_json()))) == a


def test_a_column_without_values_at_one_client_takes_the_kind_of_the_others() -> None:
    a = describe("a", pandas.DataFrame({"chol": [None, None]}))
    b = describe("b", pandas.DataFrame({"chol": [200.0, 220.0]}))
    assert agree("both", {"a": a, "b": b}).columns[0].kind == "number"
    with pytest.raises(UserError, match="'chol' has no value at any client"):
        agree("both", {"a": a})


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"sise": [1.0]}, "client 'b' lacks 'size' and has also 'sise', compared with client 'a'"),
        ({"size": ["big"]}, "'size' is not of one kind: number at 'a', category at 'b'"),
    ],
)
def test_clients_that_do_not_agree_are_told_the_difference(other: dict[str, list[Any]], words: str) -> None:
    schemas = {"a": describe("a", pandas.DataFrame({"size": [1.0]})), "b": describe("b", pandas.DataFrame(other))}
    with pytest.raises(UserError, match=words):
        agree("both", schemas)


def test_csv_with_a_column_of_clients(tmp_path: Path) -> None:
    federation = load_csv(tmp_path, patients())
    assert federation.names == ("north", "south")
    assert federation.classes == ("no", "yes")
    assert federation.input.shape == (4,)
    assert federation.samples()["north"] == {"train": 7, "validation": 1, "test": 2}
    split = json.loads(federation.attachments["split.json"])["north"]
    assert sorted(row for part in split.values() for row in part) == list(range(10))
    assert load_csv(tmp_path, patients()).checksums == federation.checksums
    assert load_csv(tmp_path, patients(), seed=1).checksums != federation.checksums


def test_file_and_frame_give_the_same_numbers(tmp_path: Path) -> None:
    federation = from_table(patients(), target="ill", clients="site")
    assert federation.checksums == load_csv(tmp_path, patients()).checksums
    by_site = {name: own.drop(columns="site") for name, own in patients().groupby("site")}
    assert from_table(by_site, target="ill").checksums == federation.checksums


@pytest.mark.parametrize(("separator", "encoding"), [(",", "utf-8-sig"), (";", "latin-1"), ("\t", "utf-8")])
def test_separators_and_encodings(tmp_path: Path, separator: str, encoding: str) -> None:
    rows = [f"{age},{sex},{ill},Köln" for age, sex, ill in zip([50, 60] * 5, "fm" * 5, "01" * 5, strict=True)]
    text = "\n".join(["age,sex,ill,site", *rows]).replace(",", separator)
    assert load_csv(tmp_path, text, encoding=encoding).names == ("Köln",)


def test_folders_of_clients_and_of_parts(tmp_path: Path) -> None:
    table = patients().drop(columns="site")
    (tmp_path / "files").mkdir()
    table.to_csv(tmp_path / "files" / "north.csv", index=False)
    table.to_parquet(tmp_path / "files" / "south.parquet")
    assert load(f"table:{tmp_path}/files", target="ill").names == ("north", "south")
    (tmp_path / "parts" / "north").mkdir(parents=True)
    for part in ("train", "test"):
        table.to_csv(tmp_path / "parts" / "north" / f"{part}.csv", index=False)
    assert load(f"table:{tmp_path}/parts", target="ill").samples()["north"] == {
        "train": 20,
        "validation": 0,
        "test": 20,
    }


def test_split_by_a_column(tmp_path: Path) -> None:
    table = patients(part=["train"] * 8 + ["val", "test"] + ["train"] * 8 + ["validation", "test"])
    federation = load_csv(tmp_path, table, split="part")
    assert federation.samples()["south"] == {"train": 8, "validation": 1, "test": 1}
    by_site = {name: own.drop(columns="site") for name, own in table.groupby("site")}
    assert from_table(table, target="ill", clients="site", split="part").checksums == federation.checksums
    assert from_table(by_site, target="ill", split="part").checksums == federation.checksums


def test_category_of_the_test_part_alone_sets_no_indicator(tmp_path: Path) -> None:
    table = patients(part=(["train"] * 8 + ["test"] * 2) * 2)
    table.loc[[9, 19], "sex"] = "diverse"
    federation = load_csv(tmp_path, table, split="part")
    assert federation.input.shape == (4,)
    assert federation.clients[0].test.x[-1, 1:3].tolist() == [0, 0]


def test_rows_without_target_are_ignored_and_counted(tmp_path: Path) -> None:
    table = patients()
    table.loc[:2, "ill"] = None
    assert "3 rows without 'ill' are ignored." in load_csv(tmp_path, table).notes


BAD: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("no target", {}, {"target": "sick"}, "no column 'sick' to predict, there are age"),
    ("mistyped target", {}, {"target": "il"}, r"csv: no column 'il' to predict .did you mean 'ill'.*, ill, site$"),
    ("mistyped clients", {}, {"clients": "Sites"}, r"csv: no column 'Sites' \(did you mean 'site'\?\), there are age"),
    ("mistyped drop", {}, {"drop": "smokr"}, r"no column 'smokr' \(did you mean 'smoker'\?\), there are age"),
    ("no clients", {}, {"clients": "clinic"}, "no column 'clinic', there are age"),
    ("clients not named", {}, {"clients": None}, "--clients COLUMN"),
    ("target not named", {}, {"target": None}, "--target COLUMN"),
    ("empty target", {"ill": [None] * 20}, {}, "no row has a value in column 'ill'"),
    (
        "no label at one",
        {"ill": ["no", "yes"] * 5 + [None] * 10},
        {},
        "'south': no row.*; to leave this client out, re",
    ),
    ("one class", {"ill": ["no"] * 20}, {}, "only the value 'no', two are needed"),
    ("numbers to predict", {"ill": np.linspace(0, 1, 200)}, {}, "200 different values.*predicts classes"),
    ("a row without client", {"site": ["a"] * 6 + [None] + ["a"] * 13}, {}, "row 7 has no client in .*; fill it in or"),
    ("two rows", {"site": ["a", None] * 2 + ["a"] * 16}, {}, "rows 2 and 4 have no client in column 'site'; fill them"),
    ("many rows", {"site": ["a", None] * 10}, {}, "rows 2, 4, 6 and 7 more have no client"),
    ("mixed types", {"age": ["40"] * 19 + ["old"]}, {}, "numbers and text such as 'old'"),
    ("infinite", {"age": [1.0] * 19 + [np.inf]}, {}, "'age' (holds|must).*infinite"),
    ("dates", {"age": ["2020-01-31"] * 20}, {}, "dates such as '2020-01-31'.*drop it with --set drop=age"),
    ("names of rows", {"sex": [f"patient {k}" for k in range(400)]}, {}, "different texts, allowed are 100.*drop it"),
    ("drop what is not there", {}, {"drop": "weight"}, "no column 'weight'"),
    ("one row", {"site": ["a"] * 19 + ["b"]}, {}, "client 'b': 1 row, .*; to leave this client out, remove its rows"),
]


@pytest.mark.parametrize(("change", "options", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_tables_are_refused_in_a_line(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], words: str
) -> None:
    count = len(next(iter(change.values()), [None] * 20))
    with pytest.raises(UserError, match=words) as caught:
        load_csv(tmp_path, patients(count, **change), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age,age,ill,site\n1,2,0,a\n", "two columns are called 'age'"),
        ("", "is empty"),
        ("age,ill,site\n1,0,a\n1,0,a,5\n", "a row has 4 cells instead of 3: 1,0,a,5"),
        ("age,ill,site\n1,0\n", "a row has 2 cells instead of 3: 1,0"),
        ("age,ill,site\n", "no rows below the header"),
        ("age,ill,site\n\n \n\n", "no rows below the header"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_csv(tmp_path, text)


def test_what_a_folder_is_made_of(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent: no such file or folder"):
        load(f"table:{tmp_path / 'absent'}", target="ill")
    patients().to_csv(tmp_path / "a.csv", index=False)
    (tmp_path / "notes.txt").write_text("remember to ask\n")
    with pytest.raises(UserError, match=r"notes\.txt: no rows.*; each file of the folder is a client \(\.csv, .*\.txt"):
        load(f"table:{tmp_path}", target="ill")


def test_constant_and_dropped_columns(tmp_path: Path) -> None:
    federation = load_csv(tmp_path, patients(age=[50.0] * 20, mrn=range(20)), drop="mrn, smoker")
    assert federation.input.shape == (3,)
    assert federation.clients[0].train.x[:, 0].abs().max() == 0


def test_a_number_without_spread_in_training_is_zero_everywhere() -> None:
    training = pandas.DataFrame({"chol": [0.0] * 5, "ca": [np.nan] * 5, "id": 1e8 + np.arange(5.0)})
    schema = Schema(tuple(Column(name, "number") for name in training))
    encoder = Encoder.fit(schema, [training])
    new = pandas.DataFrame({"chol": [250.0, 0.0], "ca": [3.0, np.nan], "id": [1e8 + 2, 1e8]})
    found = Encoder.from_json(json.loads(json.dumps(encoder.to_json()))).encode("new", new)
    assert found[:, :2].tolist() == [[0, 0], [0, 0]]
    assert found[:, 2] == pytest.approx([0, -2 / np.sqrt(2.5)])
    assert Encoder.fit(schema, [training], scaled=False).encode("new", new)[0, :2].tolist() == [250, 3]


def test_targets_are_for_tables_only() -> None:
    with pytest.raises(UserError, match="are for table:FILE"):
        load("heart", target="ill")
