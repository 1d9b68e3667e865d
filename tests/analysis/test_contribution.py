"""Contributions of real runs: a linear federation with closed form, files, refusals, and the command."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from analysis.test_shapley import by_definition
from fedc2i.analysis.contribution import records
from fedc2i.analysis.contribution.coalitions import CoalitionRuns, restricted
from fedc2i.analysis.contribution.measure import contribution
from fedc2i.analysis.contribution.records import Contribution
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.engine.client import RunContext
from fedc2i.models.model import Model
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import Plan, prepare
from support.helpers import call, write_arrays

QUICK = {"rounds": 1, "epochs": 1, "device": "cpu", "workers": 1}


def table_federation(clients: int, samples: int = 12) -> Federation:
    """Numbers of two classes; every client has its own noise."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for k in range(clients):
        y = torch.arange(samples + k) % 2
        x = torch.randn(len(y), 5, generator=generator) + y[:, None]
        found.append(Client(f"site {k}", Split(x, y), Split(x[:0], y[:0]), Split(x + 0.1 * k, y)))
    return Federation("toy", tuple(found), ("no", "yes"))


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Contribution]:
    """FedAvg of linear models that do not move: a coalition's model is the mean of its members' first models."""
    settings = {**QUICK, "init": "independent", "lr": 1e-30, "seeds": "0,1", "model": "logistic", "metric": "loss"}
    (plan,) = prepare(["fedavg:weighting=samples"], settings, table_federation(4))
    return plan, contribution(plan, tmp_path_factory.mktemp("linear"))


def closed_form(plan: Plan, receiver: int, metric: str, seed: int) -> Callable[[frozenset[int]], float]:
    """The receiver's score under the mean of first models; logits of a mean are the mean of logits."""
    names, data = plan.federation.names, plan.federation.clients[receiver].test
    context = RunContext.of_seed(plan.method, plan.model, plan.config, names, seed)
    logits = [plan.model.head(own, plan.model.features(own, data.x, False)) for own in
              (context.first_model(name, "independent") for name in names)]  # fmt: skip
    samples = [len(client.train) for client in plan.federation.clients]

    def score(coalition: frozenset[int]) -> float:
        total = sum(samples[i] for i in coalition)
        mean = sum(samples[i] / total * logits[i] for i in coalition)
        assert isinstance(mean, torch.Tensor)
        if metric == "loss":
            return -float(torch.nn.functional.cross_entropy(mean, data.y))
        return 100 * float((mean.argmax(1) == data.y).double().mean())

    return score


@pytest.mark.parametrize(("metric", "tolerance"), [("loss", 2e-3), ("accuracy", 1e-5)])
def test_linear_federation_has_the_values_of_its_closed_form(
    linear: tuple[Plan, Contribution], metric: str, tolerance: float
) -> None:
    plan, found = linear
    names = list(plan.federation.names)
    games = {(r, seed): closed_form(plan, r, metric, seed) for r in range(4) for seed in (0, 1)}
    rows = found.select(metric=metric, point="received")
    assert len(rows) == 12
    for row in rows:
        receiver, giver = names.index(row.receiver), names.index(row.giver)
        expected = np.mean([by_definition(games[receiver, seed], receiver, giver, 4) for seed in (0, 1)])
        assert row.value == pytest.approx(expected, abs=tolerance)
        assert row.low < row.value < row.high
    everyone = frozenset(range(4))
    for row in found.select("leave-one-out", metric=metric, point="received"):
        receiver, giver = names.index(row.receiver), names.index(row.giver)
        own = [games[receiver, seed](everyone) - games[receiver, seed](everyone - {giver}) for seed in (0, 1)]
        assert row.value == pytest.approx(np.mean(own), abs=tolerance)


def test_values_add_up_to_the_gain_over_training_alone(linear: tuple[Plan, Contribution]) -> None:
    _, found = linear
    for metric in ("accuracy", "auroc", "loss", "f1"):
        for row in found.select("gain", metric=metric):
            parts = [own.value for own in found.select(metric=metric) if own.receiver == row.receiver]
            score = found.score(row.receiver, metric)
            assert sum(parts) == pytest.approx(row.value, abs=1e-6)
            assert (score.alone - score.together if metric == "loss" else score.together - score.alone) == (
                pytest.approx(row.value, abs=1e-6)
            )


def test_classes_add_up_to_the_whole(linear: tuple[Plan, Contribution]) -> None:
    """The log-loss of all samples is the mean of the classes', weighted by their samples."""
    plan, found = linear
    for row in found.select():
        client = plan.federation.clients[plan.federation.names.index(row.receiver)]
        parts = {label: found.select(label=label) for label in ("no", "yes")}
        shares = client.test.y.bincount() / len(client.test)
        same = [next(o for o in parts[label] if (o.giver, o.receiver) == (row.giver, row.receiver)) for label in parts]
        assert sum(float(s) * own.value for s, own in zip(shares, same, strict=True)) == pytest.approx(row.value)


def test_it_is_read_as_it_was_written(linear: tuple[Plan, Contribution], tmp_path: Path) -> None:
    _, found = linear
    found.write(tmp_path)
    read = records.read(tmp_path, found.clients)
    assert read is not None
    assert repr(read) == repr(found)  # nan is not equal to nan
    assert records.read(tmp_path / "nowhere") is None
    lines = (tmp_path / "contribution.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 1 + len(found.rows)
    assert lines[0].startswith("measure,giver,receiver,metric,point,label,value,low,high,p,verdict")
    table = found.to_pandas()
    assert len(table) == len(found.rows)
    assert {*table.measure} == {"shapley", "leave-one-out", "pairwise", "gain"}


@pytest.mark.parametrize("damage", ["{", "[]", '{"version": 2}', '{"version": 1, "clients": ["x"]}'])
def test_a_damaged_file_is_one_line(damage: str, tmp_path: Path) -> None:
    (tmp_path / "contribution.json").write_text(damage, encoding="utf-8")
    with pytest.raises(UserError, match="cannot be read"):
        records.read(tmp_path, ("a", "b"))


def test_a_row_of_strangers_is_refused(linear: tuple[Plan, Contribution], tmp_path: Path) -> None:
    _, found = linear
    replace(found, rows=(replace(found.rows[-1], receiver="nobody"),)).write(tmp_path)
    with pytest.raises(UserError, match="other clients"):
        records.read(tmp_path)


def test_a_coalition_of_one_is_local_training(
    make_federation: Callable[..., Federation], model: Model, tmp_path: Path
) -> None:
    federation = make_federation((12, 10, 8))
    plan, local = prepare(["fedc2i", "local"], {**QUICK, "rounds": 2}, federation, model)
    runs = CoalitionRuns(plan, tmp_path)
    runs.compute([frozenset({0}), frozenset({1}), frozenset({0, 2})])
    assert runs.count == 2
    alone = execute(local).predictions
    pair = execute(replace(plan, federation=federation.select(["a", "c"]))).predictions
    assert alone is not None
    assert pair is not None
    for point in ("received", "trained"):
        for receiver in range(3):
            logs, labels = runs.scores(frozenset({receiver}), receiver, point)
            np.testing.assert_array_equal(logs[0], alone.logs[0, point][alone.rows(receiver)])
            np.testing.assert_array_equal(labels, federation.clients[receiver].test.y)
        np.testing.assert_array_equal(runs.scores(frozenset({0, 2}), 2, point)[0][0], pair.logs[0, point][pair.rows(1)])


def test_coalitions_are_computed_once(make_federation: Callable[..., Federation], model: Model, tmp_path: Path) -> None:
    (plan,) = prepare(["fedavg"], QUICK, make_federation((12, 10, 8)), model)
    first = contribution(plan, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("coalitions/*/summary.json")}
    assert len(before) == 5  # everyone, three pairs, and Local
    said: list[str] = []
    again = contribution(plan, tmp_path, say=said.append)
    assert repr(again) == repr(first)
    assert "0 runs, 5 are there already" in said[0]
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_python_function(tmp_path: Path) -> None:
    data, settings = table_federation(2), {**QUICK, "model": "logistic", "seeds": (0, 1)}
    found = fedc2i.contribution("fedavg", data, **settings)
    assert isinstance(found, fedc2i.Contribution)
    table = found.to_pandas()
    assert len(table) == len(found.rows)
    assert {*table.verdict} <= {"helps", "costs", "may be chance"}
    assert fedc2i.contribution("fedavg", data, out=tmp_path / "new" / "one", **settings) == found
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("summary.json")}
    assert fedc2i.contribution("fedavg", data, out=tmp_path / "new" / "one", **settings) == found
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("summary.json")}
    with pytest.raises(UserError, match="clients of the method local share nothing"):
        fedc2i.contribution("local", data, **settings)


def test_many_clients_are_sampled_and_stop(tmp_path: Path) -> None:
    (plan,) = prepare(["fedavg"], {**QUICK, "model": "logistic"}, table_federation(7, samples=8))
    found = contribution(plan, tmp_path, most_runs=60)
    assert (found.exact, found.orders) == (False, 2)
    assert found.runs <= 60
    for row in found.select("gain"):
        parts = [own.value for own in found.select() if own.receiver == row.receiver]
        assert len(parts) == 6
        assert sum(parts) == pytest.approx(row.value, abs=1e-6)
    assert len(found.select("leave-one-out")) == len(found.select("pairwise")) == 42
    none = contribution(plan, tmp_path, most_runs=20)
    assert (none.select(), none.select("pairwise"), len(none.select("leave-one-out"))) == ([], [], 42)
    assert any("needs more runs" in note for note in none.notes)


def test_few_clients_are_not_sampled_whatever_is_asked(tmp_path: Path) -> None:
    (plan,) = prepare(["fedavg"], {**QUICK, "model": "logistic"}, table_federation(2))
    said: list[str] = []
    contribution(plan, tmp_path, most_runs=1, say=said.append)
    assert said[0] == "note: --runs 1 has no effect: up to 6 clients, all coalitions are run"
    said.clear()
    contribution(plan, tmp_path, say=said.append)
    assert not any("--runs" in line for line in said)


def test_a_class_of_few_samples_leaves_means_over_classes_without_verdict(tmp_path: Path) -> None:
    """Resamples within a class of one sample always draw that sample."""
    federation = table_federation(2, samples=16)
    first, second = federation.clients
    rare = Split(first.test.x[1::2], first.test.y[1::2].clone())
    rare.y[0] = 0
    federation = replace(federation, clients=(replace(first, test=rare), second))
    (plan,) = prepare(["fedavg"], {**QUICK, "model": "logistic", "seeds": "0,1"}, federation)
    found = contribution(plan, tmp_path)
    for metric, known in (("accuracy", True), ("loss", True), ("balanced_accuracy", False), ("auroc", False)):
        for measure in ("gain", "shapley"):
            (row,) = (own for own in found.select(measure, metric) if own.receiver == "site 0")
            assert math.isnan(row.low) == math.isnan(row.high) == math.isnan(row.p) == (not known), (metric, measure)
            assert known or row.verdict == "may be chance"
            assert not math.isnan(row.value)
    assert not any(math.isnan(row.p) for row in found.rows if row.receiver == "site 1")
    assert any("Fewer than 5 test samples of a class: site 0 (1 of class no)." in note for note in found.notes)


def test_attackers_attack_where_they_are_members(make_federation: Callable[..., Federation], model: Model) -> None:
    settings = {**QUICK, "attack": "sign-flip@b;noise:2@c"}
    (plan,) = prepare(["fedavg"], settings, make_federation((12, 10, 8)), model)
    attacks = [restricted(plan, frozenset(own)).config.attack for own in ({0, 1, 2}, {0, 1}, {1}, {0, 2})]
    assert attacks == ['sign-flip@"b";noise:2@"c"', 'sign-flip@"b"', "", 'noise:2@"c"']


@pytest.mark.parametrize(
    ("method", "more", "said"),
    [
        ("local", {}, "share nothing"),
        ("fedavg", {"topology": "ring"}, "topology=full"),
        ("fedavg", {"clients_per_round": "50%"}, "clients_per_round=100%"),
        ("fedavg", {"attack": "nan@1", "seeds": "0-5"}, "name the attackers"),
    ],
)
def test_refusals(
    method: str,
    more: dict[str, Any],
    said: str,
    make_federation: Callable[..., Federation],
    model: Model,
    tmp_path: Path,
) -> None:
    (plan,) = prepare([method], {**QUICK, **more}, make_federation((8, 8, 8)), model)
    with pytest.raises(UserError, match=said):
        contribution(plan, tmp_path)
    assert not list(tmp_path.iterdir())


def test_one_client_is_refused(make_federation: Callable[..., Federation], model: Model, tmp_path: Path) -> None:
    (plan,) = prepare(["fedavg"], QUICK, make_federation((8,)), model)
    with pytest.raises(UserError, match="at least 2 clients"):
        contribution(plan, tmp_path)


def test_command(tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_arrays(tmp_path / "data", make_federation((12, 10, 8, 8)))
    quick = ("--data", data, "--model", "lenet5", "--rounds", "1", "--set", "epochs=1", "--set", "workers=1")
    answer = call("contribution", "fedc2i", *quick, "--json")
    assert answer.code == 0, answer.err
    found = json.loads(answer.out)
    assert "all coalitions: 12 runs" in answer.err
    shapley = [row for row in found["rows"] if row["measure"] == "shapley" and not row["label"]]
    assert len(shapley) == 12 * 6 * 2
    assert {"giver", "receiver", "value", "low", "high", "p", "verdict"} <= shapley[0].keys()
    assert {own["weight"] for own in found["agreement"]} >= {"λ last round", "λ mean of rounds"}
    values = [row["value"] for row in found["rows"] if row["value"] is not None]
    assert 0 in values
    assert all(value == 0 or abs(value) > 1e-9 for value in values)  # sums of equal scores leave no rounding errors
    folder = tmp_path / "runs" / "contribution-fedc2i-data"
    assert (folder / "contribution.csv").is_file()
    assert re.search(r"computed in \d+ s", answer.err)
    again = call("contribution", "fedc2i", *quick)
    assert "`fedc2i report runs/contribution-fedc2i-data` shows it" in again.out
    shown = call("report", str(folder))
    assert shown.code == 0, shown.err
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "FedC²I: each client alone and together" in page
    assert '<section id="contribution">' in page


def test_what_an_interruption_leaves(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_arrays(tmp_path / "data", make_federation((8, 8)))
    quick = ("--data", data, "--model", "lenet5", "--rounds", "1", "--set", "epochs=1", "--set", "workers=1")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    for where in ("runs.cache.advance", "analysis.contribution.measure.Values.__init__"):  # before a run, after all
        with monkeypatch.context() as patch:
            patch.setattr(f"fedc2i.{where}", interrupt)
            patch.setattr("fedc2i.analysis.contribution.coalitions.side_by_side", one_by_one)
            answer = call("contribution", "fedavg", *quick, "--out", "out")
        assert answer.code == 130
        assert answer.err.splitlines()[-1] == "fedc2i: interrupted"
        assert Path("out").exists() == ("Finished work is kept in out; the same command resumes" in answer.err)
        assert Path("out").exists() == ("Values" in where)
    Path("mine").mkdir()
    for folder in ("new", "mine"):
        assert call("contribution", "local", *quick, "--out", folder).code == 2
    assert not Path("new").exists()
    assert Path("mine").is_dir()  # the user made it


def one_by_one(run: Callable[..., None], jobs: Any, *_: Any) -> Any:
    for job in jobs:
        yield run(job, lambda round: None)


def test_a_relative_path_of_a_run(
    tmp_path: Path, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arrays(tmp_path / "data", make_federation((8, 8)))
    monkeypatch.chdir(tmp_path)
    (plan,) = prepare(["fedc2i"], {**QUICK, "model": "lenet5"}, "arrays:data")
    execute(plan, tmp_path / "run")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    for command in (["contribution"], ["influence", "show"]):
        answer = call(*command, "../run")
        assert answer.code == 2
        assert answer.err.startswith("fedc2i: error: data: ")
        assert answer.err.endswith(
            "; the path is relative to the folder in which the run was started; repeat the command there\n"
        )
        assert not {*(tmp_path / "run").glob("coalitions")}
    monkeypatch.chdir(tmp_path)
    assert call("influence", "show", "run").code == 0


def test_command_on_a_run(tmp_path: Path, make_federation: Callable[..., Federation]) -> None:
    data = write_arrays(tmp_path / "data", make_federation((12, 10, 8)))
    (plan,) = prepare(["fedavg"], {**QUICK, "model": "lenet5", "seeds": "0,1"}, data)
    run = execute(plan, tmp_path / "run")
    answer = call("contribution", str(tmp_path / "run"), "--metric", "loss", "--seeds", "1")
    assert answer.code == 0, answer.err
    for text in ("log-loss", "Who helps whom, Shapley value", "alone", "together", "One seed"):
        assert text in answer.out, answer.out
    found = records.read(tmp_path / "run", run.federation.names)
    assert found is not None
    assert (found.seeds, found.metric) == ((1,), "loss")
    together = found.score("b", "accuracy", "trained").together
    assert together == pytest.approx(run.accuracy("trained")[1, 1])
    refused = call("contribution", str(tmp_path / "run"), "--rounds", "3")
    assert (refused.code, "allowed are" in refused.err, "--seeds" in refused.err) == (2, True, True)
    assert not math.isnan(together)
