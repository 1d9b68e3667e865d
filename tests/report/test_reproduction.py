"""The paper by one command: which runs are planned, what is written, refusals, and resuming."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.cli.paper import NAMES
from fedc2i.data import digit5
from fedc2i.report import reproduction as recipes
from fedc2i.report.progress import ProgressView
from fedc2i.report.reproduction import (
    ARTEFACTS,
    BENCHMARKS,
    Reproduction,
)
from fedc2i.runs.cache import RunCache
from fedc2i.runs.results import Result
from support.benchmarks import runs_below, small_benchmarks
from support.helpers import Answer, call, files_below, is_drawn

SHORT: Mapping[str, tuple[str, ...]] = {
    "METHODS": ("local", "fedcalm", "fedc2i"),
    "VARIANTS": ("local", "fedc2i-client", "fedc2i"),
    "GAMMAS": ("fedc2i:gamma=0.5", "fedc2i"),
}


TABLES = ("table1", "table1-cost", "table2", "table2-cost", "ablation", "gamma")


FIGURES = ("influence-digit5", "influence-office10", "samples-digit5", "samples-office10")


EVERYTHING = {
    *(f"{name}.{ending}" for name in TABLES for ending in ("md", "csv", "tex")),
    *(f"{name}.{ending}" for name in FIGURES for ending in ("png", "svg")),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with small_benchmarks(folder):
        yield folder


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Fewer methods, variants and values of γ."""
    lists = {getattr(recipes, name): short for name, short in SHORT.items()}
    for name, artefact in ARTEFACTS.items():
        needs = {benchmark: lists.get(tuple(methods), methods) for benchmark, methods in artefact.needs.items()}
        patch.setitem(ARTEFACTS, name, replace(artefact, needs=needs))  # type: ignore[arg-type]


@pytest.fixture
def short(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shorten(monkeypatch)
    return data


TRIAL = "trial-1-rounds"  # what is asked for with other rounds than the protocol's never replaces real tables


def paper(data: Path, out: Path, *wanted: str, seeds: str = "0") -> Answer:
    settings = ("--rounds", "1", "--device", "cpu", "--seeds", seeds)
    return call("paper", *wanted, "--data-dir", str(data), "--out", str(out), *settings)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """``fedc2i paper all`` with two seeds; tests only read it, or ask for what is there already."""
    out = tmp_path_factory.mktemp("paper") / "new" / "results"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return out, paper(data, out, "all", "--json", seeds="0,1")


class Recorder:
    """In place of a store: remembers what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def missing(self, plan: Any) -> list[int]:
        return list(plan.config.seeds)

    def compute(self, plan: Any, observer: Any = None) -> None:
        self.asked.append((plan.config.data, plan.key))


def planned(names: Sequence[str], data: Path, **settings: Any) -> tuple[int, list[tuple[str, str]]]:
    """How many single-seed runs there are, and what is computed, in order."""
    store = Recorder()
    settings = {"data_dir": str(data), "device": "cpu", **settings}
    work = Reproduction(names, settings, store)  # type: ignore[arg-type]
    work._names = ()  # what is made of the results is seen below
    work.make(data)
    return work.runs_left(), store.asked


@pytest.mark.parametrize(
    ("name", "lists"),
    [
        ("table1", {"digit5": recipes.METHODS}),
        ("table2", {"office10": recipes.METHODS}),
        ("ablation", dict.fromkeys(BENCHMARKS, recipes.VARIANTS)),
        ("gamma", dict.fromkeys(BENCHMARKS, recipes.GAMMAS)),
        ("influence", dict.fromkeys(BENCHMARKS, ("fedc2i",))),
        ("samples", {}),
    ],
)
def test_each_artefact_plans_exactly_its_runs(data: Path, name: str, lists: Mapping[str, Sequence[str]]) -> None:
    expected = [(benchmark, method) for benchmark, methods in lists.items() for method in methods]
    assert planned([name], data, seeds="0,1,2") == (3 * len(expected), expected)


def test_shared_runs_are_planned_once(data: Path) -> None:
    count, asked = planned(list(ARTEFACTS), data, seeds="0,1")
    everything = {*recipes.METHODS, *recipes.VARIANTS, *recipes.GAMMAS}
    assert len(everything) == 9 + 3 + 4
    assert sorted(asked) == sorted((benchmark, method) for benchmark in BENCHMARKS for method in everything)
    assert count == 2 * len(asked)


def test_runs_go_by_the_presets(data: Path) -> None:
    store = RunCache(data / "never")
    work = Reproduction(["table1", "table2"], {"data_dir": str(data), "device": "cpu"}, store)
    rounds = {plan.config.data: (plan.config.rounds, plan.config.model) for plan in work._plans.values()}
    assert rounds == {"digit5": (20, "lenet5"), "office10": (40, "lenet5")}
    assert (digit5.PRESET["figure_rounds"], len(work._plans)) == ((1, 2, 10, 20), 18)
    assert not store.root.exists()


def test_everything_is_written_and_named_on_stdout(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    assert answer.code == 0
    assert answer.out.count("\n{") == 0
    said = json.loads(answer.out)
    assert said["folder"] == str(out / TRIAL)
    assert len(said["files"]) == len(EVERYTHING)
    assert set(said["files"]) == EVERYTHING
    assert {path.name for path in out.iterdir()} == {TRIAL, "runs"}
    assert {path.name for path in (out / TRIAL).iterdir()} == EVERYTHING
    assert f"Writing to {out / TRIAL}; 20 runs to go" in answer.err
    assert "[10/10] " in answer.err


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_drawn(finished: tuple[Path, Answer], name: str) -> None:
    assert is_drawn(finished[0] / TRIAL / f"{name}.png")
    svg = (finished[0] / TRIAL / f"{name}.svg").read_text(encoding="utf-8")
    assert svg.startswith("<?xml")
    assert svg.rstrip().endswith("</svg>")


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open(encoding="utf-8", newline="")))


@pytest.mark.parametrize(
    ("name", "benchmark", "average"), [("table1", "digit5", "Avg-4"), ("table2", "office10", "Avg")]
)
def test_main_tables(finished: tuple[Path, Answer], name: str, benchmark: str, average: str) -> None:
    rows = read_csv(finished[0] / TRIAL / f"{name}.csv")
    points = ["before", "after", "published", "difference, before", "difference, after"]
    assert [row["Local training"].removesuffix(" *") for row in rows] == points * 3
    assert [row["Method"] for row in rows[::5]] == ["Local", "FedCALM", "FedC²I"]
    for key, received in zip(SHORT["METHODS"], rows[::5], strict=True):
        summaries = [
            json.loads(path.read_text(encoding="utf-8"))["points"]["received"]["accuracy"][average]["mean"]
            for path in finished[0].glob(f"runs/{benchmark}-{key}-seed?-*/summary.json")
        ]
        assert len(summaries) == 2
        assert float(received[average]) == pytest.approx(np.mean(summaries), abs=0.0051)
        assert float(received[f"{average} sd"]) == pytest.approx(np.std(summaries, ddof=1), abs=0.0051)
    for row in rows[3::5] + rows[4::5]:
        assert row["Avg"].endswith(" sd") == (average == "Avg")  # the stand-in is among all five
        assert row[average].endswith(" pt" if average == "Avg-4" else " sd")
    text = (finished[0] / TRIAL / f"{name}.md").read_text(encoding="utf-8")
    assert "FedCALM is a reconstruction" in text
    assert ("SynthDigits is a rendered stand-in" in text) == (benchmark == "digit5")


@pytest.mark.parametrize("name", ["table1-cost", "table2-cost"])
def test_cost_tables(finished: tuple[Path, Answer], name: str) -> None:
    rows = {row["Method"]: row for row in read_csv(finished[0] / TRIAL / f"{name}.csv")}
    assert list(rows) == ["Local", "FedCALM", "FedC²I"]
    assert all(float(row["seconds a round"]) > 0 for row in rows.values())
    assert float(rows["Local"]["up (kB)"]) == 0
    assert float(rows["FedC²I"]["down (kB)"]) > float(rows["FedC²I"]["up (kB)"]) > 0


def test_ablation_and_gamma_tables(finished: tuple[Path, Answer]) -> None:
    ablation = read_csv(finished[0] / TRIAL / "ablation.csv")
    assert [row["Method"] for row in ablation[::2]] == ["Local", "FedC²I-λ", "FedC²I"]
    assert [row["digit5 published Avg"] for row in ablation] == ["", "79.81", "", "84.61", "", "85.50"]
    gamma = read_csv(finished[0] / TRIAL / "gamma.csv")
    assert [row["γ"] for row in gamma] == ["0.5", "0.5", "5", "5"]
    assert [row["office10 published Avg"] for row in gamma] == ["", "63.07", "", "66.70"]
    assert all(0 <= float(row[f"{name} validation"]) <= 100 for row in gamma for name in BENCHMARKS)


def test_second_call_runs_nothing_and_writes_the_same(
    finished: tuple[Path, Answer], short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, _ = finished
    before = {name: content for name, content in files_below(out).items() if not name.endswith(".svg")}  # dated
    (out / TRIAL / "gamma.md").unlink()
    monkeypatch.setattr("fedc2i.runs.driver.simulate", None)
    again = paper(short, out, "all", seeds="0,1")
    assert again.code == 0
    assert again.err == f"Writing to {out / TRIAL}; 0 runs to go\n"
    assert set(again.out.splitlines()) == {str(out / TRIAL / name) for name in EVERYTHING}
    assert {name: content for name, content in files_below(out).items() if not name.endswith(".svg")} == before


def test_side_by_side_as_on_a_gpu_the_tables_are_the_same(
    finished: tuple[Path, Answer], short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.runs.side_by_side_runs.processes_for", lambda config, plans=(): 2)
    answer = paper(short, tmp_path / "results", "table2", "samples", "--json", seeds="0,1")
    assert answer.code == 0
    numbers = re.findall(r"^\[(\d)/3\] (?:Local|FedCALM|FedC²I) on office10, seeds 0, 1: 1 round in", answer.err, re.M)
    assert numbers == ["1", "2", "3"]
    assert len(json.loads(answer.out)["files"]) == 6 + 4
    table = Path(TRIAL) / "table2.csv"
    assert (tmp_path / "results" / table).read_bytes() == (finished[0] / table).read_bytes()


def test_some_of_the_seeds_are_there_already(
    finished: tuple[Path, Answer], short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.runs.driver.simulate", None)
    settings = {"data_dir": str(short), "rounds": "1", "device": "cpu"}
    for seeds, left in (("1", 0), ("1,0", 0), ("0-2", 3), ("7", 3)):
        work = Reproduction(["table1"], {**settings, "seeds": seeds}, RunCache(finished[0] / "runs"))
        assert work.runs_left() == left
    assert Reproduction(["table1"], {**settings, "rounds": "2"}, RunCache(finished[0] / "runs")).runs_left() == 3
    assert Reproduction(["table1"], settings, RunCache(tmp_path)).runs_left() == 3


class Interrupting(ProgressView):
    """Ctrl-c at the beginning of the second run."""

    def begin(self, result: Result) -> None:
        super().begin(result)
        if self._started == 2:
            raise KeyboardInterrupt


def test_interrupted_call_goes_on_with_the_rest(
    finished: tuple[Path, Answer], short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results"
    with monkeypatch.context() as patch:
        patch.setattr("fedc2i.report.progress.ProgressView", Interrupting)
        first = paper(short, out, "table2", "--json")
    assert (first.code, first.out) == (130, "")
    assert "3 runs to go" in first.err
    assert first.err.splitlines()[-1].startswith("fedc2i: interrupted")
    assert runs_below(out) == ["office10-local-seed0"]
    assert [path.name for path in out.iterdir()] == ["runs"]  # no table before all is there
    done = files_below(next(out.glob("runs/*-local-seed0-*")))
    second = paper(short, out, "table2", "--json")
    assert second.code == 0
    assert "2 runs to go" in second.err
    assert "[1/2] FedCALM on office10, seed 0" in second.err
    assert "Local" not in second.err
    assert len(runs_below(out)) == len(list((out / "runs").iterdir())) == 3
    assert files_below(next(out.glob("runs/*-local-seed0-*"))) == done
    ours = [path.read_bytes() for path in sorted(out.glob("runs/*/metrics.jsonl"))]
    theirs = [path.read_bytes() for path in sorted(finished[0].glob("runs/office10-*-seed0-*/metrics.jsonl"))]
    assert all(run in theirs for run in ours)  # as if nothing had happened


def test_samples_train_nothing(short: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.runs.driver.simulate", None)
    answer = paper(short, tmp_path / "results", "samples", "samples")
    assert answer.code == 0
    assert "; 0 runs to go" in answer.err
    names = {f"samples-{name}.{ending}" for name in BENCHMARKS for ending in ("png", "svg")}
    assert set(files_below(tmp_path / "results" / TRIAL)) == {".", *names}
    assert len(answer.out.splitlines()) == 4


def test_diverged_runs_leave_the_figure_out(
    finished: tuple[Path, Answer], short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Result, "influence", lambda *_: np.zeros((0,)))
    answer = paper(short, finished[0], "influence", "--json", seeds="0,1")
    assert (answer.code, json.loads(answer.out)["files"]) == (0, [])


@pytest.mark.parametrize("wanted", [("table3",), ("table1", "figure"), ("",), ("Table1",)])
def test_unknown_artefact_is_refused(short: Path, tmp_path: Path, wanted: tuple[str, ...]) -> None:
    answer = paper(short, tmp_path / "results", *wanted)
    assert (answer.code, answer.out) == (2, "")
    assert f"unknown table or figure '{wanted[-1]}'" in answer.err
    assert tuple(ARTEFACTS) == NAMES
    assert all(name in answer.err for name in (*NAMES, "all"))
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "0,0"), "seeds must be different"),
        (("--seeds", "x"), "seeds must be whole numbers"),
        (("--rounds", "0"), "rounds"),
        (("--rounds", "many"), "rounds"),
        (("--device", "tpu"), "device must be auto"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_settings_are_refused_before_anything_is_written(
    short: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    answer = call("paper", "table2", "--data-dir", str(short), "--out", str(tmp_path / "results"), *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("wanted", [*ARTEFACTS, "all"])
def test_missing_data_is_refused_before_anything_is_written(short: Path, tmp_path: Path, wanted: str) -> None:
    (tmp_path / "data" / "digit5").mkdir(parents=True)
    if wanted != "table1":  # Digit-5 is there, Office-10 is not
        for file in (short / "digit5").iterdir():
            (tmp_path / "data" / "digit5" / file.name).symlink_to(file)
    answer = paper(tmp_path / "data", tmp_path / "results", wanted)
    assert (answer.code, answer.out) == (2, "")
    assert f"{'digit5' if wanted == 'table1' else 'office10'}: no data for " in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_folder_that_cannot_be_written(short: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for wanted in ("samples", "influence"):
        answer = paper(short, tmp_path / "file", wanted)
        assert (answer.code, answer.out) == (2, "")
        assert "cannot be written" in answer.err.splitlines()[-1]
        assert "Traceback" not in answer.err
    assert (tmp_path / "file").read_text() == "mine"


def test_damaged_run_is_named(finished: tuple[Path, Answer], short: Path) -> None:
    (summary,) = finished[0].glob("runs/office10-fedc2i-seed0-*/summary.json")
    whole = summary.read_bytes()
    try:
        summary.write_bytes(whole[:-20])
        answer = paper(short, finished[0], "influence", seeds="0,1")
    finally:
        summary.write_bytes(whole)
    assert answer.code == 2
    assert f"{summary.parent}: not a complete run" in answer.err
