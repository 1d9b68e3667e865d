"""A run read back from its folder: the same tables and figures, without data and models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i import Federation, Model, Result, UserError, run
from fedc2i.data.remote import RemoteFederation
from fedc2i.engine import records
from fedc2i.engine.records import POINTS
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.report import figures
from fedc2i.report.comparison import comparison_table, write_comparison
from fedc2i.runs import finished_run, results
from fedc2i.runs.cache import RunCache
from fedc2i.runs.driver import execute
from fedc2i.runs.finished_run import read_rounds, read_run, reopen
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import summary
from support.helpers import is_drawn

SEEDS = (0, 3)
SCORES = ("accuracy", "loss", "validation_accuracy")


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    make_federation: Callable[..., Federation],
    make_model: Callable[..., Model],
) -> tuple[Path, Result]:
    """FedC²I with an option and two seeds; only every other round is scored."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    federation = replace(
        make_federation((12, 9, 7), validation=4), averages={"First two": ("a", "b")}, notes=("made up", "ä")
    )
    settings: dict[str, Any] = {"rounds": 5, "epochs": 1, "seeds": SEEDS, "evaluate_every": 2, "gamma": "ramp(3)"}
    result = run("fedc2i", federation, model=make_model(), out=folder, executor="looped", **settings)
    return folder, result


@pytest.fixture
def folder(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy", ignore=shutil.ignore_patterns("*.png", "models")))


def test_scores_are_the_same(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    again = read_run(str(folder))
    for point in POINTS:
        for metric in SCORES:
            np.testing.assert_allclose(again.accuracy(point, metric), was.accuracy(point, metric), atol=1e-6)
            assert set(again.scores(point, metric)) == {"a", "b", "c", "Avg", "First two"}
            for name, score in was.scores(point, metric).items():
                assert again.scores(point, metric)[name].mean == pytest.approx(score.mean, abs=1e-6)
                assert again.scores(point, metric)[name].sd == pytest.approx(score.sd, abs=1e-6)
            for got, want in zip(again.curve(point, metric), was.curve(point, metric), strict=True):
                np.testing.assert_allclose(got, want, atol=1e-6)
    assert again.curve("trained")[0].tolist() == [2, 4, 5]


def test_influence_is_the_same_to_the_bit(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    again = read_run(folder)
    for name in ("influence_vector", "influence_matrix", "client_losses"):
        for seed in SEEDS:
            assert was.influence(name, seed).shape[:3] == (5, 3, 3)
            np.testing.assert_array_equal(again.influence(name, seed), was.influence(name, seed))


def test_it_says_what_was_run(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    again = read_run(folder)
    assert (again.label, again.key) == ("FedC²I (gamma=ramp(3))", "fedc2i:gamma=ramp(3)") == (was.label, was.key)
    assert again.method == was.method
    assert again.config == was.config
    assert isinstance(again.federation, RemoteFederation)
    for name in ("names", "classes", "notes", "averages", "checksums"):
        assert getattr(again.federation, name) == getattr(was.federation, name)
    assert again.federation.samples() == was.federation.samples()
    assert [(own.seed, own.round) for own in again.rounds] == [(own.seed, own.round) for own in was.rounds]
    assert again.seconds == pytest.approx(was.seconds, abs=1e-3)


def test_its_summary_is_the_one_that_was_written(finished: tuple[Path, Result]) -> None:
    folder, _ = finished
    written, got = json.loads((folder / "summary.json").read_text()), json.loads(json.dumps(summary(read_run(folder))))
    for part in ("seconds", "seconds_per_round"):
        assert got.pop(part) == pytest.approx(written.pop(part), abs=1e-3)
    points = written.pop("points")
    for point, metrics in got.pop("points").items():
        for metric, scores in metrics.items():
            for name, score in scores.items():
                assert score == pytest.approx(points[point][metric][name], abs=1e-6)
    assert got == written


def test_tables_and_figures_can_be_made_of_it(finished: tuple[Path, Result], tmp_path: Path) -> None:
    again = read_run(finished[0])
    figures.draw_run(again, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "accuracy.png",
        "influence.png",
        "influence_classes.png",
    ]
    assert is_drawn(tmp_path / "accuracy.png")
    write_comparison([again], tmp_path)


def test_seeds_that_stopped_early_keep_their_own_length(
    tmp_path: Path, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation = make_federation((12, 9, 7), validation=4)
    settings: dict[str, Any] = {"rounds": 12, "epochs": 1, "lr": 0.02, "seeds": (0, 1, 2), "patience": 1}
    was = execute(
        prepare(["fedc2i"], {**settings, "executor": "looped"}, federation, make_model())[0], tmp_path / "run"
    )
    again = read_run(tmp_path / "run")
    lengths = {seed: was.last(seed).round for seed in was.config.seeds}
    assert len(set(lengths.values())) > 1, "seeds are to be chosen so that they stop at different rounds"
    assert max(lengths.values()) < 12
    assert {seed: again.last(seed).round for seed in lengths} == lengths
    for seed in lengths:
        np.testing.assert_array_equal(again.influence(seed=seed), was.influence(seed=seed))
    np.testing.assert_allclose(again.accuracy("trained"), was.accuracy("trained"), atol=1e-6)


def test_a_client_that_was_not_scored_at_the_end_has_no_score(folder: Path) -> None:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [line for line in lines if (line["client"], line["round"], line["seed"]) != ("b", 5, 0)]
    assert len(kept) < len(lines)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert np.isnan(read_run(folder).accuracy("trained")).tolist() == [[False, True, False], [False] * 3]
    with pytest.raises(UserError, match=r"lacks clients of the last round"):
        read_rounds(folder, ("a", "b", "c"), 0)


def test_a_number_that_was_not_finite_is_nan(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(text[-1])
    (folder / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps({**last, "value": None})]))
    assert np.isnan(read_run(folder).rounds[-1].metrics[last["point"]][2][last["metric"]])


def test_a_method_without_diagnostics_is_read_back(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    settings = {"rounds": 1, "epochs": 1, "executor": "looped"}
    was = execute(prepare(["fedavg"], settings, federation, make_model())[0], tmp_path / "run")
    again = read_run(tmp_path / "run")
    assert not (tmp_path / "run" / "influence.npz").exists()
    assert again.influence().size == 0
    np.testing.assert_allclose(again.accuracy("received"), was.accuracy("received"), atol=1e-6)


# What cannot be read.


@pytest.mark.parametrize("where", [".", "nowhere"])
def test_another_folder_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(UserError, match=r": not the folder of a finished run; it has no summary\.json$"):
        read_run(tmp_path / where)


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "metrics.jsonl", "influence.npz"])
@pytest.mark.parametrize("content", [b"", b"[1, 2]", b"{}", b"\xff\xfe\x00", b"PK\x03\x04zip", b'{"a": [', "cut"])
def test_a_damaged_file_is_a_line(folder: Path, name: str, content: bytes | str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[:-40] if isinstance(content, str) else content)
    with pytest.raises(UserError) as refused:
        read_run(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl"])
def test_a_missing_file_is_a_line(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(UserError, match=rf"{name}(: cannot be read| *'?\); remove it)") as refused:
        read_run(folder)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "change",
    [
        {"clients": ["a"]},
        {"clients": []},
        {"clients": None},
        {"samples": 3},
        {"classes": None},
        {"averages": 3},
        {"averages": {"x": 3}},
        {"notes": None},
        {"seconds_per_round": "long"},
        {"data_checksums": 1},
    ],
    ids=str,
)
def test_a_summary_of_something_else_is_a_line(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(UserError) as refused:
        read_run(folder)
    assert "\n" not in str(refused.value)


ENTRY = {"seed": 0, "round": 1, "client": "a", "point": "received", "metric": "loss", "value": 1.0}


def test_a_stranger_in_the_metrics_is_named(folder: Path) -> None:
    path = folder / "metrics.jsonl"
    whole = path.read_text()
    for change, said in (({"client": "z"}, "'z', 'received'"), ({"point": "never"}, "'a', 'never'")):
        path.write_text(f"{whole}{json.dumps({**ENTRY, **change})}\n")
        with pytest.raises(UserError, match=f"no client or point {said}"):
            read_run(folder)


@pytest.mark.parametrize("line", ["3", "{}", '{"seed": 0}', '{"seed": 0, "round": 1, "client": "z"}', "nonsense"])
def test_a_line_of_metrics_of_something_else_is_a_line(folder: Path, line: str) -> None:
    path = folder / "metrics.jsonl"
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write(f"{line}\n")
    said = rf": not a complete run \(metrics\.jsonl, line {number}: .+\); remove it and run again$"
    with pytest.raises(UserError, match=said):
        read_run(folder)


def test_fewer_rounds_of_influence_than_of_scores_is_a_line(folder: Path) -> None:
    with np.load(folder / "influence.npz") as archive:
        arrays = {name: archive[name][:3] for name in archive.files}
    np.savez(folder / "influence.npz", **arrays)
    with pytest.raises(UserError, match="not a complete run"):
        read_run(folder)


def test_large_diagnostics_are_kept_of_the_last_round_and_found_again(
    tmp_path: Path,
    make_federation: Callable[..., Federation],
    make_model: Callable[..., Model],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a thousand clients, whose Λ is 40 MB a round: here what is more than a hundred bytes is large."""
    for module in (records, results, finished_run):
        monkeypatch.setattr(module, "LARGE", 100)
    settings: dict[str, Any] = {"rounds": 3, "epochs": 1, "executor": "looped"}
    result = run("fedc2i", make_federation((9, 7, 8)), model=make_model(), out=tmp_path / "run", **settings)
    monkeypatch.setattr(records, "LARGE", 10**9)
    whole = run("fedc2i", make_federation((9, 7, 8)), model=make_model(), **settings)
    again = read_run(tmp_path / "run")
    for own in (result, again):
        np.testing.assert_array_equal(
            own.influence("influence_matrix"), whole.rounds[-1].influence["influence_matrix"][None]
        )
        np.testing.assert_array_equal(own.influence(), whole.influence())
        assert ["influence_matrix" in report.influence for report in own.rounds] == [False, False, True]


# Uploads that were left out.


@pytest.mark.parametrize(("attack", "silent"), [("nan@100%", (0, 3)), ("nan@b", ())])
def test_uploads_that_were_left_out_are_known_again(
    tmp_path: Path, federation: Federation, model: Model, attack: str, silent: tuple[int, ...]
) -> None:
    """With their reasons, and that nobody learned from anyone; of each seed alone and out of a store, too."""
    settings: dict[str, Any] = {"rounds": 2, "epochs": 1, "seeds": SEEDS, "attack": attack, "executor": "looped"}
    (planned,) = prepare(["fedavg"], settings, federation, model)
    result = execute(planned, tmp_path / "run")
    assert result.unheard == silent
    stored = RunCache(tmp_path / "store", models=False).compute(planned)
    for got in (read_run(tmp_path / "run"), stored):
        assert got.unheard == silent
        assert [own.only(3).unheard for own in (got, result)] == [silent[1:]] * 2
        assert got.refused == result.refused != {}
        assert [own.why for own in got.rounds] == [own.why for own in result.rounds]
        assert comparison_table([got]).notes == comparison_table([result]).notes


@pytest.mark.parametrize(
    "entry",
    [
        3,
        {"seed": 0},
        {"seed": 0, "round": 1, "clients": ["z"]},
        {"seed": 0, "round": 1, "clients": "a"},
        {"seed": 0, "round": 1, "clients": ["a"], "why": 3},
        {"seed": 0, "round": 1, "clients": ["a"], "why": {"a": 3}},
    ],
    ids=str,
)
def test_odd_entries_of_what_was_left_out_are_a_line(folder: Path, entry: Any) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "refused": [entry]}))
    with pytest.raises(UserError, match=r": not a complete run \(.+\); remove it and run again$"):
        read_run(folder)


def test_a_folder_that_does_not_say_how_many_took_part(folder: Path) -> None:
    """As an earlier version wrote it."""
    path = folder / "summary.json"
    entry = {"seed": 0, "round": 2, "clients": ["a", "b", "c"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "refused": [entry]}))
    result = read_run(folder)
    assert result.refused == {"a": 1, "b": 1, "c": 1}
    assert result.unheard == ()


# A method of one's own.


def test_a_run_of_a_method_made_in_another_process_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Where its class is not known, only what was written of it; nothing is executed."""
    with monkeypatch.context() as other:
        other.setattr(Method, "registry", dict(Method.registry))

        @dataclass(frozen=True)
        class Mine(FedAvg):
            name = "mine"
            title = "My method"
            strength: float = 1.0

        (planned,) = prepare([Mine(strength=2.0)], {"rounds": 1, "epochs": 1}, federation, model)
        execute(planned, tmp_path / "run")
    result = read_run(tmp_path / "run")
    assert (result.label, result.key) == ("My method (strength=2.0)", "mine:strength=2.0")
    assert result.config.options["strength"] == 2.0
    assert "My method" in comparison_table([result]).to_markdown()
    with pytest.raises(UserError) as refused:
        reopen(tmp_path / "run")
    assert "its method 'mine' was an object of Python" in str(refused.value)
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('method = "mine"', 'method = "nime"'))
    with pytest.raises(UserError, match="unknown method 'nime'"):
        read_run(tmp_path / "run")
