"""A client's model on new rows: the same numbers as in the run, and what is refused."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from typer.testing import CliRunner

import fedc2i
from fedc2i.cli.main import app
from fedc2i.core.errors import UserError
from fedc2i.runs.stored_models import read_model


@pytest.fixture(scope="module")
def table() -> pandas.DataFrame:
    rng = np.random.default_rng(0)
    age, sex = rng.normal(60, 10, 60), rng.choice(["f", "m"], 60)
    ill = np.where(age + 5 * (sex == "m") + rng.normal(0, 3, 60) > 62, "yes", "no")
    age[::7] = np.nan
    return pandas.DataFrame({"age": age, "sex": sex, "ill": ill, "site": ["north", "south"] * 30})


@pytest.fixture(scope="module")
def run(table: pandas.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    table.to_csv(folder / "patients.csv", index=False)
    settings = {"target": "ill", "clients": "site", "rounds": 2, "seeds": [3], "batch_size": 8}
    fedc2i.run("fedrod", f"table:{folder}/patients.csv", out=folder / "run", **settings)
    return folder / "run"


def test_predictions_are_those_of_the_run(run: Path, table: pandas.DataFrame) -> None:
    result, data = fedc2i.read_run(run), fedc2i.from_table(table, "ill", "site").clients[0]
    own = table[table["site"] == "north"].drop(columns=["ill", "site"])
    found = fedc2i.predict(run, "north", own)
    assert found.columns.tolist() == ["prediction", "p(no)", "p(yes)"]
    assert found[["p(no)", "p(yes)"]].sum(axis=1).to_numpy() == pytest.approx(1)
    truth = table.loc[own.index, "ill"]
    rows = json.loads((run / "split.json").read_text())["north"]["test"]  # of the file
    accuracy = 100 * (found["prediction"] == truth)[rows].mean()
    assert accuracy == pytest.approx(result.accuracy("trained")[0, 0])
    assert len(rows) == len(data.test)


def test_command_writes_a_file_once(run: Path, table: pandas.DataFrame, tmp_path: Path) -> None:
    table.head(3).to_csv(tmp_path / "new.csv", index=False)
    arguments = ["predict", str(run), "--client", "south", str(tmp_path / "new.csv"), "--out", str(tmp_path / "p.csv")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0
    assert done.stdout == f"{tmp_path / 'p.csv'}   (3 predictions with the model of south)\n"
    assert done.stderr == ""
    written = pandas.read_csv(tmp_path / "p.csv")
    found = fedc2i.predict(run, "south", tmp_path / "new.csv")
    assert written["prediction"].tolist() == found["prediction"].tolist()
    assert written["p(no)"].to_numpy() == pytest.approx(found["p(no)"].to_numpy(), rel=1e-5)
    assert max(map(len, (tmp_path / "p.csv").read_text().replace("\n", ",").split(","))) <= len("1.23456e-10")
    with pytest.raises(UserError, match="exists already"):
        CliRunner().invoke(app, arguments, catch_exceptions=False)


def test_a_category_that_the_run_never_saw_is_named(run: Path, table: pandas.DataFrame, tmp_path: Path) -> None:
    """It is predicted as no category at all, which a reader of the prediction must know."""
    rows = table.head(4).assign(sex=["f", "x", "x", None])
    with pytest.warns(UserWarning, match="rows: column 'sex' has 'x' in 2 rows, which the run never saw; it counts"):
        found = fedc2i.predict(run, "south", rows)
    assert found["p(no)"].notna().all()
    rows.to_csv(tmp_path / "new.csv", index=False)
    done = CliRunner().invoke(app, ["predict", str(run), "--client", "south", str(tmp_path / "new.csv")])
    assert done.stderr.startswith(f"warning: {tmp_path / 'new.csv'}: column 'sex' has 'x' in 2 rows")
    assert len(done.stdout.splitlines()) == 5


def test_numbers_in_another_unit_are_named(run: Path, table: pandas.DataFrame, tmp_path: Path) -> None:
    """Their predictions are near certain, and wrong."""
    own = table[table["site"] == "south"].drop(columns=["ill", "site"])
    own.assign(age=1000 * own["age"]).to_csv(tmp_path / "new.csv", index=False)
    done = CliRunner().invoke(app, ["predict", str(run), "--client", "south", str(tmp_path / "new.csv")])
    known = own["age"].notna().sum()
    assert done.stderr.count("\n") == 1
    assert f"new.csv: column 'age': {known} of {known} values are more than 6 standard deviations from" in done.stderr
    assert re.search(r"training rows \(\d\d\.\d ± [\d.]+\); another unit, or rows of another kind\?\n$", done.stderr)
    own.iloc[0, 0] = 60_000.0
    with pytest.warns(UserWarning, match="'age': 1 of 2[0-9] values is more than 50 standard deviations"):
        fedc2i.predict(run, "south", own)
    own.iloc[0, 0] = 200.0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedc2i.predict(run, "south", own)


def test_many_distant_columns_are_counted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = pandas.DataFrame({f"c{k}": rng.normal(5, 1, 40) for k in range(8)})
    table = rows.assign(ill=[0, 1] * 20, site=["a"] * 20 + ["b"] * 20)
    lines: dict[str, list[str]] = {}
    for scale in ("client", "none"):
        data = fedc2i.from_table(table, "ill", "site", scale=scale)
        fedc2i.run("local", data, rounds=1, seeds=[0], out=tmp_path / scale)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            fedc2i.predict(tmp_path / scale, "a", 1000 * rows)
        lines[scale] = [str(own.message) for own in found]
    assert len(lines["client"]) == 6
    assert lines["client"][-1] == "rows: 3 more columns with such values"
    assert lines["none"] == []  # no mean is stored


def test_whose_model_is_asked_with_the_names(run: Path) -> None:
    with pytest.raises(UserError, match="name the client with --client; allowed are north, south"):
        CliRunner().invoke(app, ["predict", str(run), "new.csv"], catch_exceptions=False)


def test_before_and_after_differ(run: Path, table: pandas.DataFrame) -> None:
    before, after = (fedc2i.predict(run, "north", table, point=point) for point in ("received", "trained"))
    assert not np.allclose(before["p(no)"], after["p(no)"])
    assert read_model(run, "north", 3).keys() == read_model(run, "north", 3, "received").keys()


def test_a_seed_that_was_not_run_is_refused(run: Path, table: pandas.DataFrame) -> None:
    with pytest.raises(UserError, match=r"run: no models of seed 0; allowed are 3$"):
        fedc2i.predict(run, "north", table, seed=0)


def test_unknown_client_and_missing_column_are_refused(run: Path, table: pandas.DataFrame) -> None:
    with pytest.raises(UserError, match=r"no client 'nord'.*allowed are north, south"):
        fedc2i.predict(run, "nord", table)
    with pytest.raises(UserError, match="no column 'age'; needed are 'age', 'sex'"):
        fedc2i.predict(run, "north", table.drop(columns="age"))


def test_a_file_with_none_of_the_columns_names_them(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.csv"
    new.write_text("years,gender\n60,f\n")
    with pytest.raises(UserError, match=r"new\.csv: no column 'age', 'sex'; needed are 'age', 'sex'$"):
        fedc2i.predict(run, "north", new)
    new.write_text("age,sex\n")
    with pytest.raises(UserError, match="no rows below the header"):
        fedc2i.predict(run, "north", new)


def test_run_without_a_table_is_refused(tmp_path: Path) -> None:
    x, y = torch.zeros(4, 3).numpy(), np.array([0, 1, 0, 1])
    fedc2i.run("local", fedc2i.from_arrays({"a": (x, y, x, y)}), rounds=1, seeds=[0], out=tmp_path / "run")
    with pytest.raises(UserError, match=r"no encoding\.json"):
        fedc2i.predict(tmp_path / "run", "a", pandas.DataFrame())


def test_a_row_has_one_prediction_whatever_stands_beside_it(tmp_path: Path) -> None:
    """A code such as 01 is a number if the file is read by itself."""
    rng = np.random.default_rng(0)
    wards = rng.choice(["01", "02", "A3"], 90)
    rows = [f"{ward},{30 + k % 9},{int(ward == '01')},a" for k, ward in enumerate(wards)]
    (tmp_path / "t.csv").write_text("\n".join(["ward,age,ill,site", *rows]))
    settings = {"target": "ill", "clients": "site", "rounds": 2, "seeds": [0]}
    fedc2i.run("local", f"table:{tmp_path}/t.csv", out=tmp_path / "run", **settings)
    (tmp_path / "one.csv").write_text("ward;age\n01;33;\n")
    (tmp_path / "two.csv").write_text("age,ward\n33,01\n34,A3\n")
    one, two = (fedc2i.predict(tmp_path / "run", "a", tmp_path / name) for name in ("one.csv", "two.csv"))
    assert one["p(1)"][0] == pytest.approx(two["p(1)"][0], abs=1e-6)
    (tmp_path / "bad.csv").write_text("ward,age\n01,old\n")
    with pytest.raises(UserError, match=r"bad.csv: column 'age' must hold numbers, got 'old'"):
        fedc2i.predict(tmp_path / "run", "a", tmp_path / "bad.csv")


def test_clients_of_a_partition_and_runs_of_a_comparison(table: pandas.DataFrame, tmp_path: Path) -> None:
    table.to_csv(tmp_path / "t.csv", index=False)
    settings = {"target": "ill", "clients": "site", "rounds": 1, "seeds": [0], "partition": "iid:2"}
    fedc2i.compare(["local", "fedavg"], f"table:{tmp_path}/t.csv", out=tmp_path / "both", **settings)
    found = fedc2i.predict(tmp_path / "both" / "local", "north/2", table.head(3))
    assert len(found) == 3
    with pytest.raises(UserError, match=r"no client 'north'.*allowed are north/1, north/2, south/1, south/2"):
        fedc2i.predict(tmp_path / "both" / "local", "north", table)
    with pytest.raises(UserError, match=r"both: not the folder.*holds several, name one of them: fedavg, local"):
        fedc2i.predict(tmp_path / "both", "north/1", table)


def test_a_model_of_python_is_given_again(table: pandas.DataFrame, tmp_path: Path) -> None:
    model = fedc2i.split(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)))
    data = fedc2i.from_table(table, "ill", "site")
    result = fedc2i.run("local", data, model=model, rounds=1, seeds=[0], out=tmp_path / "run")
    with pytest.raises(UserError, match=r"its model was an object of Python; predict in Python with model="):
        fedc2i.predict(tmp_path / "run", "north", table)
    found = fedc2i.predict(tmp_path / "run", "north", table, model=model)
    rows = json.loads((tmp_path / "run" / "split.json").read_text())["north"]["test"]
    accuracy = 100 * (found["prediction"] == table["ill"])[rows].mean()
    assert accuracy == pytest.approx(result.accuracy("trained")[0, 0])
