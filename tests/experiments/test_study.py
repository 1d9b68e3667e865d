"""FedC²I⁺ on equal terms: pairs by hand, choices by validation alone, verdicts both ways, and the whole command."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_paper import runs_below, small_benchmarks

from fedc2i.analysis.verdicts import Paired
from fedc2i.cli import study as study_command
from fedc2i.core.errors import UserError
from fedc2i.data import office10
from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.methods import registry
from fedc2i.report import study_plus
from fedc2i.report.progress import ProgressView
from fedc2i.report.study_plus import BENCHMARKS, CONTROLS, GRID, OURS, PARTS, PLAIN, UNTUNED, Study, choose
from fedc2i.report.study_plus_verdict import compare, verdict
from fedc2i.runs.cache import Store
from fedc2i.runs.results import Result
from helpers import DIGIT5, Answer, blank_federation, call, files_below, made_up

OFFICE = blank_federation(["A", "C"], name="office10")
DIGITS = blank_federation(DIGIT5, name="digit5", averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")})
TITLES = ("FedAvg", "FedProx", "FedRep", "FedAvg + extras", "FedProx + extras", "FedRep + extras")


# Pairs.


@pytest.mark.parametrize(
    ("ours", "theirs", "mean", "error", "counts"),
    [
        ((80, 82, 84), (79, 82, 80), 5 / 3, (13 / 3) ** 0.5 / 3**0.5, (2, 0, 1)),  # differences 1, 0, 4
        ((80, 80, 80, 80), (81, 79, 82, 80), -0.5, (5 / 3) ** 0.5 / 2, (1, 2, 1)),  # -1, 1, -2, 0
        ((80, 90), (79.5, 89.5), 0.5, 0.0, (2, 0, 0)),  # seeds far apart, a steady difference
        ((80,), (81,), -1, None, (0, 1, 0)),
        ((80, 0.1 + 0.2), (80, 0.3), 0, 0.0, (0, 0, 2)),  # rounding is no win
    ],
    ids=["ahead", "behind", "steady", "one seed", "rounding"],
)
def test_pairs_by_hand(ours: Any, theirs: Any, mean: float, error: float | None, counts: tuple[int, int, int]) -> None:
    pair = Paired.of(np.array(ours, dtype=float), np.array(theirs, dtype=float))
    assert pair.mean == pytest.approx(mean, abs=1e-6)
    assert pair.error == (None if error is None else pytest.approx(error))
    assert (pair.wins, pair.losses, pair.ties) == counts


def test_pairs_are_of_the_last_average_within_a_seed() -> None:
    ours = made_up(DIGITS, {0: [[90, 80, 70, 0, 60]], 1: [[90, 80, 70, 0, 64]]}, method=registry.get(OURS)())
    other = made_up(DIGITS, {0: [[80, 80, 70, 99, 60]], 1: [[90, 80, 70, 99, 68]]}, method=registry.get("fedavg")())
    pair = compare({"digit5": {OURS: ours, "fedavg": other}})["digit5", "fedavg", "received"]
    assert pair == Paired(0.75, pytest.approx(1.75), 1, 1, 0)  # type: ignore[arg-type]  # 2.5 and -1: SynthDigits is out


# Choices.


def validated(name: str, options: Mapping[str, Any], received: Sequence[float], trained: Sequence[float]) -> Result:
    """One seed, the second client without validation data; test accuracy is the opposite of validation."""
    result = made_up(OFFICE, {100: [[0, 0]]}, method=registry.get(name)(**options))
    for point, values in zip(POINTS, (received, trained), strict=True):
        for own, value in zip(result.rounds[0].metrics[point], values, strict=False):
            own |= {"validation_accuracy": value, "accuracy": 100 - value}
    return result


def test_choice_is_by_validation_not_by_test() -> None:
    worse, better = (validated(OURS, {"anchor": anchor}, [own], [own]) for anchor, own in ((0.03, 20), (0.3, 60)))
    assert worse.scores("trained")["Avg"].mean > better.scores("trained")["Avg"].mean
    assert choose([worse, better]) is better
    assert choose([better, worse]) is better


def test_choice_is_by_the_mean_of_both_points() -> None:
    received = validated("fedavg-plus", {"anchor": 0.03}, [90], [10])
    both = validated("fedavg-plus", {"anchor": 0.3}, [60], [60])
    assert study_plus.validation(received) == pytest.approx([50])
    assert study_plus.validation(received, ["received"]) == pytest.approx([90])
    assert choose([received, both]) is both


def test_equal_settings_leave_the_preset() -> None:
    low, preset, high = (validated(OURS, {"anchor": anchor}, [50], [50]) for anchor in (0.03, 0.1, 0.3))
    assert preset.method == registry.get(OURS)()
    assert choose([low, preset, high]) is preset
    assert choose([high, low]) is high  # without it the first


def test_what_is_not_a_number_is_not_chosen() -> None:
    broken, sound = validated(OURS, {}, [np.nan], [80]), validated(OURS, {"anchor": 0.3}, [1], [1])
    assert choose([broken, sound]) is sound


def test_grids_are_those_announced() -> None:
    assert {name: len(study_plus.grid(name)) for name in GRID} == {**dict.fromkeys(CONTROLS, 3), OURS: 9}
    assert all(registry.get(name)() in study_plus.grid(name) for name in GRID)
    assert all(without != method for method in study_plus.grid(OURS) for without in study_plus.without(method).values())
    assert list(study_plus.without(registry.get(OURS)())) == [
        "influence_samples=32",
        "anchor=0",
        "average=false",
        "gamma=0",
    ]


# Verdicts.


def found(seeds: int = 10, ours: float = 80, **others: tuple[float, float]) -> dict[str, dict[str, Result]]:
    """Every method at 70 and 71 but those named with (received, lift); names with _ for -; both benchmarks alike."""

    def row(federation: Federation, name: str, level: float, lift: float) -> Result:
        table = {seed: [[level] * len(federation.names)] for seed in range(seeds)}
        return made_up(federation, table, method=registry.get(name)(), lift=lift)

    given = {name.replace("_", "-"): levels for name, levels in others.items()}
    rows = dict.fromkeys((*UNTUNED, *GRID), (70.0, 1.0)) | {OURS: (ours, 1.0)} | given
    return {
        federation.name: {name: row(federation, name, *levels) for name, levels in rows.items()}
        for federation in (DIGITS, OFFICE)
    }


def with_losses(rows: dict[str, dict[str, Result]], data: str, name: str, seeds: int) -> dict[str, dict[str, Result]]:
    """The same, but that row is above FedC²I⁺ by 0.5 in the first seeds, at both points."""
    above, old = rows[data][OURS].accuracy("received") + 0.5, rows[data][name]
    table = {s: [above[s] if s < seeds else own] for s, own in enumerate(old.accuracy("received"))}
    return {**rows, data: {**rows[data], name: made_up(old.federation, table, method=old.method)}}


def test_other_rounds_than_the_protocols_are_called_a_trial() -> None:
    federation = blank_federation(["A", "C"], name="office10", preset={"rounds": 40})
    rows = {name: made_up(federation, {0: [[50, 50]]}, method=registry.get(name)()) for name in (*UNTUNED, *GRID)}
    assert verdict({"office10": rows}).sentences[:2] == (
        "Without digit5: the targets are for digit5 and office10, so none is decided.",
        "A trial of office10, rounds: 1 for the protocol's 40. It proves nothing.",
    )
    assert not any("trial" in sentence for sentence in verdict(found()).sentences)


def test_all_targets_met() -> None:
    said = verdict(found())
    assert said.targets == {"best mean": True, "wins at received": True, "wins at trained": True}
    text = "\n".join(said.sentences)
    for data in BENCHMARKS:
        for point in POINTS:
            assert f"On {data} at {point} FedC²I⁺ has the best mean; the next is Local (difference +10.00" in text
        wins = ", ".join(f"10 against {title}" for title in TITLES)
        assert f"On {data} at received it wins, of 10 seeds, {wins}." in said.sentences
        assert f"On {data} at trained it wins, of 10 seeds, {', '.join(wins.split(', ')[:3])}." in said.sentences
        assert (
            f"on {data} at trained it is above FedAvg + extras (+10.00, s.e. 0.00; 10 wins, 0 losses, 0 ties)" in text
        )
    assert "missed" not in text
    assert text.count(": met.") == 3
    assert said.sentences[-1] == "Overall the target is met: 3 of its 3 parts are met."


def test_everything_missed_is_said_as_plainly() -> None:
    said = verdict(found(ours=60))
    assert not any(said.targets.values())
    text = "\n".join(said.sentences)
    assert (
        "On office10 at trained FedC²I⁺ does not have the best mean; above it is Local (difference -10.00, s.e. 0.00)."
        in text
    )
    assert "On digit5 at received it wins, of 10 seeds, 0 against FedAvg, 0 against FedProx" in text
    assert "it is below FedAvg + extras (-10.00, s.e. 0.00; 0 wins, 10 losses, 0 ties)" in text
    assert ": met" not in text
    assert said.sentences[-1] == "Overall the target is missed: 0 of its 3 parts are met."


def test_tied_is_not_won() -> None:
    said = verdict(found(ours=70))
    assert not any(said.targets.values())
    text = "\n".join(said.sentences)
    assert "shares the best mean, which is not enough, with Local (difference +0.00, s.e. 0.00)." in text
    assert "it is level with FedAvg + extras (0 wins, 0 losses, 10 ties)" in text
    assert "it wins, of 10 seeds, 0 against FedAvg," in text


@pytest.mark.parametrize(("losses", "met"), [(2, True), (3, False)])
@pytest.mark.parametrize("name", [*PLAIN, *CONTROLS])
@pytest.mark.parametrize("data", BENCHMARKS)
def test_eight_of_ten_are_needed_against_each(data: str, name: str, losses: int, met: bool) -> None:
    rows = with_losses(found(), data, name, losses)
    title = rows[data][name].method.title
    said = verdict(rows)
    plain_trained = met or name in CONTROLS  # at trained the controls are no target
    assert said.targets == {"best mean": True, "wins at received": met, "wins at trained": plain_trained}
    text = "\n".join(said.sentences)
    assert f"{10 - losses} against {title}" in text
    assert (f"missed (too few against {title} on {data})" in text) is not met


def test_control_above_at_trained_alone_misses_the_mean_and_not_the_wins() -> None:
    said = verdict(found(fedprox_plus=(70, 20)))
    assert said.targets == {"best mean": False, "wins at received": True, "wins at trained": True}
    text = "\n".join(said.sentences)
    assert "On digit5 at received FedC²I⁺ has the best mean; the next is" in text
    assert (
        "On digit5 at trained FedC²I⁺ does not have the best mean; above it is FedProx + extras (difference -9.00"
        in text
    )
    assert "below FedProx + extras (-9.00" in text
    assert said.sentences[-1] == "Overall the target is missed: 2 of its 3 parts are met."


def test_uncertain_standing_is_called_so() -> None:
    rows = with_losses(found(ours=70.1), "digit5", "fedavg-plus", 1)  # nine times +0.1, once -0.5
    text = "\n".join(verdict(rows).sentences)
    assert "above FedAvg + extras but within two standard errors (+0.04, s.e. 0.06; 9 wins, 1 losses, 0 ties)" in text


def test_preset_row_of_a_control_counts_and_its_own_does_not() -> None:
    rows = found()
    own = {data: {**of, OURS + study_plus.PRESET: found(ours=99)[data][OURS]} for data, of in rows.items()}
    assert verdict(own).targets["best mean"]
    above = found(fedavg_plus=(99, 1))
    said = verdict({data: {**of, "fedavg-plus preset": above[data]["fedavg-plus"]} for data, of in rows.items()})
    assert not said.targets["best mean"]
    assert "above it is FedAvg + extras preset" in said.sentences[0]


@pytest.mark.parametrize(("seeds", "enough"), [(1, "1 of 1 seed "), (3, "3 of 3 seeds "), (5, "4 of 5 seeds ")])
def test_fewer_seeds_need_the_same_share(seeds: int, enough: str) -> None:
    said = verdict(found(seeds=seeds))
    assert all(said.targets.values())
    assert f"at least {enough}" in "\n".join(said.sentences)
    assert ("in a single seed" in "\n".join(said.sentences)) == (seeds == 1)
    assert "s.e." not in "\n".join(said.sentences) or seeds > 1


# The runs.


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Both benchmarks, small, with grids that hold the preset alone, among others, and not at all."""
    folder = tmp_path_factory.mktemp("benchmarks")
    with small_benchmarks(folder) as patch:
        patch.setitem(GRID, "fedavg-plus", {"anchor": (0.1,)})  # type: ignore[arg-type]
        patch.setitem(GRID, "fedprox-plus", {"anchor": (0.1, 0.3)})  # type: ignore[arg-type]
        patch.setitem(GRID, "fedrep-plus", {"anchor": (0.3,)})  # type: ignore[arg-type]
        patch.setitem(GRID, OURS, {"anchor": (0.3,), "gamma": (2.0, 10.0)})  # type: ignore[arg-type]
        yield folder


class Inventing:
    """In place of a store: validation accuracies that the setting, and whether the seeds are for tuning, decide."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[int, ...]]] = []

    def missing(self, plan: Any) -> list[int]:
        return list(plan.config.seeds)

    def compute(self, plan: Any, observer: Any = None) -> Result:
        self.asked.append((plan.config.data, plan.key, plan.config.seeds))
        own = 50 + plan.method.anchor + getattr(plan.method, "gamma", 0)
        for_tuning = min(plan.config.seeds) >= 100
        names = plan.federation.names
        result = made_up(
            plan.federation, {s: [[100 - own] * len(names)] for s in plan.config.seeds}, method=plan.method
        )
        for report in result.rounds:
            for metrics in report.metrics.values():
                metrics[0]["validation_accuracy"] = own if for_tuning else 100 - own
        return result


def test_choice_uses_tuning_seeds_only(data: Path) -> None:
    store = Inventing()
    work = Study({"seeds": "0-2", "data_dir": str(data), "device": "cpu"}, "100,101", store)  # type: ignore[arg-type]
    assert store.asked == []
    work.tune()
    assert {seeds for _, _, seeds in store.asked} == {(100, 101)}
    assert len(store.asked) == 2 * (1 + 2 + 1 + 2)
    chosen = {key: (method.anchor, getattr(method, "gamma", None)) for key, method in work.chosen.items()}
    assert chosen == {
        (benchmark, name): setting
        for benchmark in BENCHMARKS
        for name, setting in {
            "fedavg-plus": (0.1, None),
            "fedprox-plus": (0.3, None),
            "fedrep-plus": (0.3, None),
            OURS: (0.3, 10.0),  # the worst of both by test accuracy, and by validation with the reported seeds
        }.items()
    }
    store.asked.clear()
    main, parts = work.report()
    assert {seeds for _, _, seeds in store.asked} == {(0, 1, 2)}
    rows = [*UNTUNED, "fedavg-plus", "fedprox-plus preset", "fedprox-plus", "fedrep-plus preset", "fedrep-plus"]
    assert list(main["digit5"]) == list(main["office10"]) == [*rows, f"{OURS} preset", OURS]
    best = registry.get(OURS)(anchor=0.3, gamma=10.0)  # type: ignore[call-arg]
    for name, (option, value) in zip(list(parts["digit5"])[1:], PARTS.items(), strict=True):
        changed = vars(parts["digit5"][name].method)
        assert changed == {**vars(best), option: value}
    assert work.chosen["digit5", OURS] == best


def test_runs_go_by_the_presets_and_score_the_last_round(data: Path) -> None:
    work = Study({"seeds": "0-9", "data_dir": str(data), "device": "cpu"}, "100-102", Store(data / "never"))
    left = work.left()
    assert {plan.config.evaluate_every for plan in left} == {0}
    assert {(plan.config.data, plan.config.rounds) for plan in left} == {("digit5", 20), ("office10", 40)}
    assert sum(len(plan.config.seeds) for plan in left) == 2 * (6 * 3 + (5 + 4 + 4) * 10)
    assert not (data / "never").exists()


# The command.

TRIAL = "trial-1-rounds"
TABLES = ("plus", "plus-paired", "plus-parts", "plus-tuning")
FILES = [f"{name}.{ending}" for name in TABLES for ending in ("md", "csv", "tex")]


def plus(data: Path, out: Path, *more: str, seeds: str = "0,1", tuning: str = "7,8") -> Answer:
    settings = ("--rounds", "1", "--device", "cpu", "--seeds", seeds, "--tuning-seeds", tuning)
    return call("study", "plus", "--data-dir", str(data), "--out", str(out), *settings, *more)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """The whole command; tests only read it, or ask for what is there already."""
    out = tmp_path_factory.mktemp("study") / "results"
    return out, plus(data, out, "--json")


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open(encoding="utf-8", newline="")))


def metric(out: Path, run: str, seed: int, point: str, name: str) -> float:
    """The mean over clients that have it, from a run's own file."""
    (file,) = out.glob(f"runs/{run}-seed{seed}-????????????/metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return float(np.mean([line["value"] for line in lines if (line["point"], line["metric"]) == (point, name)]))


def test_everything_is_written_and_said(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    assert answer.code == 0, answer.err
    said = json.loads(answer.out)
    assert (said["folder"], said["files"]) == (str(out / TRIAL), FILES)
    assert {path.name for path in (out / TRIAL).iterdir()} == set(FILES)
    assert {path.name for path in out.iterdir()} == {TRIAL, "runs"}
    assert set(said["targets"]) == {"best mean", "wins at received", "wins at trained"}
    assert said["verdict"][0] == "A trial of digit5, rounds: 1 for the protocol's 20. It proves nothing."
    text = (out / TRIAL / "plus-paired.md").read_text(encoding="utf-8")
    assert text.endswith("".join(f"- {sentence}\n" for sentence in said["verdict"]))
    assert all((out / TRIAL / f"{name}.md").read_text().count("A trial of digit5") == 1 for name in TABLES[:3])
    assert "at least" in answer.err.splitlines()[0]
    count = answer.err.splitlines()[-1].partition("]")[0].removeprefix("[").split("/")
    assert count[0] == count[1]  # the number of runs was put right once it was known


def test_runs_are_those_needed_each_once(finished: tuple[Path, Answer]) -> None:
    names = [name.rpartition("-seed") for name in runs_below(finished[0])]
    tuning = {(name, seed) for name, _, seed in names if seed in ("7", "8")}
    grids = ["fedavg-plus", "fedprox-plus", "fedprox-plus-anchor=0.3", "fedrep-plus-anchor=0.3"]
    grids += ["fedc2i-plus-gamma=2.0-anchor=0.3", "fedc2i-plus-gamma=10.0-anchor=0.3"]
    assert tuning == {(f"{data}-{name}", seed) for data in BENCHMARKS for name in grids for seed in "78"}
    assert {seed for _, _, seed in names} == {"0", "1", "7", "8"}


def test_chosen_is_what_validation_says(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    rows = read_csv(out / TRIAL / "plus-tuning.csv")
    assert [row["Method"] for row in rows] == [
        "FedAvg + extras",
        *["FedProx + extras"] * 2,
        "FedRep + extras",
        *["FedC²I⁺"] * 2,
    ]
    for data in BENCHMARKS:
        means = []
        for row, gamma in zip(rows[4:], ("2.0", "10.0"), strict=True):
            run = f"{data}-fedc2i-plus-gamma={gamma}-anchor=0.3"
            by_seed = [np.mean([metric(out, run, s, p, "validation_accuracy") for p in POINTS]) for s in (7, 8)]
            assert float(row[f"{data} both"]) == pytest.approx(np.mean(by_seed), abs=0.0051)
            assert float(row[f"{data} both sd"]) == pytest.approx(np.std(by_seed, ddof=1), abs=0.0051)
            means.append(round(float(np.mean(by_seed)), 6))
        best = means.index(max(means))
        assert [row[f"{data} choice"] for row in rows[4:]] == (["chosen", ""] if best == 0 else ["", "chosen"])
        assert json.loads(answer.out)["chosen"][f"{data} {OURS}"] == f"anchor=0.3, gamma={(2, 10)[best]}"


def test_main_table(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    rows = read_csv(out / TRIAL / "plus.csv")
    labels = [row["Method"] for row in rows[::2]]
    assert labels[:6] == ["Local", "FedAvg", "FedProx", "FedRep", "FedC²I", "FedAvg + extras (anchor=0.1)"]
    assert labels[-4:-1] == [
        "FedRep + extras preset (anchor=0.1)",
        "FedRep + extras (anchor=0.3)",
        "FedC²I⁺ preset (anchor=0.1, gamma=5)",
    ]
    chosen = json.loads(answer.out)["chosen"]
    assert all(chosen[f"{data} {OURS}"] in labels[-1] for data in BENCHMARKS)
    assert [row["Point"].removesuffix(" *") for row in rows] == [*POINTS] * len(labels)
    values = [metric(out, "office10-fedavg", seed, "trained", "accuracy") for seed in (0, 1)]
    assert float(rows[3]["office10 Avg"]) == pytest.approx(np.mean(values), abs=0.0051)
    assert float(rows[3]["office10 Avg sd"]) == pytest.approx(np.std(values, ddof=1), abs=0.0051)
    assert set(rows[0]) == {
        *("Method", "Point"),
        *(f"{column}{sd}" for column in ("digit5 Avg", "digit5 Avg-4", "office10 Avg") for sd in ("", " sd")),
    }
    text = (out / TRIAL / "plus.md").read_text(encoding="utf-8")
    assert "with seeds 7, 8, which are not reported" in text
    assert "FedProx + extras 2, FedRep + extras 1, FedC²I⁺ 2" in text


@pytest.mark.parametrize("table", ["plus-paired", "plus-parts"])
def test_differences_are_those_of_the_runs(finished: tuple[Path, Answer], table: str) -> None:
    out, answer = finished
    rows = read_csv(out / TRIAL / f"{table}.csv")
    gamma = json.loads(answer.out)["chosen"][f"office10 {OURS}"].partition("gamma=")[2]
    ours = f"office10-fedc2i-plus-gamma={float(gamma)}-anchor=0.3"
    named, other = (
        ("FedAvg", "office10-fedavg") if table == "plus-paired" else ("with average=false", f"{ours}-average=false")
    )
    (row,) = [row for row in rows if row[next(iter(row))] == named and row["Point"].startswith("trained")]
    differences = [
        metric(out, ours, seed, "trained", "accuracy") - metric(out, other, seed, "trained", "accuracy")
        for seed in (0, 1)
    ]
    assert float(row["office10 Avg difference"]) == pytest.approx(np.mean(differences), abs=0.0051)
    assert float(row["office10 standard error"]) == pytest.approx(np.std(differences, ddof=1) / 2**0.5, abs=0.0051)
    counts = [sum(sign * d > 1e-6 for d in differences) for sign in (1, -1)]
    assert row["office10 wins / losses / ties"] == f"{counts[0]} / {counts[1]} / {2 - sum(counts)}"
    assert "digit5 Avg-4 difference" in row


def test_parts_table_has_each_part_once(finished: tuple[Path, Answer]) -> None:
    rows = read_csv(finished[0] / TRIAL / "plus-parts.csv")
    names = ["with influence_samples=32", "with anchor=0", "with average=false", "with gamma=0"]
    assert [row["Method"] for row in rows[2::2]] == names
    assert rows[0]["Method"].startswith("FedC²I⁺ (")
    assert rows[0]["digit5 Avg-4 difference"] == rows[0]["digit5 wins / losses / ties"] == ""


def test_second_call_runs_nothing_and_writes_the_same(
    finished: tuple[Path, Answer], data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, answer = finished
    before = files_below(out)
    (out / TRIAL / "plus-parts.md").unlink()
    monkeypatch.setattr("fedc2i.runs.plan.simulate", None)
    again = plus(data, out)
    assert again.code == 0, again.err
    assert again.err == f"Writing to {out / TRIAL}; 0 runs to go\n"
    assert again.out.splitlines() == [
        *(str(out / TRIAL / name) for name in FILES),
        "",
        *json.loads(answer.out)["verdict"],
    ]
    assert files_below(out) == before


def test_without_tuning_the_presets_are_reported(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "results"
    answer = plus(data, out, "--no-tuning", "--json", seeds="0", tuning="0")
    assert answer.code == 0, answer.err
    assert "; 26 runs to go" in answer.err
    assert json.loads(answer.out)["files"] == [name for name in FILES if "tuning" not in name]
    assert len(runs_below(out)) == 26
    text = (out / TRIAL / "plus.md").read_text(encoding="utf-8")
    assert "| FedC²I⁺ (anchor=0.1, gamma=5) |" in text
    assert "preset (" not in text
    assert "No setting was chosen (--no-tuning)" in text
    paired = read_csv(out / TRIAL / "plus-paired.csv")
    assert {row["digit5 standard error"] for row in paired} == {""}


def test_one_benchmark_alone(data: Path, tmp_path: Path) -> None:
    """For those who have the data of one only; what is missing is said, and nothing of the other is asked for."""
    out = tmp_path / "results"
    shutil.copytree(data / "office10", tmp_path / "data" / "office10")
    answer = plus(tmp_path / "data", out, "--no-tuning", "--json", "--benchmarks", "office10", seeds="0", tuning="0")
    assert answer.code == 0, answer.err
    assert "; 13 runs to go" in answer.err
    said = json.loads(answer.out)["verdict"]
    assert said[0] == "Without digit5: the targets are for digit5 and office10, so none is decided."
    assert json.loads(answer.out)["targets"] == {}
    assert not any("on digit5" in sentence or "arget" in sentence for sentence in said[1:])
    assert not (out / TRIAL).exists()  # nothing takes the place of the tables of both
    paired = (out / "only-office10" / TRIAL / "plus-paired.md").read_text(encoding="utf-8")
    assert said[0] in paired
    assert "digit5 Avg" not in paired
    refused = plus(data, out, "--benchmarks", "mnist")
    assert (refused.code, refused.out) == (2, "")
    assert "--benchmarks must be one or more, all different, of digit5, office10, got 'mnist'" in refused.err


class Interrupting(study_command._View):
    """Ctrl-c at the beginning of the third run."""

    def begin(self, result: Result) -> None:
        ProgressView.begin(self, result)
        if self._started == 3:
            raise KeyboardInterrupt


def test_interrupted_study_keeps_what_it_has(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_command, "_View", Interrupting)
    answer = plus(data, tmp_path / "results", seeds="0", tuning="7")
    assert (answer.code, answer.out) == (130, "")
    assert runs_below(tmp_path / "results") == ["digit5-fedavg-plus-seed7", "digit5-fedprox-plus-seed7"]
    settings = {"seeds": "0", "data_dir": str(data), "device": "cpu", "rounds": "1"}
    left = Study(settings, "7", Store(tmp_path / "results" / "runs")).tuning_left()
    assert len(left) == 2 * 6 - 2


# Refusals.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "0-9", "--tuning-seeds", "9-11"), "seed 9 is in --seeds and in --tuning-seeds"),
        (("--tuning-seeds", "0"), "seed 0 is in --seeds and in --tuning-seeds"),
        (("--tuning-seeds", "100,100"), "--tuning-seeds must be different whole numbers"),
        (("--tuning-seeds", "x"), "--tuning-seeds: seeds must be whole numbers"),
        (("--tuning-seeds", ""), "--tuning-seeds: seeds must be whole numbers"),
        (("--tuning-seeds", "102-100"), "--tuning-seeds: seeds: '102-100' counts down"),
        (("--seeds", "0,0"), "seeds must be different"),
        (("--seeds", "x"), "seeds must be whole numbers"),
        (("--rounds", "0"), "rounds"),
        (("--rounds", "many"), "rounds"),
        (("--device", "tpu"), "device must be auto, cpu or cuda"),
        (("--data-dir", "/nowhere"), "/nowhere: no such folder"),
        (("--anchor", "1"), "No such option"),
        (("table",), "unexpected extra argument"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_settings_are_refused_before_anything_is_written(
    data: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    where = () if "--data-dir" in arguments else ("--data-dir", str(data))
    answer = call("study", "plus", "--out", str(tmp_path / "results"), *where, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert answer.err.count("\n") == 1
    assert not (tmp_path / "results").exists()


def test_tuning_needs_validation_data(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office10, "VALIDATION_PER_CLASS", 0)
    settings = {"seeds": "0", "data_dir": str(data), "device": "cpu"}
    with pytest.raises(UserError, match="office10: no client has validation data to choose by; --no-tuning"):
        Study(settings, "7", Store(tmp_path))
    assert Study(settings, None, Store(tmp_path)).tuning_left() == []
