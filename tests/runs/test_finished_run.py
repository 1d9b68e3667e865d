"""A run read back from its folder: the same tables and figures, without data and models; damage is a line."""

from __future__ import annotations

import io
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
from fedc2i.runs import results, stored_rounds
from fedc2i.runs.cache import RunCache
from fedc2i.runs.driver import execute
from fedc2i.runs.finished_run import read_run, reopen
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import summary
from fedc2i.runs.stored_rounds import Extent, read_rounds
from support.helpers import is_drawn

SEEDS = (0, 3)
EXTENT = Extent(("a", "b", "c"), 10, 5)
SCORES = ("accuracy", "loss", "validation_accuracy")
QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "executor": "looped"}


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
    settings: dict[str, Any] = {**QUICK, "rounds": 5, "seeds": SEEDS, "evaluate_every": 2, "gamma": "ramp(3)"}
    return folder, run("fedc2i", federation, model=make_model(), out=folder, **settings)


@pytest.fixture
def folder(finished: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(finished[0], tmp_path / "copy", ignore=shutil.ignore_patterns("*.png", "models")))


def change(path: Path, **entries: Any) -> None:
    """Other entries in a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def refusal(folder: Path) -> str:
    """The one line that `read_run` says of a folder."""
    with pytest.raises(UserError) as refused:
        read_run(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_samples_of_each_class_are_read_back(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    counts = read_run(folder).federation.class_counts()
    assert counts == was.federation.class_counts()
    assert {name: sum(own) for name, own in counts.items()} == {"a": 12, "b": 9, "c": 7}


def test_damaged_samples_of_each_class_are_refused(folder: Path) -> None:
    counts = json.loads((folder / "summary.json").read_text())["class_counts"]
    for bad in ({"a": [-1, *counts["a"][1:]]}, {"a": counts["a"][1:]}, {"a": "many"}, {"z": counts["a"]}):
        change(folder / "summary.json", class_counts={**counts, **bad})
        assert "samples of each class" in refusal(folder)
    change(folder / "summary.json", class_counts={"a": counts["a"]})
    assert "of some clients only" in refusal(folder)


def test_numbers_are_the_same(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    again = read_run(str(folder))
    for point in POINTS:
        for metric in SCORES:
            np.testing.assert_allclose(again.accuracy(point, metric), was.accuracy(point, metric), atol=1e-6)
            assert set(again.scores(point, metric)) == {"a", "b", "c", "Avg", "First two", "Worst"}
            for name, score in was.scores(point, metric).items():
                assert again.scores(point, metric)[name].mean == pytest.approx(score.mean, abs=1e-6)
                assert again.scores(point, metric)[name].sd == pytest.approx(score.sd, abs=1e-6)
            for got, want in zip(again.curve(point, metric), was.curve(point, metric), strict=True):
                np.testing.assert_allclose(got, want, atol=1e-6)
    assert again.curve("trained")[0].tolist() == [2, 4, 5]
    for name in ("influence_vector", "influence_matrix", "client_losses"):
        for seed in SEEDS:
            assert was.influence(name, seed).shape[:3] == (5, 3, 3)
            np.testing.assert_array_equal(again.influence(name, seed), was.influence(name, seed))  # to the bit


def test_it_says_what_was_run(finished: tuple[Path, Result]) -> None:
    folder, was = finished
    again = read_run(folder)
    assert (again.label, again.key) == ("FedC²I (gamma=ramp(3))", "fedc2i:gamma=ramp(3)") == (was.label, was.key)
    assert (again.method, again.config, again.model) == (was.method, was.config, was.model)
    assert isinstance(again.federation, RemoteFederation)
    for name in ("names", "classes", "all_notes", "averages", "checksums"):
        assert getattr(again.federation, name) == getattr(was.federation, name)
    assert again.federation.samples() == was.federation.samples()
    assert [(own.seed, own.round) for own in again.rounds] == [(own.seed, own.round) for own in was.rounds]
    assert again.seconds == pytest.approx(was.seconds, abs=1e-3)
    assert summary(again) == json.loads((folder / "summary.json").read_text())


@pytest.mark.usefixtures("with_figures")
def test_tables_and_figures_can_be_made_of_it(finished: tuple[Path, Result], tmp_path: Path) -> None:
    again = read_run(finished[0])
    figures.draw_run(again, tmp_path)
    found = sorted(path.name for path in tmp_path.iterdir())
    assert found == ["accuracy.png", "influence.png", "influence_classes.png"]
    assert is_drawn(tmp_path / "accuracy.png")
    write_comparison([again], tmp_path)


def test_seeds_that_stopped_early_keep_their_own_length(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    settings: dict[str, Any] = {**QUICK, "rounds": 12, "lr": 0.02, "seeds": (0, 1, 2), "patience": 1}
    (planned,) = prepare(["fedc2i"], settings, make_federation((12, 9, 7), validation=4), model)
    was = execute(planned, tmp_path / "run")
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
        read_rounds(folder, EXTENT, [0])


def test_a_number_that_was_not_finite_is_nan(folder: Path) -> None:
    text = (folder / "metrics.jsonl").read_text().splitlines()
    last = json.loads(text[-1])
    (folder / "metrics.jsonl").write_text("\n".join([*text[:-1], json.dumps({**last, "value": None})]))
    assert np.isnan(read_run(folder).rounds[-1].metrics[last["point"]][2][last["metric"]])


def test_large_diagnostics_are_kept_of_the_last_round_and_found_again(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a thousand clients, whose Λ is 40 MB a round: here what is more than a hundred bytes is large."""
    for module in (records, results, stored_rounds):
        monkeypatch.setattr(module, "LARGE", 100)
    settings: dict[str, Any] = {**QUICK, "rounds": 3, "model": model}
    result = run("fedc2i", make_federation((9, 7, 8)), out=tmp_path / "run", **settings)
    monkeypatch.setattr(records, "LARGE", 10**9)
    whole = run("fedc2i", make_federation((9, 7, 8)), **settings)
    for own in (result, read_run(tmp_path / "run")):
        last = whole.rounds[-1].influence["influence_matrix"]
        np.testing.assert_array_equal(own.influence("influence_matrix"), last[None])
        np.testing.assert_array_equal(own.influence(), whole.influence())
        assert ["influence_matrix" in report.influence for report in own.rounds] == [False, False, True]


# Uploads that were rejected.


@pytest.mark.parametrize(("attack", "silent"), [("nan@100%", (0, 3)), ("nan@b", ())])
def test_uploads_that_were_rejected_are_known_again(
    tmp_path: Path, federation: Federation, model: Model, attack: str, silent: tuple[int, ...]
) -> None:
    """With their reasons, and that nobody learned from anyone; of each seed alone and out of a cache, too."""
    settings = {**QUICK, "rounds": 2, "seeds": SEEDS, "attack": attack}
    (planned,) = prepare(["fedavg"], settings, federation, model)
    result = execute(planned, tmp_path / "run")
    assert result.unheard == silent
    cached = RunCache(tmp_path / "cache", models=False).compute(planned)
    for got in (read_run(tmp_path / "run"), cached):
        assert got.unheard == silent
        assert [own.only(3).unheard for own in (got, result)] == [silent[1:]] * 2
        assert got.refused == result.refused != {}
        assert [own.why for own in got.rounds] == [own.why for own in result.rounds]
        assert comparison_table([got]).notes == comparison_table([result]).notes


def test_a_folder_that_does_not_say_how_many_took_part(folder: Path) -> None:
    """As an earlier version wrote it."""
    change(folder / "summary.json", refused=[{"seed": 0, "round": 2, "clients": ["a", "b", "c"]}])
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

        (planned,) = prepare([Mine(strength=2.0)], QUICK, federation, model)
        execute(planned, tmp_path / "run")
    result = read_run(tmp_path / "run")
    assert (result.label, result.key) == ("My method (strength=2.0)", "mine:strength=2.0")
    assert result.config.options["strength"] == 2.0
    assert result.influence().size == 0  # it has no influence.npz
    assert "My method" in comparison_table([result]).to_markdown()
    with pytest.raises(UserError, match="its method 'mine' was an object of Python"):
        reopen(tmp_path / "run")
    path = tmp_path / "run" / "config.toml"
    path.write_text(path.read_text().replace('method = "mine"', 'method = "nime"'))
    with pytest.raises(UserError, match="unknown method 'nime'"):
        read_run(tmp_path / "run")


# What cannot be read.


@pytest.mark.parametrize(
    ("where", "said"),
    [(".", r"not the folder of a finished run; it has no summary\.json"), ("nowhere", "no such folder")],
)
def test_another_folder_is_named(tmp_path: Path, where: str, said: str) -> None:
    with pytest.raises(UserError, match=f": {said}$"):
        read_run(tmp_path / where)


@pytest.mark.parametrize("name", ["summary.json", "config.toml", "metrics.jsonl", "influence.npz"])
@pytest.mark.parametrize(
    "content", [b"", b"[1, 2]", b"{}", b"\xff\xfe\x00", b"PK\x03\x04zip", b'{"a": [', b"1\n2\n", "cut", None]
)
def test_a_damaged_file_is_a_line(folder: Path, name: str, content: bytes | str | None) -> None:
    path = folder / name
    if content is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40] if isinstance(content, str) else content)
    if content is None and name == "influence.npz":  # as of a method that measures none
        assert read_run(folder).influence().size == 0
    else:
        assert str(folder) in refusal(folder)


@pytest.mark.parametrize(
    "changed",
    [
        {"clients": ["a"]},
        {"clients": []},
        {"clients": None},
        {"samples": 3},
        {"classes": None},
        {"averages": 3},
        {"averages": {"x": 3}},
        {"notes": None},
        {"model": 3},
        {"seconds_per_round": "long"},
        {"seconds_per_round": None},
        {"bytes_up_per_client_round": "many"},
        {"data_checksums": 1},
        {"refused": [3]},
        {"refused": [{"seed": 0}]},
        {"refused": [{"seed": 0, "round": 1, "clients": ["z"]}]},
        {"refused": [{"seed": 0, "round": 1, "clients": "a"}]},
        {"refused": [{"seed": 0, "round": 1, "clients": ["a"], "why": 3}]},
        {"refused": [{"seed": 0, "round": 1, "clients": ["a"], "why": {"a": 3}}]},
    ],
    ids=str,
)
def test_a_summary_of_something_else_is_a_line(folder: Path, changed: dict[str, Any]) -> None:
    change(folder / "summary.json", **changed)
    refusal(folder)


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content.replace(old, new)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: content.index(b'"round": 5')],
        lambda content: b"\n".join(content.split(b"\n")[:-9]) + b"\n",
        replaced(b'"client": "b"', b'"client": "q"'),
        replaced(b'"trained"', b'"tested"'),
        replaced(b'"value": ', b'"value": "x", "was": '),
    ],
    ids=["no last round", "no last client", "another client", "another point", "text for numbers"],
)
def test_metrics_of_another_run_are_a_line(folder: Path, damage: Callable[[bytes], bytes]) -> None:
    path = folder / "metrics.jsonl"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r": not a complete run \(.+\); remove it and run again$"):
        read_rounds(folder, EXTENT, SEEDS[-1:])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_without_metrics_is_named(folder: Path, seed: int) -> None:
    path = folder / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["seed"] != seed]
    path.write_text("".join(kept))
    assert f": not a complete run (metrics.jsonl lacks seed {seed}); remove it and run again" in refusal(folder)


@pytest.mark.parametrize("rounds", ["5", 6, 0])
def test_a_complete_run_has_the_rounds_that_its_summary_says(folder: Path, rounds: Any) -> None:
    change(folder / "summary.json", rounds=rounds)
    with pytest.raises(UserError, match=": not a complete run "):
        read_rounds(folder, EXTENT, [0])


ENTRY = {"seed": 0, "round": 1, "client": "a", "point": "received", "metric": "loss", "value": 1.0}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("3", ".+"),
        ("{}", ".+"),
        ('{"seed": 0}', ".+"),
        ("nonsense", ".+"),
        (json.dumps({**ENTRY, "client": "z"}), "no client or point 'z', 'received'"),
        (json.dumps({**ENTRY, "point": "never"}), "no client or point 'a', 'never'"),
    ],
)
def test_a_line_of_metrics_of_something_else_is_named(folder: Path, line: str, words: str) -> None:
    path = folder / "metrics.jsonl"
    number = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write(f"{line}\n")
    said = rf": not a complete run \(metrics\.jsonl, line {number}: {words}\); remove it and run again$"
    with pytest.raises(UserError, match=said):
        read_run(folder)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def test_influence_of_something_else_is_a_line_and_never_unpickled(folder: Path, tmp_path: Path) -> None:
    path, sprung = folder / "influence.npz", tmp_path / "sprung"
    whole, trap = path.read_bytes(), np.array([Trap(sprung)], dtype=object)
    middle = len(whole) // 2
    for content in (
        whole[:middle] + bytes(255 - byte for byte in whole[middle : middle + 40]) + whole[middle + 40 :],
        archive(seed0_influence_vector=np.ones((3, 3, 3))),  # fewer rounds than were scored
        archive(seed0_influence_vector=np.array(1.0)),
        archive(seed0_influence_vector=trap),
        trap.dumps(),
    ):
        path.write_bytes(content)
        assert "not a complete run" in refusal(folder)
    assert not sprung.exists()
    np.load(io.BytesIO(archive(trap=trap)), allow_pickle=True)["trap"]
    assert sprung.exists()  # the trap works
