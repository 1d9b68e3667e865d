"""FedC²I⁺ on equal terms: pairs by hand, choices by validation alone, verdicts both ways, and the whole study."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.grid import Grid
from experiments.plus import GRID, PARTS, UNTUNED, Study, choose
from experiments.plus_verdict import BENCHMARKS, CONTROLS, OURS, PLAIN, PRESET, compare, verdict
from studies import ask, metric, namespace, read_csv

from experiments import plus, plus_tables
from fedc2i.analysis.significance import Paired
from fedc2i.core.errors import UserError
from fedc2i.data import office10
from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS
from fedc2i.methods import registry
from fedc2i.report.table import WHEN
from fedc2i.runs.results import Result
from support.benchmarks import runs_below, small_benchmarks
from support.helpers import DIGIT5, Answer, blank_federation, files_below, made_up

OFFICE = blank_federation(["A", "C"], name="office10")
DIGITS = blank_federation(DIGIT5, name="digit5", averages={"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")})
TITLES = ("FedAvg", "FedProx", "FedRep", "FedAvg + extras", "FedProx + extras", "FedRep + extras")


def test_pairs_are_of_the_last_average_within_a_seed() -> None:
    ours = made_up(DIGITS, {0: [[90, 80, 70, 0, 60]], 1: [[90, 80, 70, 0, 64]]}, method=registry.get(OURS)())
    other = made_up(DIGITS, {0: [[80, 80, 70, 99, 60]], 1: [[90, 80, 70, 99, 68]]}, method=registry.get("fedavg")())
    pair = compare({"digit5": {OURS: ours, "fedavg": other}})["digit5", "fedavg", "received"]
    assert pair == Paired(0.75, pytest.approx(1.75), 1, 1, 0)  # type: ignore[arg-type]  # 2.5 and -1: no SynthDigits


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
    assert plus_tables.validation(received) == pytest.approx([50])
    assert plus_tables.validation(received, ["received"]) == pytest.approx([90])
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
    assert {name: len(plus.grid_of(name)) for name in GRID} == {**dict.fromkeys(CONTROLS, 3), OURS: 9}
    assert all(registry.get(name)() in plus.grid_of(name) for name in GRID)
    assert all(part != method for method in plus.grid_of(OURS) for part in plus.without(method).values())
    parts = ["influence_samples=32", "anchor=0", "average=false", "gamma=0"]
    assert list(plus.without(registry.get(OURS)())) == parts


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


def test_all_targets_met() -> None:
    said = verdict(found())
    assert said.targets == {
        "best mean": True,
        "wins before local training": True,
        "wins after local training": True,
    }
    text = "\n".join(said.sentences)
    for data in BENCHMARKS:
        for point in POINTS:
            assert f"On {data} {WHEN[point]}, FedC²I⁺ has the best mean; the next is Local (difference +10.00" in text
        wins = ", ".join(f"10 against {title}" for title in TITLES)
        assert f"On {data} before local training, it wins in 10 seeds: {wins}." in said.sentences
        plain = ", ".join(wins.split(", ")[:3])
        assert f"On {data} after local training, it wins in 10 seeds: {plain}." in said.sentences
        assert "it is above FedAvg + extras (+10.00, s.e. 0.00; 10 wins, 0 losses, 0 ties)" in text
    assert "missed" not in text
    assert text.count(": met.") == 3
    assert said.sentences[-1] == "Overall the target is met: 3 of its 3 parts are met."


def test_everything_missed_is_said_as_plainly() -> None:
    said = verdict(found(ours=60))
    assert not any(said.targets.values())
    text = "\n".join(said.sentences)
    assert "On office10 after local training, FedC²I⁺ does not have the best mean; above it is Local (diff" in text
    assert "0 against FedAvg, 0 against FedProx" in text
    assert "it is below FedAvg + extras (-10.00, s.e. 0.00; 0 wins, 10 losses, 0 ties)" in text
    assert ": met" not in text
    assert said.sentences[-1] == "Overall the target is missed: 0 of its 3 parts are met."


def test_tied_is_not_won() -> None:
    said = verdict(found(ours=70))
    assert not any(said.targets.values())
    text = "\n".join(said.sentences)
    assert "shares the best mean, which is not enough, with Local (difference +0.00, s.e. 0.00)." in text
    assert "it is level with FedAvg + extras (0 wins, 0 losses, 10 ties)" in text


@pytest.mark.parametrize(("losses", "met"), [(2, True), (3, False)])
@pytest.mark.parametrize("name", [*PLAIN, *CONTROLS])
@pytest.mark.parametrize("data", BENCHMARKS)
def test_eight_of_ten_are_needed_against_each(data: str, name: str, losses: int, met: bool) -> None:
    rows = with_losses(found(), data, name, losses)
    title = rows[data][name].method.title
    said = verdict(rows)
    plain = met or name in CONTROLS  # after local training the controls are no target
    assert list(said.targets.values()) == [True, met, plain]
    text = "\n".join(said.sentences)
    assert f"{10 - losses} against {title}" in text
    assert (f"missed (too few against {title} on {data})" in text) is not met


def test_control_above_at_one_point_misses_the_mean_and_not_the_wins() -> None:
    said = verdict(found(fedprox_plus=(70, 20)))
    assert list(said.targets.values()) == [False, True, True]
    text = "\n".join(said.sentences)
    assert "On digit5 before local training, FedC²I⁺ has the best mean; the next is" in text
    assert "does not have the best mean; above it is FedProx + extras (difference -9.00" in text
    assert said.sentences[-1] == "Overall the target is missed: 2 of its 3 parts are met."


def test_uncertain_standing_is_called_so() -> None:
    rows = with_losses(found(ours=70.1), "digit5", "fedavg-plus", 1)  # nine times +0.1, once -0.5
    text = "\n".join(verdict(rows).sentences)
    assert "above FedAvg + extras but within two standard errors (+0.04, s.e. 0.06; 9 wins, 1 losses, 0 ties)" in text


def test_preset_row_of_a_control_counts_and_that_of_ours_does_not() -> None:
    rows = found()
    own = {data: {**of, OURS + PRESET: found(ours=99)[data][OURS]} for data, of in rows.items()}
    assert verdict(own).targets["best mean"]
    above = found(fedavg_plus=(99, 1))
    said = verdict({data: {**of, "fedavg-plus preset": above[data]["fedavg-plus"]} for data, of in rows.items()})
    assert not said.targets["best mean"]
    assert "above it is FedAvg + extras preset" in said.sentences[0]


@pytest.mark.parametrize(("seeds", "enough"), [(1, "1 wins in 1 seed "), (3, "3 wins in 3 seeds"), (5, "4 wins in 5")])
def test_fewer_seeds_need_the_same_share(seeds: int, enough: str) -> None:
    said = verdict(found(seeds=seeds))
    assert all(said.targets.values())
    text = "\n".join(said.sentences)
    assert f"at least {enough}" in text
    assert ("in a single seed" in text) == (seeds == 1)
    assert "s.e." not in text or seeds > 1


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
    """In place of the cache: validation accuracies that depend on the setting, and on the seeds being for tuning."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, tuple[int, ...]]] = []

    def missing(self, plan: Any) -> list[int]:
        return list(plan.config.seeds)

    def compute(self, plan: Any, observer: Any = None) -> Result:
        self.asked.append((plan.config.data, plan.key, plan.config.seeds))
        own = 50 + plan.method.anchor + getattr(plan.method, "gamma", 0)
        for_tuning = min(plan.config.seeds) >= 100
        table = {s: [[100 - own] * len(plan.federation.names)] for s in plan.config.seeds}
        result = made_up(plan.federation, table, method=plan.method)
        for report in result.rounds:
            for metrics in report.metrics.values():
                metrics[0]["validation_accuracy"] = own if for_tuning else 100 - own
        return result


def test_choice_uses_tuning_seeds_only(data: Path, tmp_path: Path) -> None:
    grid, cache = Grid(namespace(data, tmp_path, seeds="0-2")), Inventing()
    grid._cache = cache  # type: ignore[assignment]
    work = Study(grid, BENCHMARKS, (100, 101))
    assert cache.asked == []
    work.tune()
    assert {seeds for _, _, seeds in cache.asked} == {(100, 101)}
    assert len(cache.asked) == 2 * (1 + 2 + 1 + 2)
    chosen = {key: (method.anchor, getattr(method, "gamma", None)) for key, method in work.chosen.items()}
    expected = {
        "fedavg-plus": (0.1, None),
        "fedprox-plus": (0.3, None),
        "fedrep-plus": (0.3, None),
        OURS: (0.3, 10.0),  # the worst of both by test accuracy, and by validation with the reported seeds
    }
    assert chosen == {(name, method): own for name in BENCHMARKS for method, own in expected.items()}
    cache.asked.clear()
    main, parts = work.report()
    assert {seeds for _, _, seeds in cache.asked} == {(0, 1, 2)}
    rows = [*UNTUNED, "fedavg-plus", "fedprox-plus preset", "fedprox-plus", "fedrep-plus preset", "fedrep-plus"]
    assert list(main["digit5"]) == list(main["office10"]) == [*rows, f"{OURS} preset", OURS]
    best = registry.get(OURS)(anchor=0.3, gamma=10.0)  # type: ignore[call-arg]
    for name, (option, value) in zip(list(parts["digit5"])[1:], PARTS.items(), strict=True):
        assert vars(parts["digit5"][name].method) == {**vars(best), option: value}


def test_runs_go_by_the_presets_and_score_the_last_round(data: Path, tmp_path: Path) -> None:
    work = Study(Grid(namespace(data, tmp_path, seeds="0-9")), BENCHMARKS, (100, 101, 102))
    plans = work._plans.values()
    assert {plan.config.evaluate_every for plan in plans} == {0}
    assert {(plan.config.data, plan.config.rounds) for plan in plans} == {("digit5", 20), ("office10", 40)}
    assert work.grid.warnings == []
    assert list(tmp_path.iterdir()) == []


# The command.

TRIAL = "trial-1-rounds"
TABLES = ("plus", "plus-paired", "plus-parts", "plus-tuning")
FILES = [f"{name}.{ending}" for name in TABLES for ending in ("md", "csv", "tex")]


def study(data: Path, out: Path, *more: str, seeds: str = "0,1", tuning: str = "7,8") -> Answer:
    settings = ("--rounds", "1", "--device", "cpu", "--seeds", seeds, "--tuning-seeds", tuning)
    return ask(plus.main, "--data-dir", str(data), "--out", str(out), *settings, *more)


@pytest.fixture(scope="module")
def finished(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Answer]:
    """The whole command; tests only read it, or ask for what is there already."""
    out = tmp_path_factory.mktemp("study") / "results"
    return out, study(data, out)


def test_everything_is_written_and_said(finished: tuple[Path, Answer]) -> None:
    out, answer = finished
    assert answer.code == 0, answer.err
    files, _, sentences = answer.out.partition("\n\n")
    assert files.splitlines() == [str(out / TRIAL / name) for name in FILES]
    assert {path.name for path in (out / TRIAL).iterdir()} == set(FILES)
    assert {path.name for path in out.iterdir()} == {TRIAL, "runs"}
    trial = "A trial on digit5 with 1 rounds, not the protocol's 20: it proves nothing."
    assert sentences.startswith(trial)
    text = (out / TRIAL / "plus-paired.md").read_text(encoding="utf-8")
    assert text.endswith("".join(f"- {sentence}\n" for sentence in sentences.splitlines()))
    assert all((out / TRIAL / f"{name}.md").read_text().count(trial) == 1 for name in TABLES[:3])
    assert not list(out.rglob("*.safetensors"))


def test_runs_are_those_needed_each_once(finished: tuple[Path, Answer]) -> None:
    names = [name.rpartition("-seed") for name in runs_below(finished[0])]
    tuning = {(name, seed) for name, _, seed in names if seed in ("7", "8")}
    grids = ["fedavg-plus", "fedprox-plus", "fedprox-plus-anchor=0.3", "fedrep-plus-anchor=0.3"]
    grids += ["fedc2i-plus-gamma=2.0-anchor=0.3", "fedc2i-plus-gamma=10.0-anchor=0.3"]
    assert tuning == {(f"{data}-{name}", seed) for data in BENCHMARKS for name in grids for seed in "78"}
    assert {seed for _, _, seed in names} == {"0", "1", "7", "8"}


def chosen_gamma(out: Path, data: str) -> int:
    rows = read_csv(out / TRIAL / "plus-tuning.csv")[4:]
    return next(gamma for row, gamma in zip(rows, (2, 10), strict=True) if row[f"{data} choice"])


def test_chosen_is_what_validation_says(finished: tuple[Path, Answer]) -> None:
    out, _ = finished
    rows = read_csv(out / TRIAL / "plus-tuning.csv")
    titles = ["FedAvg + extras", *["FedProx + extras"] * 2, "FedRep + extras", *["FedC²I⁺"] * 2]
    assert [row["Method"] for row in rows] == titles
    for data in BENCHMARKS:
        means = []
        for row, gamma in zip(rows[4:], ("2.0", "10.0"), strict=True):
            run = f"{data}-fedc2i-plus-gamma={gamma}-anchor=0.3"
            by_seed = [np.mean([metric(out, run, s, p, "validation_accuracy") for p in POINTS]) for s in (7, 8)]
            assert float(row[f"{data} both"]) == pytest.approx(np.mean(by_seed), abs=0.0051)
            assert float(row[f"{data} both sd"]) == pytest.approx(np.std(by_seed, ddof=1), abs=0.0051)
            means.append(round(float(np.mean(by_seed)), 6))
        assert chosen_gamma(out, data) == (2, 10)[means.index(max(means))]


def test_main_table(finished: tuple[Path, Answer]) -> None:
    out, _ = finished
    rows = read_csv(out / TRIAL / "plus.csv")
    labels = [row["Method"] for row in rows[::2]]
    assert labels[:6] == ["Local", "FedAvg", "FedProx", "FedRep", "FedC²I", "FedAvg + extras (anchor=0.1)"]
    assert labels[-4:-1] == [
        "FedRep + extras preset (anchor=0.1)",
        "FedRep + extras (anchor=0.3)",
        "FedC²I⁺ preset (anchor=0.1, gamma=5)",
    ]
    assert all(f"anchor=0.3, gamma={chosen_gamma(out, data)}" in labels[-1] for data in BENCHMARKS)
    assert [row["Local training"].removesuffix(" *") for row in rows] == ["before", "after"] * len(labels)
    values = [metric(out, "office10-fedavg", seed, "trained", "accuracy") for seed in (0, 1)]
    assert float(rows[3]["office10 Avg"]) == pytest.approx(np.mean(values), abs=0.0051)
    assert float(rows[3]["office10 Avg sd"]) == pytest.approx(np.std(values, ddof=1), abs=0.0051)
    columns = [f"{column}{sd}" for column in ("digit5 Avg", "digit5 Avg-4", "office10 Avg") for sd in ("", " sd")]
    assert set(rows[0]) == {"Method", "Local training", *columns}
    text = (out / TRIAL / "plus.md").read_text(encoding="utf-8")
    assert "with seeds 7, 8, which are not reported" in text
    assert "FedProx + extras 2, FedRep + extras 1, FedC²I⁺ 2" in text


@pytest.mark.parametrize("table", ["plus-paired", "plus-parts"])
def test_differences_are_those_of_the_runs(finished: tuple[Path, Answer], table: str) -> None:
    out, _ = finished
    ours = f"office10-fedc2i-plus-gamma={float(chosen_gamma(out, 'office10'))}-anchor=0.3"
    parts = ("with average=false", f"{ours}-average=false")
    named, other = ("FedAvg", "office10-fedavg") if table == "plus-paired" else parts
    rows = read_csv(out / TRIAL / f"{table}.csv")
    (row,) = [row for row in rows if row[next(iter(row))] == named and row["Local training"].startswith("after")]
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
    monkeypatch.setattr("fedc2i.runs.driver.simulate", None)
    again = study(data, out)
    assert (again.code, again.out) == (0, answer.out)
    assert again.err == f"Tables go to {out / TRIAL}; 0 runs to compute\n" * 2
    assert files_below(out) == before


def test_one_benchmark_with_presets_alone(data: Path, tmp_path: Path) -> None:
    """For those who have the data of one only; nothing of the other is needed, and no target is decided."""
    out = tmp_path / "results"
    shutil.copytree(data / "office10", tmp_path / "data" / "office10")
    answer = study(tmp_path / "data", out, "--no-tuning", "--benchmarks", "office10", seeds="0", tuning="0")
    assert answer.code == 0, answer.err
    assert "; 13 runs to compute" in answer.err
    assert "Without digit5 no target is decided: all need digit5 and office10." in answer.out
    assert "Target" not in answer.out
    assert not (out / TRIAL).exists()  # nothing replaces the tables of both
    folder = out / "only-office10" / TRIAL
    assert {path.name for path in folder.iterdir()} == {name for name in FILES if "tuning" not in name}
    assert "digit5 Avg" not in (folder / "plus-paired.md").read_text(encoding="utf-8")
    assert {row["office10 standard error"] for row in read_csv(folder / "plus-paired.csv")} == {""}
    text = (folder / "plus.md").read_text(encoding="utf-8")
    assert "| FedC²I⁺ (anchor=0.1, gamma=5) |" in text
    assert "preset (" not in text
    assert "No setting was chosen (--no-tuning)" in text


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--seeds", "0-9", "--tuning-seeds", "9-11"), "seed 9 is in --seeds and in --tuning-seeds"),
        (("--tuning-seeds", "x"), "seeds must be whole numbers"),
        (("--seeds", "0,0"), "seeds must be different"),
        (("--rounds", "many"), "rounds"),
        (("--device", "tpu"), "device"),
        (("--data-dir", "/nowhere"), "/nowhere: no such folder"),
        (("--benchmarks", "mnist"), "invalid choice"),
        (("--anchor", "1"), "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_mistakes_are_found_before_anything_is_written(
    data: Path, tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    where = () if "--data-dir" in arguments else ("--data-dir", str(data))
    answer = ask(plus.main, "--out", str(tmp_path / "results"), *where, *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert said in answer.err
    assert not (tmp_path / "results").exists()


def test_tuning_needs_validation_data(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(office10, "VALIDATION_PER_CLASS", 0)
    given = namespace(data, tmp_path, seeds="0")
    with pytest.raises(UserError, match="office10: no client has validation data to choose by; --no-tuning"):
        Study(Grid(given), BENCHMARKS, (7,))
    Study(Grid(given), BENCHMARKS, ())
