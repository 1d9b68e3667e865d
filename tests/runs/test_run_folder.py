"""The run folder: what lies in it, that every file is whole or absent, and the reports of finished rounds."""

from __future__ import annotations

import errno
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedc2i import Federation, Model, Result, UserError, compare, read_model, run
from fedc2i.core import files
from fedc2i.core.files import to_json, write_atomically
from fedc2i.engine.records import POINTS, Round
from fedc2i.models.model import scale
from fedc2i.models.networks import LeNet
from fedc2i.runs import folder
from fedc2i.runs.folder import ask, asked, claimed, new_folder, read_reports, slug, started, write_report
from support.helpers import figures_drawn, files_below, is_drawn

ROUNDS, SEEDS, CLIENTS, CLASSES = 2, (0, 3), 3, 4
QUICK: dict[str, Any] = {"model": "lenet5", "rounds": 1, "epochs": 1}


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, make_federation: Callable[..., Federation]
) -> tuple[Path, Result]:
    """A run of FedC²I with two seeds, and its folder."""
    folder = tmp_path_factory.mktemp("runs") / "deep" / "run"
    federation = make_federation((24, 30, 18), validation=4)
    federation = replace(federation, averages={"First two": ("a", "b")}, notes=("made up",))
    with figures_drawn():
        return folder, run("fedc2i", federation, out=folder, seeds=SEEDS, **{**QUICK, "rounds": ROUNDS})


@pytest.fixture(scope="module")
def summary(finished: tuple[Path, Result]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((finished[0] / "summary.json").read_text())
    return content


@pytest.fixture(scope="module")
def metrics(finished: tuple[Path, Result]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (finished[0] / "metrics.jsonl").read_text().splitlines()]


def test_models_that_are_the_same_memory_are_written_for_every_client(
    tmp_path: Path, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    """Stacked clients receive FedAvg's mean as views of one tensor."""
    out = tmp_path / "run"
    result = run("fedavg", make_federation(), model=make_model(), rounds=1, epochs=1, executor="stacked", out=out)
    for point in POINTS:
        found, models = load_file(out / "models" / f"seed0-{point}.safetensors"), getattr(result.outcomes[0], point)
        assert found.keys() == {f"{client}/{name}" for client in "abc" for name in models}
        for k, client in enumerate("abc"):
            assert all(torch.equal(found[f"{client}/{name}"], own[k].cpu()) for name, own in models.items())


def test_files(finished: tuple[Path, Result]) -> None:
    found = {name for name, content in files_below(finished[0]).items() if content is not None}
    pictures = {"accuracy.png", "influence.png", "influence_classes.png"}  # no images of one's own data
    models = {f"models/seed{seed}-{point}.safetensors" for seed in SEEDS for point in POINTS}
    assert found == {
        "config.toml",
        "metrics.jsonl",
        "influence.npz",
        "predictions.npz",
        "summary.json",
        *pictures,
        *models,
    }
    assert all(is_drawn(finished[0] / name) for name in pictures)


def test_metrics_have_one_line_for_everything_measured(metrics: list[dict[str, Any]]) -> None:
    assert {tuple(line) for line in metrics} == {("seed", "round", "client", "point", "metric", "value")}
    names = ("accuracy", "loss", "balanced_accuracy", "f1", "auroc", "calibration_error")
    names += ("validation_accuracy", "validation_loss")
    expected = Counter(
        (seed, number, client, point, metric)
        for seed in SEEDS
        for number in range(1, ROUNDS + 1)
        for client in "abc"
        for point in POINTS
        for metric in names
    )
    assert Counter(tuple(line.values())[:5] for line in metrics) == expected
    for line in metrics:
        assert 0 <= line["value"] <= (10 if "loss" in line["metric"] else 100)


def test_influence_of_every_round(finished: tuple[Path, Result]) -> None:
    with np.load(finished[0] / "influence.npz") as arrays:
        assert arrays["clients"].tolist() == ["a", "b", "c"]
        kinds = ("influence_vector", "influence_matrix", "client_losses", "class_losses", "left_out")
        assert set(arrays) == {"clients", *(f"seed{seed}_{kind}" for seed in SEEDS for kind in kinds)}
        for seed in SEEDS:
            vectors, matrices = arrays[f"seed{seed}_influence_vector"], arrays[f"seed{seed}_influence_matrix"]
            assert vectors.shape == (ROUNDS, CLIENTS, CLIENTS)
            assert matrices.shape == (ROUNDS, CLIENTS, CLIENTS, CLASSES)
            np.testing.assert_allclose(vectors.sum(2), 1, atol=1e-6)
            np.testing.assert_allclose(matrices.sum(2), 1, atol=1e-6)
            assert (vectors > 0).all()
        assert not np.array_equal(arrays["seed0_influence_vector"], arrays["seed3_influence_vector"])


def test_summary_agrees_with_the_metrics(summary: dict[str, Any], metrics: list[dict[str, Any]]) -> None:
    for point in POINTS:
        for metric in ("accuracy", "loss", "validation_accuracy"):
            last = {
                (line["seed"], line["client"]): line["value"]
                for line in metrics
                if (line["round"], line["point"], line["metric"]) == (ROUNDS, point, metric)
            }
            groups = {**{client: (client,) for client in "abc"}, "Avg": tuple("abc"), "First two": ("a", "b")}
            assert set(summary["points"][point][metric]) == {*groups, "Worst"}
            for title, members in groups.items():
                by_seed = [np.mean([last[seed, client] for client in members]) for seed in SEEDS]
                score = summary["points"][point][metric][title]
                assert score["mean"] == pytest.approx(np.mean(by_seed), abs=1e-5)
                assert score["sd"] == pytest.approx(abs(by_seed[0] - by_seed[1]) / 2**0.5, abs=1e-5)  # ddof = 1


def test_summary_says_what_was_run(summary: dict[str, Any], finished: tuple[Path, Result]) -> None:
    wanted = {
        **{"method": "fedc2i", "title": "FedC²I", "model": "lenet5", "data": "toy", "clients": list("abc")},
        **{"classes": list("wxyz"), "seeds": list(SEEDS), "rounds": ROUNDS, "headline": "trained"},
        **{"refused": [], "data_checksums": finished[1].federation.checksums},
        "notes": ["made up", "Neither training nor test samples of classes that others have: a (z)."],
    }
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["device"] in ("cpu", "cuda")
    assert all(len(digest) == 64 for digest in summary["data_checksums"].values())
    assert summary["versions"]["torch"] == version("torch")
    assert {"python", "fedc2i", "numpy"} <= set(summary["versions"])
    assert 0 < summary["seconds_per_round"] < summary["seconds"]
    up = summary["bytes_up_per_client_round"]
    assert summary["bytes_down_per_client_round"] == CLIENTS * (up + 1) > 0  # a model and a flag from each


# Models.


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_models_load_into_a_plain_module_and_score_as_recorded(
    finished: tuple[Path, Result], metrics: list[dict[str, Any]], seed: int, point: Any
) -> None:
    folder, result = finished
    for number, client in enumerate(result.federation.clients):
        net = LeNet((6, 16), (120, 84), CLASSES, (3, 16, 16))
        read = read_model(folder, client.name, seed, point)
        kept = getattr(result.outcomes[seed], point)
        assert all(torch.equal(read[name], rows[number].cpu()) for name, rows in kept.items())
        net.load_state_dict(read)
        with torch.no_grad():
            right = net(scale(client.test.x, torch.float32)).argmax(1) == client.test.y
        where = (seed, ROUNDS, client.name, point, "accuracy")
        (recorded,) = (line["value"] for line in metrics if tuple(line.values())[:5] == where)
        assert 100 * right.double().mean().item() == pytest.approx(recorded, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"client": "z"}, r"seed0-trained\.safetensors: no client 'z', allowed are a, b, c"),
        ({"client": ""}, "name the client with --client; allowed are"),
        ({"client": "a", "seed": 1}, r"run: no models of seed 1; allowed are 0, 3$"),
        ({"client": "a", "point": "final"}, r"run: no models of seed 0; it has no models/seed\*-final\.safetensors"),
    ],
)
def test_models_that_are_not_there(finished: tuple[Path, Result], arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        read_model(finished[0], **arguments)


def test_model_file_that_is_damaged(finished: tuple[Path, Result], tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    whole = (finished[0] / "models" / "seed0-trained.safetensors").read_bytes()
    (tmp_path / "models" / "seed0-trained.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot be read as safetensors"):
        read_model(tmp_path, "a")


def test_client_names_with_slashes_are_told_apart(make_federation: Callable[..., Federation], tmp_path: Path) -> None:
    federation = make_federation((8, 9, 10))
    renamed = (replace(client, name=name) for client, name in zip(federation.clients, ("x", "x/1", "y/1"), strict=True))
    result = run("local", replace(federation, clients=tuple(renamed)), out=tmp_path / "run", **QUICK)
    own = {name: rows[0] for name, rows in result.outcomes[0].trained.items()}
    read = read_model(tmp_path / "run", "x")
    assert read.keys() == own.keys()
    assert all(torch.equal(read[name], own[name].cpu()) for name in own)
    with pytest.raises(UserError, match="no client 'y', allowed are x, x/1, y/1"):
        read_model(tmp_path / "run", "y")


# Other runs.


def test_run_that_diverges_leaves_valid_json(federation: Federation, tmp_path: Path) -> None:
    run("fedc2i", federation, out=tmp_path / "run", lr=1e30, optimizer="sgd", **{**QUICK, "epochs": 2})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert None in [line["value"] for line in lines if line["metric"] == "loss"]
    content = json.loads((tmp_path / "run" / "summary.json").read_text(), parse_constant=refuse)
    assert content["refused"] == [
        {"seed": 0, "round": 1, "clients": ["a", "b", "c"], "of": 3, "why": dict.fromkeys("abc", "not finite")}
    ]


def test_compare_puts_runs_beside_the_comparison(federation: Federation, tmp_path: Path) -> None:
    out = tmp_path / "all"
    results = compare(["local", "fedc2i:gamma=2"], federation, out=out, **QUICK)
    found = {path.name for path in out.iterdir()}
    assert found == {"local", "fedc2i-gamma=2.0", "comparison.md", "comparison.json", "comparison.png", "plan.json"}
    content = json.loads((out / "comparison.json").read_text())
    assert list(content) == ["local", "fedc2i:gamma=2.0"]
    for result in results:
        assert json.loads((out / slug(result.key) / "summary.json").read_text()) == content[result.key]
    scores = [score for point in POINTS for score in content["local"]["points"][point]["accuracy"].values()]
    assert [score["sd"] for score in scores] == [None] * 2 * (CLIENTS + 2)  # of one seed; Avg and Worst
    assert not (out / "local" / "influence.npz").exists()  # Local measures none


# New folders.


@pytest.mark.parametrize("existing", ["folder", "file"])
def test_what_exists_is_refused_and_untouched(federation: Federation, tmp_path: Path, existing: str) -> None:
    out = tmp_path / "run"
    target = out if existing == "file" else out / "notes.txt"
    target.parent.mkdir(exist_ok=True)
    target.write_text("mine")
    before = files_below(tmp_path)
    with pytest.raises(UserError, match="run: exists already; choose another --out or remove it"):
        run("local", federation, out=out, **QUICK)
    assert files_below(tmp_path) == before


def test_places_where_a_folder_can_be_made_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    assert new_folder(tmp_path / "empty") == tmp_path / "empty"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match=r"run: cannot be written \(Not a directory\)"):
        new_folder(tmp_path / "file" / "run")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="no permission to write there"):
        new_folder(tmp_path / "empty")
    assert set(files_below(tmp_path)) == {".", "empty", "file"}


@pytest.mark.parametrize(
    "settings",
    [
        {"gamma": -1},
        {"lr": 0},
        {"influence_split": "validation"},
        {"patience": 1},
        {"clients_per_round": "0%"},
        {"model": "other"},
        {"threads": 10**9},
    ],
    ids=str,
)
def test_errors_leave_no_folder_behind(federation: Federation, tmp_path: Path, settings: dict[str, Any]) -> None:
    for attempt in (run, lambda method, *rest, **more: compare([method, "local"], *rest, **more)):
        with pytest.raises(UserError):
            attempt("fedc2i", federation, out=tmp_path / "deep" / "run", **{**QUICK, **settings})
    assert set(files_below(tmp_path)) == {"."}


def test_runs_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [str(new_folder(None, "x")) for _ in range(2)] == ["runs/x-001", "runs/x-002"]
    assert str(new_folder(None, "y")) == "runs/y-001"
    assert new_folder(None, "long" * 200).is_dir()  # a stem from a deep path may be longer than a file name may be
    (tmp_path / "blocked").mkdir()
    monkeypatch.chdir(tmp_path / "blocked")
    Path("runs").write_text("a file")
    with pytest.raises(UserError, match=r"runs: cannot be written \(File exists\)"):
        new_folder(None, "x")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("fedc2i:gamma=2.0", "fedc2i-gamma=2.0"), ("folder:/My Data", "folder-my-data"), ("../..", "run"), ("²", "run")],
)
def test_slug(text: str, expected: str) -> None:
    assert slug(text) == expected


# Writing.


def full_disk(path: Path, content: bytes) -> int:
    """As much as fits, then the error."""
    with path.open("wb") as file:
        file.write(content[:3])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_replace(path: Path, target: Path) -> Path:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


@pytest.mark.parametrize(("method", "failure"), [("write_bytes", full_disk), ("replace", no_replace)])
@pytest.mark.parametrize("old", [None, b"old content"])
def test_file_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, failure: Any, old: bytes | None
) -> None:
    path = tmp_path / "summary.json"
    if old is not None:
        path.write_bytes(old)
    before = files_below(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, method, failure)
        with pytest.raises(UserError, match=r"summary\.json: cannot be written \((No space left|Permission denied)"):
            write_atomically(path, b"new content")
    assert files_below(tmp_path) == before
    write_atomically(path, b"new content")
    assert files_below(tmp_path) == {".": None, "summary.json": b"new content"}


def test_disk_that_fills_up_during_a_run(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = folder.pieces

    def fill_up(models: Any) -> Iterator[Any]:
        yield next(tensors(models))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(folder, "pieces", fill_up)
    with pytest.raises(UserError, match=r"safetensors: cannot be written \(No space left on device\)"):
        run("local", federation, out=tmp_path / "run", **QUICK)
    assert {path.name for path in (tmp_path / "run").rglob("*")} == {
        *("config.toml", "metrics.jsonl", "checkpoints", "fingerprint.json", "rounds", "seed0", "round000001.npz"),
        "models",
    }


def test_json_has_no_numbers_that_json_lacks() -> None:
    value = {"a": float("nan"), 1: [float("inf"), 2.5, (True, None)], "γ": "²"}
    assert json.loads(to_json(value)) == {"a": None, "1": [None, 2.5, [True, None]], "γ": "²"}
    assert "γ" in to_json(value)


# Reports of finished rounds.


def report(number: int, **more: Any) -> Round:
    metrics: Any = {"received": [{"accuracy": 1 / 3, "loss": float("nan")}, {}], "trained": [{"accuracy": 50.0}, {}]}
    influence = {"influence_vector": np.array([[1 / 3, np.nan], [np.inf, number]], dtype=np.float32)}
    values = {"metrics": metrics, "influence": influence, **more}
    return Round(7, number, 0.25, ("a", "ü\n"), refused=("b",), bytes_up=10, bytes_down=2**40, **values)


def assert_same(got: Round, want: Round) -> None:
    plain = ("seed", "round", "seconds", "participants", "refused", "bytes_up", "bytes_down", "why")
    assert [getattr(got, name) for name in plain] == [getattr(want, name) for name in plain]
    assert repr(got.metrics) == repr(want.metrics)  # nan is not equal to itself
    assert set(got.influence) == set(want.influence)
    for name, array in want.influence.items():
        assert got.influence[name].dtype == array.dtype
        np.testing.assert_array_equal(got.influence[name], array)


def test_reports_come_back_in_order_and_exactly(tmp_path: Path) -> None:
    reports = [report(n, **({"why": {"b": "not finite"}} if n % 2 else {})) for n in range(1, 11)]
    reports.append(report(11, metrics={}, influence={}))
    folder = tmp_path / "deep" / "seed7"
    assert read_reports(folder, 1) == []
    for own in reversed(reports):
        write_report(folder, own)
    write_report(folder, reports[0])  # done again, it takes the place of the first
    (folder / "round000012.npz").write_bytes(b"")  # not read
    for got, want in zip(read_reports(folder, 12), reports, strict=True):
        assert_same(got, want)
    (folder / "round000002.npz").unlink()
    with pytest.raises(UserError, match=r"round000002\.npz: not a round's report \(.*No such file"):
        read_reports(folder, 4)


def test_reports_and_marks_are_on_the_disk_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.name.lstrip(".").split(".")[0]))
    write_report(tmp_path, report(1))
    ask(tmp_path, 2, "ab")
    assert synced == ["round000001", tmp_path.name, "asked000002-ab", tmp_path.name]


def test_uploads_asked_for_on_another_course_are_one_release_more(tmp_path: Path) -> None:
    assert asked(tmp_path / "nowhere") == {}
    one, two = "ab" * 32, "ab" * 15 + "cd" * 17
    for number, course, more in ((1, "", False), (1, "", False), (2, one, False), (2, one, False), (2, two, True)):
        assert ask(tmp_path, number, course) is more
    assert ask(tmp_path, 2, two) is False
    assert ask(tmp_path, 3, two) is False
    for name in ("asked000003-ab.bak", "asked000004-xy", "asked", ".asked000004-ab.7.part"):
        (tmp_path / name).touch()
    assert asked(tmp_path) == {1: 1, 2: 2, 3: 1}


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def text(value: Any) -> Any:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"noise" * 99,
        b"PK\x03\x04" + b"\0" * 99,
        archive(other=np.zeros(1)),
        archive(plain=text([1])),
        archive(plain=text({"seed": 1})),
        archive(plain=text({"participants": [], "refused": [], "unknown": 1})),
        archive(plain=np.array([1, 2], dtype=np.uint8)),
        archive(plain=np.array([{}], dtype=object)),
    ],
    ids=range(9),
)
def test_another_file_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "round000001.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"round000001\.npz: not a round's report \(.+\)$") as refused:
        read_reports(tmp_path, 2)
    assert "\n" not in str(refused.value)


def test_a_report_damaged_anywhere_is_refused_or_the_same(tmp_path: Path) -> None:
    write_report(tmp_path, report(1))
    path = tmp_path / "round000001.npz"
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            found = read_reports(tmp_path, 2)
        except UserError:
            refused += 1
        else:  # a byte that means nothing, such as a time
            assert_same(found[0], report(1))
    assert refused > len(whole) / 5 / 2
    for end in range(0, len(whole), 25):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match="not a round's report"):
            read_reports(tmp_path, 2)


def test_a_folder_that_another_run_filled_meanwhile_is_refused(tmp_path: Path) -> None:
    place = new_folder(tmp_path / "mine")
    (place / "summary.json").write_text("{}")
    with pytest.raises(UserError, match="mine: exists already; choose another --out or remove it"), claimed(place):
        raise AssertionError("taken twice")


@pytest.mark.skipif(os.name != "posix", reason="folders are locked on Linux and macOS only")
def test_a_run_that_finds_its_folder_taken_leaves_it_there(tmp_path: Path) -> None:
    place = new_folder(tmp_path / "mine")
    with claimed(place):
        with pytest.raises(UserError, match="another process is at work"), started(place), claimed(place):
            raise AssertionError("taken twice")
        assert place.is_dir()
    with pytest.raises(ValueError, match="own"), started(place), claimed(place):
        raise ValueError("its own error")
    assert not place.exists()
