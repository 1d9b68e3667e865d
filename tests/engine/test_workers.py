"""Clients over worker processes: the same bits as in one process, whatever happens to the workers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.executors.choice import AdaptiveExecutor, cores
from fedc2i.engine.executors.workers import pool
from fedc2i.engine.executors.workers.pool import SharedMemory
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.methods.base import Method, Site
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.models.model import Model, split
from fedc2i.training.local import Batch
from oracles import assert_same_model
from support.method_checks import each_kind
from support.simulation import Run, assert_same_run, simulated

TRAINING = TrainingSettings(batch_size=5, lr=0.01)


@pytest.fixture(scope="module", autouse=True)
def _no_workers_left() -> Any:
    yield
    pool.stop()


def run(
    executor: str,
    method: Method,
    model: Model,
    federation: Federation,
    seeds: tuple[int, ...] = (0, 1),
    workers: int = 2,
    **settings: Any,
) -> Run:
    count = {"workers": workers} if executor == "workers" else {}
    return simulated(method, model, federation, seeds, executor=executor, **count, **settings)


def run_alone(method: Method, model: Model, federation: Federation) -> Run:
    """With one worker, where its number is not the point: each takes seconds to start."""
    return run("workers", method, model, federation, workers=1)


@pytest.mark.parametrize("name", each_kind(sorted(Method.registry)))
def test_every_method_has_the_same_bits_as_in_one_process(
    name: str, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    model, federation = make_model(layer_norm=True), make_federation((12, 20, 7, 9), validation=3)
    looped, workers = (run(how, Method.registry[name](), model, federation) for how in ("looped", "workers"))
    assert_same_run(workers, looped)


@pytest.mark.parametrize("kind", [{"batch_norm": True}, {"dropout": 0.5}], ids=["batchnorm", "dropout"])
def test_partial_participation_statistics_and_dropout(
    kind: dict[str, Any], make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    model, federation = make_model(**kind), make_federation((12, 20, 7, 9))
    settings = {"rounds": 4, "clients_per_round": 2, "evaluate_every": 2}
    looped, workers = (run(how, FedC2I(), model, federation, **settings) for how in ("looped", "workers"))
    assert_same_run(workers, looped)


def test_workers_stay_for_the_next_run(model: Model, federation: Federation) -> None:
    run("workers", FedAvg(), model, federation)
    before = pool.running(2)
    run("workers", FedC2I(), model, federation)
    assert before is not None
    assert pool.running(2) is before


def test_the_same_images_with_other_labels_are_other_data(model: Model, federation: Federation) -> None:
    run("workers", FedAvg(), model, federation)
    clients = [replace(own, train=replace(own.train, y=own.train.y.flip(0))) for own in federation.clients]
    other = replace(federation, clients=tuple(clients))
    assert_same_run(run("workers", FedAvg(), model, other), run("looped", FedAvg(), model, other))
    other.clients[0].train.y.fill_(1)
    assert_same_run(run("workers", FedAvg(), model, other), run("looped", FedAvg(), model, other))


def test_other_data_replaces_the_old(model: Model, make_federation: Callable[..., Federation]) -> None:
    for sizes in ((6, 7), (30, 40, 50), (5,) * 6):
        federation = make_federation(sizes, seed=len(sizes))
        assert_same_run(run("workers", FedC2I(), model, federation), run("looped", FedC2I(), model, federation))


# What users bring along.


def test_what_cannot_be_imported_travels_by_value(federation: Federation, tmp_path: Path) -> None:
    strength = 0.5

    @dataclass(frozen=True)
    class Local(FedAvg):
        name = "travels"
        title = "Travels"

        def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
            return strength * super().loss(params, batch, site)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.head = nn.Flatten(), nn.Linear(768, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.flat(x))  # type: ignore[no-any-return]

    model = split(lambda: Net(), head="head")
    assert_same_run(run("workers", Local(), model, federation), run("looped", Local(), model, federation))
    file = tmp_path / "mine.py"
    file.write_text(
        textwrap.dedent("""
            from dataclasses import dataclass
            from torch import nn
            from fedc2i import split
            from fedc2i.methods.fedavg import FedAvg

            @dataclass(frozen=True)
            class Mine(FedAvg):
                name = "mine-by-file"
                title = "Mine"
                def loss(self, params, batch, site):
                    return scaled(super().loss(params, batch, site))

            def scaled(value):
                return 0.5 * value

            def net(classes, shape):
                return split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(768, classes)), head="1")
        """)
    )
    settings = {"model": f"{file}:net", "rounds": 2, "workers": 2, "device": "cpu"}
    one, two = (fedc2i.run(f"{file}:Mine", federation, executor=how, **settings) for how in ("workers", "looped"))
    assert (one.accuracy("trained") == two.accuracy("trained")).all()


class Broken(FedAvg):
    """Fails in the second round."""

    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        if site.round == 2:
            raise KeyError("no such thing")
        return super().loss(params, batch, site)


def test_an_error_in_a_worker_is_raised_here_with_its_story(model: Model, federation: Federation) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        run_alone(Broken(), model, federation)
    assert "In a worker process" in caught.value.__notes__[0]
    assert "in loss" in caught.value.__notes__[0]
    assert pool.running(1) is None


class Suicide(FedAvg):
    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(params, batch, site)


class Talking(FedAvg):
    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        print("a word from a worker")
        return super().loss(params, batch, site)


def test_what_a_worker_printed_is_there_when_it_has_ended(
    model: Model, federation: Federation, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pool.stop()
    run_alone(Talking(), model, federation)
    pool.stop()
    assert "a word from a worker" in capfd.readouterr().out


def test_after_a_killed_worker_and_an_interrupt_the_next_run_works(model: Model, federation: Federation) -> None:
    """And no descriptor stays open of the pools that are gone."""

    def assert_works() -> int:
        assert_same_run(run_alone(FedAvg(), model, federation), run("looped", FedAvg(), model, federation))
        return len(list(Path("/proc/self/fd").iterdir()))

    def interrupt(_: Round) -> None:
        raise KeyboardInterrupt

    descriptors = assert_works()
    with pytest.raises(UserError, match="a worker process ended unexpectedly \\(signal 9\\); if memory ran out"):
        run_alone(Suicide(), model, federation)
    assert assert_works() == descriptors
    settings = EngineSettings(rounds=5, **vars(TRAINING), executor="workers", workers=1)
    with pytest.raises(KeyboardInterrupt):
        simulate(FedAvg(), model, federation, settings, [0], on_round=interrupt)
    assert_works()


@pytest.mark.parametrize(("how", "workers"), [("auto", 2), ("workers", 1)])
def test_a_run_within_a_run_and_runs_in_threads_keep_apart(
    how: str, workers: int, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedc2i.engine.executors.choice.cores", lambda: 2)
    pool.start(workers).is_ready(patient=True)
    settings = EngineSettings(rounds=2, **vars(TRAINING), executor=how, workers=workers)  # type: ignore[arg-type]
    found = {}

    def inner(report: Round) -> None:
        if report.round == 1:
            found["inner"] = simulate(FedC2I(), model, federation, settings, [5])

    def go(seed: int) -> None:
        found[seed] = simulate(FedAvg(), model, federation, settings, [seed], on_round=inner if seed == 0 else None)

    threads = [threading.Thread(target=go, args=(seed,)) for seed in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for name, method, seed in ((0, FedAvg(), 0), (1, FedAvg(), 1), ("inner", FedC2I(), 5)):
        expected, _ = run("looped", method, model, federation, seeds=(seed,))
        assert_same_model(found[name][seed].trained, expected[seed].trained, rtol=0, atol=0)
    assert len(pool._pools) == 1


def test_with_a_class_that_a_worker_cannot_import_a_run_stays_here(
    federation: Federation, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "hidden.py"
    file.write_text("from fedc2i.methods.fedavg import FedAvg\nclass Hidden(FedAvg):\n    pass\n")
    spec = importlib.util.spec_from_file_location("hidden_from_workers", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "hidden_from_workers", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr("fedc2i.engine.executors.choice.cores", lambda: 2)
    pool.start(2).is_ready(patient=True)
    assert_same_run(run("auto", module.Hidden(), model, federation), run("looped", FedAvg(), model, federation))


# Moving while a run goes on.


@pytest.mark.parametrize("trouble", ["none can be started", "one dies early"])
def test_without_workers_a_run_stays_here(
    trouble: str, model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.stop()
    monkeypatch.setattr("fedc2i.engine.executors.choice.cores", lambda: 2)
    monkeypatch.setattr("fedc2i.engine.executors.choice._WORTH", 0.0)
    if trouble == "one dies early":
        pool.start(2).workers[0]._process.kill()
    else:
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
    auto = run("auto", Slow(), model, federation, rounds=3)
    assert_same_run(auto, run("looped", Slow(), model, federation, rounds=3))
    assert pool.running(2) is None or trouble == "one dies early"


class Slow(FedAvg):
    def loss(self, params: Params, batch: Batch, site: Site) -> Tensor:
        time.sleep(0.002)
        return super().loss(params, batch, site)


def test_a_long_run_moves_to_workers_and_a_short_one_does_not(
    model: Model, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.stop()
    monkeypatch.setattr("fedc2i.engine.executors.choice.cores", lambda: 2)
    where: list[str] = []
    train = AdaptiveExecutor.train

    def watched(self: AdaptiveExecutor, *rest: Any, **more: Any) -> Any:
        result = train(self, *rest, **more)
        where.append(type(self._now).__name__)
        if there := pool.running(2):
            there.is_ready(patient=True)  # however long it takes on a busy machine: the round after moves
        return result

    monkeypatch.setattr(AdaptiveExecutor, "train", watched)
    run("auto", FedAvg(), model, federation, rounds=3)
    assert where == ["LoopedExecutor"] * 3
    assert pool.running(2) is None
    where.clear()
    monkeypatch.setattr("fedc2i.engine.executors.choice._WORTH", 0.2)
    long = run("auto", Slow(), model, federation, rounds=5)
    assert where == ["LoopedExecutor"] * 2 + ["WorkersExecutor"] * 3  # measured in the first, started in the second
    assert_same_run(long, run("looped", Slow(), model, federation, rounds=5))


def test_what_cannot_be_sent_is_an_error(federation: Federation) -> None:
    lock = threading.Lock()

    def build() -> nn.Module:
        with lock:
            return nn.Sequential(nn.Flatten(), nn.Linear(768, 4))

    model = split(build, head="1")
    with pytest.raises(TypeError, match="lock"):
        run_alone(FedAvg(), model, federation)


@pytest.mark.parametrize("workers", [-1, 10**6])
def test_refusals(workers: int) -> None:
    with pytest.raises(UserError, match="workers"):
        EngineSettings(executor="workers", workers=workers)


def test_cores_are_those_of_the_affinity() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= cores() <= len(before)


# Whatever ends the main process, its workers end too.

SCRIPT = """
import sys, torch
from torch import nn
from fedc2i.data.federation import Client, Federation, Split
from fedc2i.core.settings import EngineSettings
from fedc2i.engine.simulator import simulate
from fedc2i.engine.executors.workers import pool
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import split

part = Split(torch.zeros(8, 3, 4, 4, dtype=torch.uint8), torch.arange(8) % 4)
federation = Federation("toy", tuple(Client(name, part, part, part) for name in "abc"), tuple("wxyz"))
model = split(lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), "1")

def report(last):
    print(" ".join(str(worker._process.pid) for worker in pool.running(1).workers), flush=True)
    if sys.argv[1] == "error":
        raise RuntimeError("on purpose")

settings = EngineSettings(rounds=int(sys.argv[2]), executor="workers", workers=1)
simulate(FedAvg(), model, federation, settings, [0], on_round=report)
"""


@pytest.mark.parametrize(
    "end",
    [
        "normal",
        pytest.param("error", marks=pytest.mark.slow),
        "SIGKILL",
        pytest.param("SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_no_worker_outlives_the_main_process(end: str, tmp_path: Path) -> None:
    """A script without ``if __name__ == "__main__"``, as people write them, and without a standard input."""
    script, said = tmp_path / "script.py", tmp_path / "stderr"
    script.write_text(SCRIPT)
    rounds = "100000" if end.startswith("SIG") else "1"
    command = f"exec '{sys.executable}' '{script}' {end} {rounds} <&- 2>'{said}'"
    with subprocess.Popen(command, shell=True, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        (worker,) = main.stdout.readline().split()
        if end.startswith("SIG"):
            main.send_signal(getattr(signal, end))
        main.stdout.read()
        main.wait()
    if end == "normal":
        assert (main.returncode, said.read_text()) == (0, "")
    patience = time.monotonic() + 60
    while Path(f"/proc/{worker}").exists():
        assert time.monotonic() < patience, "a worker lives on"
        time.sleep(0.05)


# Shared memory.


def test_an_arena_holds_tensors_of_every_kind_and_grows() -> None:
    arena = SharedMemory()
    odd = {
        "float": torch.randn(3, 5),
        "double": torch.randn((), dtype=torch.float64),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False]),
        "nothing": torch.zeros(0, 3),
        "view": torch.arange(12).reshape(3, 4).T,
    }
    layout, end = arena.write(odd)
    early = arena.read(layout)
    more, _ = arena.write({"large": torch.randn(10**6)}, end)
    other = SharedMemory(arena.descriptor)
    for name, tensor in {**odd, **arena.read(more)}.items():
        seen = other.read({**layout, **more})[name]
        assert seen.dtype == tensor.dtype
        assert torch.equal(seen, tensor)
        assert seen.data_ptr() % 64 == 0 or not seen.numel()
    early["float"].fill_(7)
    assert (other.read(layout)["float"] == 7).all()
