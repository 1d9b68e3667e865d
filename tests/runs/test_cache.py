"""Runs that are computed once: read back as they were, found again by what decided them, refused when damaged."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedc2i.core import files as files_module
from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.engine.records import POINTS, Round
from fedc2i.models.model import Model
from fedc2i.runs import cache as cache_module
from fedc2i.runs import fingerprint
from fedc2i.runs.cache import RunCache
from fedc2i.runs.driver import execute
from fedc2i.runs.fingerprint import code_digest
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Result
from support.helpers import files_below

QUICK = {"rounds": 2, "epochs": 1, "seeds": "0,1", "device": "cpu"}

MakePlan = Callable[..., Plan]


class Watch:
    """An observer that remembers what it saw, and may stop the program in a given round."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.seeds: list[int] = []
        self.rounds: list[Round] = []
        self._stop_at = stop_at

    def begin(self, result: Result) -> None:
        self.seeds += result.config.seeds

    def client(self, done: int, of: int) -> None:
        pass

    def round(self, report: Round) -> None:
        self.rounds.append(report)
        if report.round == self._stop_at:
            raise KeyboardInterrupt


@pytest.fixture
def plan(make_federation: Callable[..., Federation], model: Model) -> MakePlan:
    def make(method: str = "fedc2i", *, data: Federation | None = None, **settings: Any) -> Plan:
        data = data or make_federation((6, 8, 5), validation=4)
        (planned,) = prepare([method], {**QUICK, **settings}, data, model)
        return planned

    return make


@pytest.fixture
def cache(tmp_path: Path) -> RunCache:
    return RunCache(tmp_path / "results" / "runs")


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fedc2i", {}),
        ("fedavg", {}),
        ("fedproto", {}),  # a second prediction has metrics of its own
        ("fedc2i", {"rounds": 5, "evaluate_every": 2, "clients_per_round": 2}),
        ("fedc2i", {"rounds": 30, "patience": 1, "lr": 1e-9}),
        ("fedavg", {"lr": 1e38}),
    ],
    ids=["fedc2i", "fedavg", "fedproto", "some clients, some rounds", "stopped early", "diverged"],
)
def test_result_is_read_back_as_it_was(plan: MakePlan, cache: RunCache, method: str, settings: dict[str, Any]) -> None:
    planned = plan(method, **settings)
    live, stored = execute(planned), cache.compute(planned)
    assert (stored.label, stored.key, stored.config, stored.method) == (live.label, live.key, live.config, live.method)
    assert [(r.seed, r.round) for r in stored.rounds] == [(r.seed, r.round) for r in live.rounds]
    metrics = {name for own in live.rounds[-1].metrics["trained"] for name in own}
    assert metrics >= {"accuracy", "loss", "validation_accuracy"}
    for point in POINTS:
        for metric in metrics:
            expected = np.where(np.isfinite(found := live.accuracy(point, metric)), found, np.nan)  # no inf in JSON
            np.testing.assert_allclose(stored.accuracy(point, metric), expected, atol=1e-6)
        assert stored.scores(point).keys() == live.scores(point).keys()
        for name, score in live.scores(point).items():
            assert stored.scores(point)[name].mean == pytest.approx(score.mean, abs=1e-6)
            assert stored.scores(point)[name].sd == pytest.approx(score.sd, abs=1e-6)
        for ours, theirs in zip(stored.curve(point), live.curve(point), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert ("influence_vector" in live.rounds[-1].influence) == (method == "fedc2i")
    for seed in planned.config.seeds:
        for name in {name for report in live.rounds for name in report.influence}:
            np.testing.assert_array_equal(stored.influence(name, seed), live.influence(name, seed))
        ours, theirs = stored.only(seed), live.only(seed)  # the means over rounds, which is what is kept
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)


def test_cases_above_are_what_they_are_called(plan: MakePlan) -> None:
    early = execute(plan(rounds=30, patience=1, lr=1e-9))
    assert max(report.round for report in early.rounds) < 30
    assert not np.isfinite(execute(plan("fedavg", lr=1e38)).accuracy("trained", "loss")).all()
    assert np.isnan(execute(plan(rounds=5, evaluate_every=2, clients_per_round=2)).influence()).any()


def test_seconds_are_means_over_each_seed(plan: MakePlan, cache: RunCache) -> None:
    watch = Watch()
    result = cache.compute(plan(rounds=3), watch)
    for seed in (0, 1):
        measured = [report.seconds for report in watch.rounds if report.seed == seed]
        read = [report.seconds for report in result.rounds if report.seed == seed]
        assert len(set(read)) == 1
        assert read[0] == pytest.approx(np.mean(measured), abs=1e-4)


def test_nothing_is_run_twice(plan: MakePlan, cache: RunCache) -> None:
    planned, watch = plan(), Watch()
    assert cache.missing(planned) == [0, 1]
    first = cache.compute(planned, watch)
    assert (watch.seeds, len(watch.rounds)) == ([0, 1], 4)
    before = files_below(cache.root)
    assert cache.missing(planned) == []
    again = RunCache(cache.root).compute(plan(), watch)  # another process would make both anew
    assert (watch.seeds, len(watch.rounds)) == ([0, 1], 4)
    assert files_below(cache.root) == before
    np.testing.assert_array_equal(again.accuracy("trained"), first.accuracy("trained"))
    assert again.seconds == first.seconds


def test_only_missing_seeds_are_run_and_the_order_is_the_users(plan: MakePlan, cache: RunCache) -> None:
    watch = Watch()
    cache.compute(plan(seeds="1"), watch)
    assert cache.missing(plan(seeds="2,1,0")) == [2, 0]
    mixed = cache.compute(plan(seeds="2,1,0"), watch)
    assert watch.seeds == [1, 2, 0]
    assert [report.seed for report in mixed.rounds] == [2, 2, 1, 1, 0, 0]
    direct = execute(plan(seeds="2,1,0"))
    np.testing.assert_allclose(mixed.accuracy("received"), direct.accuracy("received"), atol=1e-6)


def test_every_seed_has_a_folder_of_its_own_with_a_complete_run(plan: MakePlan, cache: RunCache) -> None:
    planned = plan("fedc2i:gamma=2")
    cache.compute(planned)
    folders = sorted(folder.name for folder in cache.root.iterdir())
    assert [name.rpartition("-")[0] for name in folders] == [f"toy-fedc2i-gamma=2.0-seed{seed}" for seed in (0, 1)]
    for seed in (0, 1):
        summary = json.loads((cache.folder(planned, seed) / "summary.json").read_text(encoding="utf-8"))
        assert summary["seeds"] == [seed]


@pytest.mark.parametrize(
    "changed",
    [
        {"gamma": 2.0},
        {"influence": "first-order"},
        {"rounds": 3},
        {"lr": 1e-2},
        {"epochs": 2},
        {"clients_per_round": 2},
        {"data_seed": 1},
        {"executor": "looped"},
    ],
    ids=str,
)
def test_changed_setting_is_another_run(plan: MakePlan, cache: RunCache, changed: dict[str, Any]) -> None:
    key, other = (cache.folder(planned, 0).name.rpartition("-")[2] for planned in (plan(), plan(**changed)))
    assert key != other


def test_methods_with_equal_options_are_different_runs(plan: MakePlan, cache: RunCache) -> None:
    keys = {cache.folder(plan(name), 0).name.rpartition("-")[2] for name in ("local", "fedavg")}
    assert len(keys) == 2


def test_changed_data_is_another_run(
    plan: MakePlan, cache: RunCache, make_federation: Callable[..., Federation]
) -> None:
    data = make_federation((6, 8, 5), validation=4)
    first, *others = data.clients
    relabelled = replace(first, test=replace(first.test, y=first.test.y.roll(1)))
    moved = replace(first, train=replace(first.train, x=first.train.x.clone()))
    moved.train.x[0, 0, 0, 0] ^= 1
    renamed = replace(first, name="other")
    changed = [replace(data, clients=(client, *others)) for client in (relabelled, moved, renamed)]
    folders = {cache.folder(plan(data=one), 0) for one in (data, *changed)}
    assert len(folders) == 4


def write_package(root: Path, **changed: str) -> Path:
    """A package with one module in each of its rooms; ``changed`` are the rooms whose module says something else."""
    for room in ("core", "data", "models", "training", "methods", "engine", "runs", "report"):
        (root / room).mkdir(parents=True)
        (root / room / "one.py").write_text(changed.get(room, '"""About it."""\n\ndef f(x):\n    return x\n'))
    return root


@pytest.mark.parametrize("room", ["core", "data", "models", "training", "methods", "engine"])
def test_code_that_decides_numbers_is_part_of_the_key(room: str, tmp_path: Path) -> None:
    changed = write_package(tmp_path / "b", **{room: "def f(x):\n    return x + 1\n"})
    assert code_digest(write_package(tmp_path / "a")) != code_digest(changed)


def test_comments_docstrings_and_other_rooms_are_not_part_of_the_key(tmp_path: Path) -> None:
    commented = '"""Other words."""\n\ndef f(x):\n    """More."""\n    return x  # why\n'
    changed = write_package(tmp_path / "b", core=commented, runs="def f(x): return 2", report="g = 1")
    assert code_digest(write_package(tmp_path / "a")) == code_digest(changed)


def test_changed_code_is_another_run(plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.folder(plan(), 0)
    monkeypatch.setattr(fingerprint, "code_digest", lambda: "other")
    assert cache.folder(plan(), 0) != before


@pytest.mark.parametrize("package", ["fedc2i", "torch"])
def test_another_version_is_another_run(
    package: str, plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, here = cache.folder(plan(), 0), fingerprint.versions()
    monkeypatch.setattr(fingerprint, "versions", lambda: {**here, package: "0.0"})
    assert cache.folder(plan(), 0) != before


def test_what_another_process_did_meanwhile_is_not_done_again(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, others, alone = plan("fedavg"), [RunCache(cache.root)], cache_module.locked

    @contextmanager
    def behind_another(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
        if others:
            others.pop().compute(planned)
        with alone(folder, say):
            yield

    monkeypatch.setattr(cache_module, "locked", behind_another)
    watch = Watch()
    assert len(cache.compute(planned, watch).rounds) > 0
    assert (watch.seeds, others) == ([], [])


def test_changed_neighbours_are_another_run(plan: MakePlan, cache: RunCache, tmp_path: Path) -> None:
    path, folders = tmp_path / "who", set()
    for lines in ("a: b\nb: c\nc: a\n", "a: c\nb: c\nc: a\n", "a: b\nb: c\nc: a\n"):
        path.write_text(lines, encoding="utf-8")
        folders.add(cache.folder(plan(topology=str(path)), 0))
    assert len(folders) == 2


def test_changed_file_of_a_model_is_another_run(
    cache: RunCache, tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    file = tmp_path / "net.py"
    file.write_text(
        "import fedc2i\nfrom torch import nn\n\n\ndef net(classes, image):\n"
        "    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, 5), nn.Tanh(), nn.Linear(5, classes))\n"
        "    return fedc2i.split(build, head='3', name='net')\n"
    )
    (planned,) = prepare(["fedavg"], {**QUICK, "model": f"{file}:net"}, make_federation())
    before = cache.folder(planned, 0)
    assert cache.folder(planned, 0) == before
    file.write_text(file.read_text() + "\n")
    assert cache.folder(planned, 0) != before


def test_changed_version_is_another_run(plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan()
    cache.compute(planned)
    monkeypatch.setattr(fingerprint, "versions", lambda: {"fedc2i": "9.9.9", "torch": "2.13.0"})
    assert cache.missing(planned) == [0, 1]


def test_device_that_computes_is_part_of_the_key(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan()
    before = cache.folder(planned, 0)
    monkeypatch.setattr(type(planned.config), "torch_device", lambda _: torch.device("cuda"))
    assert cache.folder(planned, 0) != before


def test_place_of_the_data_list_of_seeds_and_notes_do_not_matter(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    planned = plan()
    same = [
        replace(planned, config=replace(planned.config, data_dir="/elsewhere")),
        replace(planned, config=replace(planned.config, device="auto")),
        replace(planned, federation=replace(planned.federation, notes=("a stand-in",), averages={"Avg-1": ("a",)})),
        plan(seeds="0-5"),
    ]
    assert {cache.folder(one, 0) for one in same} == {cache.folder(planned, 0)}
    assert cache.folder(planned, 1) != cache.folder(planned, 0)


def test_run_that_was_cut_off_is_run_again_from_its_start(plan: MakePlan, cache: RunCache) -> None:
    planned = plan()
    whole = cache.compute(planned)
    folder = cache.folder(planned, 1)
    (folder / "summary.json").unlink()
    (folder / "stale.txt").write_text("of the run before")
    assert cache.missing(planned) == [1]
    watch = Watch()
    again = cache.compute(planned, watch)
    assert watch.seeds == [1]
    assert not (folder / "stale.txt").exists()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines))
    np.testing.assert_array_equal(again.accuracy("trained"), whole.accuracy("trained"))


@pytest.mark.parametrize("stop_at", [1, 2])
def test_interruption_costs_only_the_seed_it_fell_into(plan: MakePlan, cache: RunCache, stop_at: int) -> None:
    planned = plan(rounds=2)
    cache.compute(plan(rounds=2, seeds="0"))
    with pytest.raises(KeyboardInterrupt):
        cache.compute(planned, Watch(stop_at))
    assert (cache.folder(planned, 1) / "metrics.jsonl").is_file()
    assert cache.missing(planned) == [1]
    watch = Watch()
    result = cache.compute(planned, watch)
    assert watch.seeds == [1]
    np.testing.assert_allclose(result.accuracy("trained"), execute(planned).accuracy("trained"), atol=1e-6)


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork are of POSIX")
@pytest.mark.parametrize("killed_in", ["a round", "the move of finished seeds"])
def test_killed_computation_resumes_after_its_last_checkpoint(
    plan: MakePlan, cache: RunCache, tmp_path: Path, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(rounds=4, executor="looped")
    finish = RunFolder.finish

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Killed(Watch):
        def round(self, report: Round) -> None:
            if killed_in == "a round" and report.round == 3:
                kill()

    def finish_one(files: RunFolder, result: Result) -> None:
        finish(files, result)
        kill()

    child = os.fork()
    if child == 0:
        if killed_in != "a round":
            monkeypatch.setattr(RunFolder, "finish", finish_one)
        cache.compute(planned, Killed())
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert cache.missing(planned) == ([0, 1] if killed_in == "a round" else [0])
    watch, whole = Watch(), RunCache(tmp_path / "whole")
    cache.compute(planned, watch)
    assert min(report.round for report in watch.rounds) == (2 if killed_in == "a round" else 4)
    whole.compute(planned)
    for seed in planned.config.seeds:
        names = sorted(str(path.relative_to(cache.root)) for path in cache.folder(planned, seed).rglob("*"))
        assert not [name for name in names if "checkpoints" in name or "rounds/" in name]
        for name in ("config.toml", "metrics.jsonl", *(f"models/seed{seed}-{point}.safetensors" for point in POINTS)):
            assert (cache.folder(planned, seed) / name).read_bytes() == (
                whole.folder(planned, seed) / name
            ).read_bytes()


def test_damaged_checkpoints_start_the_computation_again(plan: MakePlan, cache: RunCache) -> None:
    planned = plan(rounds=3, executor="looped")

    class Stopped(Watch):
        def round(self, report: Round) -> None:
            if report.round == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.compute(planned, Stopped())
    states = list(cache.folder(planned, 0).glob("checkpoints/round*.safetensors"))
    assert states
    for path in states:
        path.write_bytes(b"damaged")
    watch = Watch()
    assert len(cache.compute(planned, watch).rounds) == 2 * 3
    assert min(report.round for report in watch.rounds) == 1


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


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes(255 - byte for byte in content[middle : middle + 40]) + content[middle + 40 :]


def without_lines(count: int) -> Callable[[bytes], bytes]:
    return lambda content: b"\n".join(content.split(b"\n")[: -count - 1]) + b"\n"


def altered(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **changes}).encode()


DAMAGES: dict[str, tuple[str, Callable[[bytes], bytes | None]]] = {
    "summary empty": ("summary.json", lambda _: b""),
    "summary cut": ("summary.json", cut),
    "summary a list": ("summary.json", lambda _: b"[]"),
    "summary without entries": ("summary.json", lambda _: b"{}"),
    "summary without seconds": ("summary.json", altered(seconds_per_round=None)),
    "summary with text for bytes": ("summary.json", altered(bytes_up_per_client_round="many")),
    "summary with text for rounds": ("summary.json", altered(rounds="2")),
    "summary with more rounds": ("summary.json", altered(rounds=3)),
    "summary of no rounds": ("summary.json", altered(rounds=0)),
    "summary not text": ("summary.json", lambda _: b"\xff\xfe\x00"),
    "metrics gone": ("metrics.jsonl", lambda _: None),
    "metrics empty": ("metrics.jsonl", lambda _: b""),
    "metrics cut": ("metrics.jsonl", cut),
    "metrics without the last round": ("metrics.jsonl", lambda content: content[: content.index(b'"round": 2')]),
    "metrics without the last client": ("metrics.jsonl", without_lines(4)),
    "metrics of another client": ("metrics.jsonl", lambda content: content.replace(b'"client": "b"', b'"client": "q"')),
    "metrics of another point": ("metrics.jsonl", lambda content: content.replace(b'"trained"', b'"tested"')),
    "metrics with text": ("metrics.jsonl", lambda content: content.replace(b'"value": ', b'"value": "x", "was": ')),
    "metrics of numbers": ("metrics.jsonl", lambda _: b"1\n2\n"),
    "influence empty": ("influence.npz", lambda _: b""),
    "influence cut": ("influence.npz", cut),
    "influence flipped": ("influence.npz", flipped),
    "influence not an archive": ("influence.npz", lambda _: b"PK is how it begins"),
    "influence text": ("influence.npz", lambda _: b"hello"),
    "influence too short": ("influence.npz", lambda _: archive(seed0_influence_vector=np.ones((1, 3, 3)))),
    "influence a number": ("influence.npz", lambda _: archive(seed0_influence_vector=np.array(1.0))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_file_is_one_line_that_names_the_folder(plan: MakePlan, cache: RunCache, damage: str) -> None:
    planned = plan(seeds="0")
    cache.compute(planned)
    folder = cache.folder(planned, 0)
    name, change = DAMAGES[damage]
    content = change((folder / name).read_bytes())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(UserError) as caught:
        cache.compute(planned)
    assert str(caught.value).startswith(f"{folder}: not a complete run (")
    assert str(caught.value).endswith("remove it and run again")


def test_nothing_is_unpickled(plan: MakePlan, cache: RunCache, tmp_path: Path) -> None:
    planned = plan(seeds="0")
    cache.compute(planned)
    sprung = tmp_path / "sprung"
    trap = np.array([Trap(sprung)], dtype=object)
    for content in (archive(seed0_influence_vector=trap), trap.dumps()):
        (cache.folder(planned, 0) / "influence.npz").write_bytes(content)
        with pytest.raises(UserError, match="not a complete run"):
            cache.compute(planned)
    assert not sprung.exists()
    np.load(io.BytesIO(archive(seed0_influence_vector=trap)), allow_pickle=True)["seed0_influence_vector"]
    assert sprung.exists()  # the trap works


def test_root_that_cannot_be_written(plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    cache, watch = RunCache(tmp_path / "file" / "runs"), Watch()
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)"):
        cache.compute(plan(), watch)
    assert watch.seeds == []
    assert set(files_below(tmp_path)) == {".", "file"}


def test_place_of_a_run_that_is_a_file(plan: MakePlan, cache: RunCache) -> None:
    folder = cache.folder(plan(), 0)
    folder.parent.mkdir(parents=True)
    folder.write_text("mine")
    with pytest.raises(UserError, match=r"cannot be written \(File exists\)"):
        cache.compute(plan())
    assert folder.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_root(plan: MakePlan, tmp_path: Path) -> None:
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(UserError, match=r"cannot be written \(Permission denied\)"):
        RunCache(tmp_path / "locked" / "runs").compute(plan())


def test_root_on_a_read_only_disk(plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"runs.*: cannot be written \(Read-only file system\)"):
        RunCache(tmp_path / "runs").compute(plan())


# Beside another process.


def test_waiting_for_another_process_is_said_once(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, and then in one line; it goes on when the other one lets go, however that ends."""
    planned, said = plan(seeds="0"), list[str]()
    folder = cache.folder(planned, 0)
    folder.mkdir(parents=True)
    hold = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); "
    hold += "print('held', flush=True); sys.stdin.read()"
    monkeypatch.setattr(files_module, "SILENCE", 0.3)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", hold, str(folder)], text=True, **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"

        class Told(Watch):
            def say(self, line: str) -> None:
                said.append(line)
                other.kill()

        cache.compute(planned, Told())
    assert said == [f"waiting for another process that computes {folder}"]
    assert (folder / "summary.json").is_file()


def test_nothing_is_said_where_nobody_is_waited_for(plan: MakePlan, cache: RunCache) -> None:
    class Told(Watch):
        def say(self, line: str) -> None:
            raise AssertionError(line)

    cache.compute(plan(seeds="0"), Told())
