"""Runs that are computed once: read back as they were, resumed when interrupted, shared by processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from fedc2i.runs.cache import RunCache
from fedc2i.runs.driver import execute
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Result
from support.helpers import files_below

MakePlan = Callable[..., Plan]


class Watch:
    """An observer that remembers what it saw, and may stop the program in a given round."""

    def __init__(self, stop_at: int | None = None, stop: Callable[[], None] | None = None) -> None:
        self.seeds: list[int] = []
        self.rounds: list[Round] = []
        self.said: list[str] = []
        self._stop_at, self._stop = stop_at, stop

    def begin(self, result: Result) -> None:
        self.seeds += result.config.seeds

    def client(self, done: int, of: int) -> None:
        pass

    def round(self, report: Round) -> None:
        self.rounds.append(report)
        if report.round == self._stop_at:
            if self._stop:
                self._stop()
            raise KeyboardInterrupt

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def plan(make_federation: Callable[..., Federation], model: Model) -> MakePlan:
    federation = make_federation((6, 8, 5), validation=4)

    def make(method: str = "fedc2i", **settings: Any) -> Plan:
        quick = {"rounds": 2, "epochs": 1, "seeds": "0,1", "device": "cpu", **settings}
        return prepare([method], quick, federation, model)[0]

    return make


@pytest.fixture
def cache(tmp_path: Path) -> RunCache:
    return RunCache(tmp_path / "results" / "runs")


def as_called(result: Result, case: str) -> bool:
    """Whether a case of the next test is what it is called."""
    if case == "stopped early":
        return max(report.round for report in result.rounds) < 30
    if case == "diverged":
        return not np.isfinite(result.accuracy("trained", "loss")).all()
    return case != "some clients, some rounds" or bool(np.isnan(result.influence()).any())


@pytest.mark.parametrize(
    ("case", "method", "settings"),
    [
        ("fedc2i", "fedc2i", {}),
        ("fedavg", "fedavg", {}),
        ("fedproto", "fedproto", {}),  # a second prediction has metrics of its own
        ("some clients, some rounds", "fedc2i", {"rounds": 5, "evaluate_every": 2, "clients_per_round": 2}),
        ("stopped early", "fedc2i", {"rounds": 30, "patience": 1, "lr": 1e-9}),
        ("diverged", "fedavg", {"lr": 1e38}),
    ],
)
def test_result_is_read_back_as_it_was(
    plan: MakePlan, cache: RunCache, case: str, method: str, settings: dict[str, Any]
) -> None:
    planned = plan(method, **settings)
    live, cached = execute(planned), cache.compute(planned)
    assert as_called(live, case)
    assert (cached.label, cached.key, cached.config, cached.method) == (live.label, live.key, live.config, live.method)
    assert [(r.seed, r.round) for r in cached.rounds] == [(r.seed, r.round) for r in live.rounds]
    metrics = {name for own in live.rounds[-1].metrics["trained"] for name in own}
    assert metrics >= {"accuracy", "loss", "validation_accuracy"}
    for point in POINTS:
        for metric in metrics:
            expected = np.where(np.isfinite(found := live.accuracy(point, metric)), found, np.nan)  # no inf in JSON
            np.testing.assert_allclose(cached.accuracy(point, metric), expected, atol=1e-6)
        for name, score in live.scores(point).items():
            assert cached.scores(point)[name].mean == pytest.approx(score.mean, abs=1e-6)
            assert cached.scores(point)[name].sd == pytest.approx(score.sd, abs=1e-6)
        for ours, theirs in zip(cached.curve(point), live.curve(point), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
    assert ("influence_vector" in live.rounds[-1].influence) == (method == "fedc2i")
    for seed in planned.config.seeds:
        for name in {name for report in live.rounds for name in report.influence}:
            np.testing.assert_array_equal(cached.influence(name, seed), live.influence(name, seed))
        ours, theirs = cached.only(seed), live.only(seed)  # the means over rounds, which is what is kept
        assert (ours.bytes_up, ours.bytes_down) == (theirs.bytes_up, theirs.bytes_down)


def test_nothing_is_run_twice(plan: MakePlan, cache: RunCache) -> None:
    planned, watch = plan(), Watch()
    assert cache.missing(planned) == [0, 1]
    first = cache.compute(planned, watch)
    assert (watch.seeds, len(watch.rounds), watch.said) == ([0, 1], 4, [])
    for seed in (0, 1):
        measured = [report.seconds for report in watch.rounds if report.seed == seed]
        (read,) = {report.seconds for report in first.only(seed).rounds}
        assert read == pytest.approx(np.mean(measured), abs=1e-4)
    before = files_below(cache.root)
    assert cache.missing(planned) == []
    again = RunCache(cache.root).compute(plan(), watch)  # another process would make both anew
    assert len(watch.rounds) == 4
    assert files_below(cache.root) == before
    np.testing.assert_array_equal(again.accuracy("trained"), first.accuracy("trained"))
    assert again.seconds == first.seconds


def test_only_missing_seeds_are_run_each_in_a_folder_of_its_own(plan: MakePlan, cache: RunCache) -> None:
    watch, planned = Watch(), plan("fedc2i:gamma=2", seeds="2,1,0")
    cache.compute(plan("fedc2i:gamma=2", seeds="1"), watch)
    assert cache.missing(planned) == [2, 0]
    mixed = cache.compute(planned, watch)
    assert watch.seeds == [1, 2, 0]
    assert [report.seed for report in mixed.rounds] == [2, 2, 1, 1, 0, 0]  # the user's order
    np.testing.assert_allclose(mixed.accuracy("received"), execute(planned).accuracy("received"), atol=1e-6)
    folders = sorted(folder.name for folder in cache.root.iterdir())
    assert [name.rpartition("-")[0] for name in folders] == [f"toy-fedc2i-gamma=2.0-seed{seed}" for seed in (0, 1, 2)]
    for seed in (0, 1, 2):
        assert json.loads((cache.folder(planned, seed) / "summary.json").read_text())["seeds"] == [seed]


# Interruptions.


def test_a_folder_without_checkpoints_is_computed_again_from_its_start(plan: MakePlan, cache: RunCache) -> None:
    planned, watch = plan(), Watch()
    whole = cache.compute(planned)
    folder = cache.folder(planned, 1)
    (folder / "summary.json").unlink()
    (folder / "stale.txt").write_text("of the run before")
    again = cache.compute(planned, watch)
    assert watch.seeds == [1]
    assert not (folder / "stale.txt").exists()
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(lines) == len(set(lines))
    np.testing.assert_array_equal(again.accuracy("trained"), whole.accuracy("trained"))


@pytest.mark.parametrize("stop_at", [1, 2])
def test_interruption_costs_only_the_seed_it_fell_into(plan: MakePlan, cache: RunCache, stop_at: int) -> None:
    planned, watch = plan(), Watch()
    cache.compute(plan(seeds="0"))
    with pytest.raises(KeyboardInterrupt):
        cache.compute(planned, Watch(stop_at))
    assert (cache.folder(planned, 1) / "metrics.jsonl").is_file()
    result = cache.compute(planned, watch)
    assert watch.seeds == [1]
    np.testing.assert_allclose(result.accuracy("trained"), execute(planned).accuracy("trained"), atol=1e-6)


@pytest.mark.parametrize("damage", [False, True])
def test_fewer_seeds_resume_what_more_of_them_began(plan: MakePlan, cache: RunCache, damage: bool) -> None:
    """From the last checkpoint; from the start if all checkpoints are damaged."""
    settings: dict[str, Any] = {"rounds": 3, "executor": "looped", "checkpoint_seconds": 0}
    with pytest.raises(KeyboardInterrupt):
        cache.compute(plan(seeds="0-2", **settings), Watch(3))
    planned, watch = plan(seeds="0,2", **settings), Watch()
    states = list(cache.folder(planned, 0).glob("checkpoints/round*.safetensors"))
    assert states
    for path in states if damage else ():
        path.write_bytes(b"damaged")
    result = cache.compute(planned, watch)
    assert min(report.round for report in watch.rounds) == (1 if damage else 2)
    assert cache.missing(plan(seeds="0-2", **settings)) == [1]
    np.testing.assert_allclose(result.accuracy("trained"), execute(planned).accuracy("trained"), atol=1e-6)


def test_checkpoints_of_a_process_that_was_killed_at_its_very_end_do_not_stay(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(cache_module.writer, "remove", kill)
        with pytest.raises(KeyboardInterrupt):
            cache.compute(plan(seeds="0,1", checkpoint_seconds=0))
    working = cache.folder(plan(seeds="0,1"), 0)
    assert (working / "checkpoints").is_dir()
    cache.compute(plan(seeds="0,1"))
    assert not (working / "checkpoints").exists()


def test_a_file_that_was_half_written_does_not_stay(plan: MakePlan, cache: RunCache) -> None:
    planned = plan(rounds=3, executor="looped", checkpoint_seconds=0)
    with pytest.raises(KeyboardInterrupt):
        cache.compute(planned, Watch(3))
    folder, watch = cache.folder(planned, 1), Watch()
    (folder / "models").mkdir()
    for path in (folder / ".config.toml.123.part", folder / "models" / ".seed1-trained.safetensors.123.part"):
        path.write_bytes(b"half")  # as by a process that was killed
    cache.compute(planned, watch)
    assert min(report.round for report in watch.rounds) > 1
    assert not list(cache.root.rglob(".*.part"))


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork are of POSIX")
@pytest.mark.skipif(torch.cuda.is_available(), reason="a process that has used a GPU cannot be forked")
@pytest.mark.parametrize("killed_in", ["a round", "the move of finished seeds"])
def test_killed_computation_resumes_after_its_last_checkpoint(
    plan: MakePlan, cache: RunCache, tmp_path: Path, killed_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = plan(rounds=4, executor="looped", checkpoint_seconds=0)
    in_round, finish = killed_in == "a round", RunFolder.finish
    second = cache.folder(planned, 0) / "checkpoints" / "round000002.json"

    def kill() -> None:
        until = time.monotonic() + 30
        while in_round and not second.exists() and time.monotonic() < until:  # another thread writes it
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)

    def finish_one(files: RunFolder, result: Result) -> None:
        finish(files, result)
        kill()

    child = os.fork()
    if child == 0:
        if not in_round:
            monkeypatch.setattr(RunFolder, "finish", finish_one)
        cache.compute(planned, Watch(3 if in_round else None, kill))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert cache.missing(planned) == ([0, 1] if in_round else [0])
    watch, whole = Watch(), RunCache(tmp_path / "whole")
    cache.compute(planned, watch)
    assert min(report.round for report in watch.rounds) == (2 if in_round else 4)
    whole.compute(planned)
    for seed in planned.config.seeds:
        got, want = (files_below(one.folder(planned, seed)) for one in (cache, whole))
        assert got.keys() == want.keys()
        for name in ("config.toml", "metrics.jsonl", *(f"models/seed{seed}-{point}.safetensors" for point in POINTS)):
            assert got[name] == want[name]


# Places that cannot be written, and other processes.


def test_places_that_cannot_be_written(plan: MakePlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("mine")
    watch = Watch()
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)"):
        RunCache(tmp_path / "file" / "runs").compute(plan(), watch)
    assert watch.seeds == []
    assert set(files_below(tmp_path)) == {".", "file"}
    cache = RunCache(tmp_path / "runs")
    cache.root.mkdir()
    cache.folder(plan(), 0).write_text("mine")
    with pytest.raises(UserError, match=r"cannot be written \(File exists\)"):
        cache.compute(plan())
    assert cache.folder(plan(), 0).read_text() == "mine"

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"runs.*: cannot be written \(Read-only file system\)"):
        cache.compute(plan())


def test_what_another_process_did_meanwhile_is_not_done_again(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, others, locked = plan("fedavg"), [RunCache(cache.root)], cache_module.locked

    @contextmanager
    def after_another(folder: Path, waiting: Callable[[], None]) -> Iterator[None]:
        if others:
            others.pop().compute(planned)
        with locked(folder, waiting):
            yield

    monkeypatch.setattr(cache_module, "locked", after_another)
    watch = Watch()
    assert len(cache.compute(planned, watch).rounds) > 0
    assert (watch.seeds, others) == ([], [])


def test_waiting_for_another_process_is_said_once(
    plan: MakePlan, cache: RunCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a while, and then in one line; it goes on when the other one lets go, however that ends."""
    planned = plan(seeds="0")
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
                super().say(line)
                other.kill()

        watch = Told()
        cache.compute(planned, watch)
    assert watch.said == [f"waiting for another process that computes {folder}"]
    assert (folder / "summary.json").is_file()
