"""Sites with tables: they agree on a schema before the first round, and then give the simulator's numbers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr.app")
pytest.importorskip("pandas")
import pandas
from fakes import FakeGrid, identity, look_at_once, node, site_app  # noqa: F401
from test_folders import CENTRE, problem
from test_folders import run as command

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.data.encoder import Encoder
from fedc2i.data.schema import Column, Schema, check_fit, most_common
from fedc2i.deploy.job import Job
from fedc2i.deploy.server_app import run_job
from fedc2i.deploy.site_folder import make_site, read_site
from fedc2i.deploy.supernode import SuperNode
from fedc2i.deploy.worker import site_home
from fedc2i.engine.records import POINTS
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.message_format import Introduction
from fedc2i.runs.predict import predict
from support.helpers import call

QUICK = {"rounds": 2, "epochs": 1, "batch_size": 8}
SITES = ("north", "south", "west")
TABLE = {"target": "ill", "clients": "site"}


def patients(seed: int = 0, rows: int = 40) -> Any:
    """Patients of three sites: one has a category of its own, one lacks values, one has none at all in a column."""
    rng = np.random.default_rng(seed)
    table = pandas.DataFrame(
        {
            "site": np.repeat(SITES, rows),
            "age": rng.normal(60, 10, 3 * rows).round(1),
            "sex": rng.choice(["f", "m"], 3 * rows),
            "smoker": rng.random(3 * rows) < 0.5,
            "dose": rng.normal(5, 2, 3 * rows).round(2),
        }
    )
    table["ill"] = np.where(table.age + rng.normal(0, 8, 3 * rows) > 60, "yes", "no")
    table.loc[table.site == "south", "sex"] = rng.choice(["f", "m", "x"], rows)
    table.loc[table.index % 7 == 0, "dose"] = np.nan
    table.loc[table.site == "west", "dose"] = np.nan
    return table


@pytest.fixture
def file(tmp_path: Path) -> Path:
    patients().to_csv(tmp_path / "patients.csv", index=False)
    return tmp_path / "patients.csv"


def site_at(folder: Path, name: str, file: Path, **settings: Any) -> Any:
    """A node of Flower whose site has its rows in a file."""
    make_site(folder / name, name, f"table:{file}", "localhost:9092", **{"target": "ill", **settings})
    return node(100 + len(name), site_app(folder / name))


def grid_of(folder: Path, file: Path) -> FakeGrid:
    return FakeGrid({100 + k: site_at(folder, s, file, clients="site", client=s) for k, s in enumerate(SITES)})


def go(grid: FakeGrid, out: Path, said: list[str] | None = None, **more: Any) -> Any:
    policy = Policy(deadline=20.0, min_sites=2, poll=0.0)
    values = {"sites": SITES, "wait": 0.0, "policy": policy, **more}
    return run_job(grid, Job(out, "fedc2i", QUICK, **values), [].append if said is None else said.append)


@pytest.fixture(autouse=True)
def ask_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.flower.connections._AGAIN", 0.0)


def test_sites_agree_on_a_schema_and_give_the_simulators_numbers(tmp_path: Path, file: Path) -> None:
    got = go(grid_of(tmp_path, file), tmp_path / "run")
    want = fedc2i.run(
        "fedc2i", f"table:{file}", **TABLE, **QUICK, executor="looped", device="cpu", out=tmp_path / "simulated"
    )
    assert got.federation.input == want.federation.input
    for point in POINTS:
        for metric in ("accuracy", "loss", "auroc"):
            np.testing.assert_array_equal(got.accuracy(point, metric), want.accuracy(point, metric))
    np.testing.assert_array_equal(got.influence(), want.influence())
    columns = {own["name"]: own for own in json.loads((tmp_path / "run" / "run.json").read_text())["schema"]}
    assert columns["sex"]["categories"] == ["f", "m", "x"]
    assert (columns["dose"]["kind"], columns["dose"]["missing"], columns["age"]["missing"]) == ("number", True, False)
    # The encoding, with its means, is stored at the site alone.
    (stored,) = (tmp_path / "west" / "state").glob("*/encoding.json")
    own = json.loads(stored.read_text())["clients"]["west"]
    assert own == json.loads(want.federation.attachments["encoding.json"])["clients"]["west"]
    assert not (tmp_path / "run" / "encoding.json").exists()
    for point in POINTS:
        there = predict(stored.parent, "west", file, point=point)
        pandas.testing.assert_frame_equal(there, predict(tmp_path / "simulated", "west", file, point=point))
    # The site exports its own model, although it has no scores.
    assert call("export", str(stored.parent), "--client", "west", "--out", str(tmp_path / "own.pt2")).code == 0
    encoded = torch.from_numpy(Encoder.from_json(own).encode("rows", pandas.read_csv(file)))
    found = torch.export.load(tmp_path / "own.pt2").module()(encoded).softmax(1)
    expected = predict(stored.parent, "west", file)[["p(no)", "p(yes)"]].to_numpy()
    np.testing.assert_allclose(found.detach().numpy(), expected, atol=1e-6)
    card = (tmp_path / "own.md").read_text(encoding="utf-8")
    sizes = want.federation.samples()["west"]
    for text in ("west: mlp by FedC²I", f"This site: {sizes['train']} training", "scores are in the coordinator's run"):
        assert text in card
    assert "what a site keeps, its model without scores" in call("report", str(stored.parent)).err
    # The run folder has neither models nor data.
    for words in (("predict", str(file)), ("export", "--out", str(tmp_path / "model.pt2"))):
        line = call(words[0], str(tmp_path / "run"), "--client", "west", *words[1:]).err
        assert "ran between sites, which have its models: use a site's folder, SITE/state/RUN" in line
    for words in (("contribution",), ("influence", "show")):
        assert "ran between sites, whose data is not here; `fedc2i report`" in call(*words, str(tmp_path / "run")).err


class CrashError(Exception):
    """Not ours to catch."""


def test_an_interrupted_run_has_the_same_schema(tmp_path: Path, file: Path) -> None:
    grid = grid_of(tmp_path, file)

    def crash(to: int, message: Any) -> None:
        if sum(kind == "train" for _, kind in grid.log) == 4:
            raise CrashError

    grid.before = crash
    with pytest.raises(CrashError):
        go(grid, tmp_path / "run")
    grid.before = lambda to, message: None
    got = go(grid, tmp_path / "run")
    want = go(grid_of(tmp_path / "again", file), tmp_path / "other")
    np.testing.assert_array_equal(got.accuracy("trained", "loss"), want.accuracy("trained", "loss"))


def test_an_introduction_holds_the_schema_and_nothing_else_of_the_table(tmp_path: Path, file: Path) -> None:
    site_at(tmp_path, "south", file, clients="site", client="south")
    told = site_home(tmp_path / "south").introduction()
    content = json.loads(told.to_record()["introduction"]["json"])
    assert set(content) == {"name", "samples", "classes", "input", "schema", "contribution"}
    assert {frozenset(own) for own in content["schema"]} == {frozenset({"name", "kind", "categories", "missing"})}
    assert content["classes"] == ["no", "yes"]
    assert {own["name"]: own["categories"] for own in content["schema"]} == {
        "age": [],
        "sex": ["f", "m", "x"],
        "smoker": [],
        "dose": [],
    }
    assert Introduction.from_record(told.to_record()) == told


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda t: t.rename(columns={"age": "alter"}), "west lacks 'age' and has also 'alter', compared with the run"),
        (lambda t: t.assign(sex=1), "west: column 'sex' is of the kind 'number', in the run 'category'"),
        (lambda t: t.assign(ill="perhaps"), "west has the classes perhaps, and the run has no perhaps"),
    ],
)
def test_a_site_that_does_not_fit_is_refused_with_the_difference(
    tmp_path: Path, file: Path, change: Any, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    grid, said = grid_of(tmp_path, file), []
    own = patients().query("site == 'west'").drop(columns="site")
    change(own).to_csv(tmp_path / "own.csv", index=False)
    grid.nodes[102] = site_at(tmp_path / "other", "west", tmp_path / "own.csv")
    got = go(grid, tmp_path / "run", said, classes=("no", "yes"))
    assert any(line in own for own in said)
    assert not any("\n" in own for own in said)
    log = tmp_path / "other" / "west" / "logs" / "west.log"
    log.write_text("Flower said something\n" + capfd.readouterr().out)
    (told,) = SuperNode(read_site(tmp_path / "other" / "west", ready=False)).complaints()
    assert told.startswith(f"the coordinator rejects this site: {line}")
    assert np.isfinite(got.accuracy("trained", "accuracy")).sum() == 2


def test_a_late_site_with_new_categories_does_not_join_silently(tmp_path: Path, file: Path) -> None:
    """They would be encoded as none of the known ones."""
    grid, said = grid_of(tmp_path, file), list[str]()
    rows = pandas.read_csv(file).query(f"site == '{SITES[0]}'").drop(columns="site")
    rows.loc[rows.index[:9], "sex"] = "unheard of"
    rows.to_csv(tmp_path / "late.csv", index=False)
    late = site_at(tmp_path, "latecomer", tmp_path / "late.csv")

    def come(to: int, message: Any) -> None:
        if message.metadata.message_type == "train":
            grid.nodes[109] = late

    grid.before = come
    go(grid, tmp_path / "run", said, sites=(*SITES, "latecomer"))
    (line,) = [line for line in said if "latecomer" in line and "rejected" in line]
    assert "column 'sex' has categories that the run does not know, 'unheard of'" in line


def test_a_site_refuses_a_run_that_its_table_does_not_fit(tmp_path: Path, file: Path) -> None:
    site_at(tmp_path, "west", file, clients="site", client="west")
    home = site_home(tmp_path / "west")
    agreed = Schema((*home.schema.columns[:-1], Column("height", "number")))
    with pytest.raises(UserError, match="west lacks 'height' and has also 'dose', compared with the run"):
        home.encoded(agreed)
    with pytest.raises(UserError, match="this site has a table"):
        home.encoded(None)


@pytest.mark.parametrize("column", ["age", "born"])
def test_an_error_about_a_row_stays_at_the_site(
    tmp_path: Path, file: Path, column: str, capfd: pytest.CaptureFixture[str]
) -> None:
    grid, said = grid_of(tmp_path, file), list[str]()
    table = patients().query("site == 'west'").drop(columns="site")
    table.to_csv(tmp_path / "own.csv", index=False)
    grid.nodes[102] = site_at(tmp_path / "other", "west", tmp_path / "own.csv")
    values = ["Smith", *table.age[1:]] if column == "age" else ["1960-05-17"] * len(table)
    table.assign(**{column: values}).to_csv(tmp_path / "own.csv", index=False)
    go(grid, tmp_path / "run", said)
    secret = str(values[0])
    assert secret in capfd.readouterr().out
    assert any("its table cannot be read or encoded; the site's own log says why" in line for line in said)
    assert not any(secret in line for line in said)


def test_a_site_with_one_class_takes_part(tmp_path: Path) -> None:
    table = patients()
    table.loc[table.site == "west", "ill"] = "yes"
    table.to_csv(tmp_path / "patients.csv", index=False)
    got = go(grid_of(tmp_path, tmp_path / "patients.csv"), tmp_path / "run", classes=("no", "yes"))
    want = fedc2i.run("fedc2i", f"table:{tmp_path / 'patients.csv'}", **TABLE, **QUICK, executor="looped", device="cpu")
    np.testing.assert_array_equal(got.accuracy("trained", "loss"), want.accuracy("trained", "loss"))


def test_a_table_at_a_site_is_one_client(tmp_path: Path, file: Path) -> None:
    common = ("--name", "west", "--coordinator", CENTRE, "--data", f"table:{file}")
    assert "--target" in problem("site", "init", tmp_path / "a", *common)
    common += ("--target", "ill", "--drop", "smoker")
    line = problem("site", "init", tmp_path / "a", *common, "--clients", "site")
    assert "several clients, this site's must be named: north, south, west" in line
    line = problem("site", "init", tmp_path / "a", *common, "--clients", "site", "--client", "east")
    assert "no client 'east'" in line
    line = problem("site", "init", tmp_path / "a", *common, "--scale", "federated")
    assert "at real sites allowed are client, none" in line
    command("site", "init", tmp_path / "a", *common, "--clients", "site", "--client", "west", "--scale", "none")
    stored = read_site(tmp_path / "a", ready=False)
    expected = {"target": "ill", "clients": "site", "drop": "smoker", "scale": "none"}
    assert {name: stored.source[name] for name in expected} == expected
    assert stored.load().samples() == {"west": {"train": 28, "validation": 4, "test": 8}}
    alone = command("site", "init", tmp_path / "b", *common)  # all rows are its own, and `site` is a column
    assert "train/validation/test: west 84/12/24" in alone


GOOD = {"name": "age", "kind": "number", "categories": [], "missing": False}


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        "age",
        [GOOD, GOOD],
        [{**GOOD, "name": 1}],
        [{**GOOD, "name": "x" * 10_000}],
        [{**GOOD, "name": "\ud800"}],
        [{**GOOD, "kind": "date"}],
        [{**GOOD, "kind": ["number"]}],
        [{**GOOD, "missing": 1}],
        [{**GOOD, "categories": ["a"]}],
        [{**GOOD, "kind": "category", "categories": "ab"}],
        [{**GOOD, "kind": "category", "categories": [["a"]]}],
        [{**GOOD, "kind": "category", "categories": [str(k) for k in range(101)]}],
        [{**GOOD, "name": str(k)} for k in range(10_001)],
    ],
    ids=lambda values: str(values)[:60],
)
def test_a_strangers_schema_is_checked(values: Any) -> None:
    with pytest.raises(UserError, match="not the schema of a table"):
        Schema.from_json(values)


def schema_of(**kinds: Any) -> Schema:
    return Schema(tuple(Column(name, kind) for name, kind in kinds.items()))


def test_the_schema_of_most_sites_wins() -> None:
    right, other = schema_of(a="number", b="boolean"), schema_of(a="boolean", b="boolean")
    unknown, fewer = Schema((Column("a", "unknown", (), True), Column("b", "boolean"))), schema_of(a="number")
    sites: Mapping[str, Schema] = {"w": other, "x": right, "y": right, "z": unknown, "v": fewer}
    agreed = most_common("sites", sites)
    assert agreed == Schema((Column("a", "number", (), True), Column("b", "boolean")))
    check_fit("z", unknown, agreed)
    for name, own in (("w", other), ("v", fewer)):
        with pytest.raises(UserError, match=f"^{name}"):
            check_fit(name, own, agreed)
