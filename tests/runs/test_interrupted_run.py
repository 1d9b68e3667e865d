"""A run that was interrupted and resumed ends like one that never was, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import fedc2i
from fedc2i import Federation, Method, Model, UserError
from fedc2i.core import files
from fedc2i.core.params import unprefixed
from fedc2i.core.settings import EngineSettings
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import state_size
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import Mailbox
from fedc2i.engine.records import Round
from fedc2i.engine.seed_run import SeedRun, Store
from fedc2i.engine.simulator import simulate
from fedc2i.methods.fedavg import FedAvg
from fedc2i.report import figures
from fedc2i.runs import plan as plan_module
from fedc2i.runs import writer
from fedc2i.runs.driver import compute, execute
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.interrupted_run import paths_from_start
from fedc2i.runs.plan import prepare
from fedc2i.runs.results import summary
from fedc2i.runs.writer import RunWriter
from support.cut_runs import (
    CPU,
    SETTINGS,
    TRAINING,
    cut_off,
    cut_run,
    plan,
    refused,
    result_files,
    same,
)
from support.helpers import call, files_below, write_arrays


@pytest.mark.parametrize(("seconds", "rounds"), [(0, (2, 3)), (1000, ())])
def test_a_folder_is_resumed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    federation: Federation,
    model: Model,
    seconds: float,
    rounds: tuple[int, ...],
) -> None:
    planned = plan(federation, model, rounds=4, checkpoint_seconds=seconds)
    execute(planned, tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned, after=3)
    kept = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("*.json"))
    assert kept == ["fingerprint.json", *(f"round{number:06d}.json" for number in rounds)]
    result = fedc2i.resume(tmp_path / "cut", federation, model)
    assert isinstance(result, fedc2i.Result)
    assert [(own.seed, own.round) for own in result.rounds] == [(seed, n) for seed in (0, 2) for n in (1, 2, 3, 4)]
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")
    assert not {"checkpoints", "rounds"} & {path.name for path in (tmp_path / "cut").iterdir()}


def test_damage_is_repaired_or_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """A torn line, half a file, a damaged newest checkpoint, a missing report of the one before it."""
    planned = plan(federation, model, rounds=5)
    execute(planned, tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned, after=4)
    cut, whole = tmp_path / "cut", result_files(tmp_path / "whole")
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(b'{"seed": 0, "rou')
    (cut / "models").mkdir()
    for half in (cut / ".config.toml.77.part", cut / "models" / ".seed0-trained.safetensors.77.part"):
        half.write_bytes(b"half")
    for name, damaged in {
        "nothing": (),
        "newest": ("checkpoints/round000004.safetensors",),
        "its values": ("checkpoints/round000004.json",),
        "its report": ("rounds/seed2/round000004.npz",),
    }.items():
        copy = Path(shutil.copytree(cut, tmp_path / name))
        for file_name in damaged:
            content = bytearray((copy / file_name).read_bytes())
            content[len(content) // 2] ^= 4
            (copy / file_name).write_bytes(content)
        fedc2i.resume(copy, federation, model)
        assert result_files(copy) == whole, name
    saved = checkpoint.load(cut / "checkpoints")
    assert saved is not None
    name = next(name for name in saved.tensors if name.startswith("seed2/received/"))
    copy = Path(shutil.copytree(cut, tmp_path / "another type"))  # sound, but of no such run
    checkpoint.save(copy / "checkpoints", 4, {**saved.tensors, name: saved.tensors[name].double()}, saved.values)
    fedc2i.resume(copy, federation, model)
    assert result_files(copy) == whole
    for path in (cut / "checkpoints").glob("*.safetensors"):
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint can be used .* remove the files round\* there, and the run"):
        fedc2i.resume(cut, federation, model)
    for path in (cut / "checkpoints").glob("round*"):
        path.unlink()
    assert "its data was an object of Python" in refused(cut)
    fedc2i.resume(cut, federation, model)
    assert result_files(cut) == whole


def test_a_finished_run_is_read_and_cleaned(tmp_path: Path, federation: Federation, model: Model) -> None:
    folder = tmp_path / "run"
    execute(plan(federation, model), folder)
    before = files_below(folder)
    (folder / "checkpoints").mkdir()
    result = fedc2i.resume(folder)
    assert isinstance(result, fedc2i.Result)
    assert files_below(folder) == before
    assert summary(result) == json.loads(before["summary.json"] or b"")


# What is refused.


@pytest.fixture
def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model) -> Path:
    cut_run(monkeypatch, tmp_path / "run", plan(federation, model))
    return tmp_path / "run"


@dataclass(frozen=True)
class Own(FedAvg):
    name = "own-method"
    title = "Own"
    strength: float = 1.0


del Method.registry[Own.name]  # other tests take every method that is there


def test_objects_data_and_versions_must_be_the_same(
    cut: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_federation: Callable[..., Federation],
    federation: Federation,
    model: Model,
) -> None:
    assert refused(cut).endswith(
        f"its data was an object of Python; resume it there with fedc2i.resume('{cut}', data=...)"
    )
    assert "its model was an object" in refused(cut, federation)
    other = make_federation()
    other.clients[1].test.x[0, 0, 0, 0] += 1
    assert refused(cut, other, model).endswith("the data is not what the run was started with (clients b)")
    assert "(clients c)" in refused(cut, other.select(["a", "b"]), model).replace("b, c", "c")
    real = plan_module.versions()
    monkeypatch.setattr(plan_module, "versions", lambda: {**real, "torch": "1.0"})
    assert f"started with torch {real['torch']}, and here is 1.0" in refused(cut, federation, model)
    monkeypatch.setattr(plan_module, "versions", lambda: {**real, "matplotlib": "1.0"})
    fedc2i.resume(cut, federation, model)


def test_a_method_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    planned = plan(federation, model, Own(strength=2.0))
    execute(planned, tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned)
    assert "its method was an object" in refused(tmp_path / "cut", federation, model)
    assert "config.toml, a topology's file or an object given is not what" in refused(
        tmp_path / "cut", federation, model, Own()
    )
    fedc2i.resume(tmp_path / "cut", federation, model, Own(strength=2.0))
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")


def test_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: Path, federation: Federation, model: Model
) -> None:
    path, said = cut / "config.toml", "a topology's file or an object given is not what the run was started"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 9"))
    assert refused(cut, federation, model).endswith(f"{said} with (rounds was 3, is 9)")
    path.write_text(path.read_text().replace("rounds = 9", "rounds = 3").replace("workers = 0", "workers = 1"))
    fedc2i.resume(cut, federation, model)
    who, other = tmp_path / "who", tmp_path / "other"
    who.write_text("a: b\nb: c\nc: a\n")
    cut_run(monkeypatch, other, plan(federation, model, topology=str(who)))
    who.write_text("a: c\nb: c\nc: a\n")
    assert said in refused(other, federation, model)


def test_what_a_run_is_begun_on_is_on_the_disk_before_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Cut off between the two, a folder without config.toml says so; the other way round its data would be guessed."""
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.name))
    with cut_off(monkeypatch, RunFolder, "restart"):
        execute(plan(federation, model), tmp_path)
    places = [next(k for k, own in enumerate(synced) if name in own) for name in ("fingerprint.json", "config.toml")]
    assert places == sorted(places)


def test_a_state_goes_to_another_device(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """Where it was kept on a CPU all of it moves, but for what a server always has there: what clients reported.

    Clients' models and the latest uploads are the same bits here, and take up their memory once.
    """
    federation, method = make_federation((12, 9, 7, 8)), Method.registry["fedc2i-top-k"](k=1)
    how, kept = EngineSettings(rounds=2, **vars(TRAINING), executor="looped"), list[Any]()
    simulate(method, model, federation, how, [0], CPU, on_state=lambda number, state: kept.append(state()))
    checkpoint.save(tmp_path, 1, *kept[0])
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    recipe, samples = RunContext(method, model, TRAINING, 2, 0), torch.ones(4, device="meta")
    lane = SeedRun(recipe, how, federation.names, samples, Store(torch.device("meta")), False)
    lane.restore(unprefixed("seed0/", saved.tensors), saved.values["0"], 1)
    state = lane.state()[0]
    there = {name: tensor.device.type for name, tensor in state.items()}
    reports = {name for name in there if "/reports/" in name}
    assert reports
    assert there == {name: "cpu" if name in reports else "meta" for name in there}
    assert all(state[f"mailbox/{name}"] is state[f"own/{name}"] for name in model.init(0))


def test_another_device(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "checkpoints" / "fingerprint.json"
    path.write_text(path.read_text().replace('"device": "cpu",\n  "given"', '"device": "cuda",\n  "given"'))
    line = refused(cut, federation, model)
    assert "started on cuda, and here it would resume on cpu" in line
    assert line.endswith("--device cpu resumes it nonetheless")
    result = fedc2i.resume(cut, federation, model, device="cpu")
    assert isinstance(result, fedc2i.Result)
    said = json.loads((cut / "summary.json").read_text())["notes"]
    assert said == ["Started on cuda and resumed on cpu after an interruption.", *federation.all_notes]


def test_other_engines_have_their_own_ways(tmp_path: Path) -> None:
    for engine, words in (
        ("flower-sim", "keeps no checkpoints; run it again with `fedc2i run --config .*config.toml`"),
        ("flower", "a run over real sites; the same command `fedc2i coordinator start` resumes it"),
    ):
        (tmp_path / "config.toml").write_text(f'method = "fedavg"\nengine = "{engine}"\n')
        with pytest.raises(UserError, match=words):
            fedc2i.resume(tmp_path)


def test_what_is_not_a_run_folder(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    for name, said in (("nowhere", "no such folder"), ("notes.txt", "a file")):
        assert call("resume", str(tmp_path / name)).err.endswith(f"{name}: {said}, expected is a run's folder\n")
    answer = call("resume", str(tmp_path))
    assert (answer.code, answer.out) == (2, "")
    assert "has no config.toml, so it is not a run folder, or the run had not started" in answer.err
    (tmp_path / "plan.json").write_text('{"runs": [{"folder": "../up", "config": "", "fingerprint": {}}]}')
    assert "plan.json: not the plan of a comparison" in call("resume", str(tmp_path)).err
    for text in ('{"runs": []}', '{"runs": {}}', "[" * 200_000, "1", '{"runs": [1]}'):
        (tmp_path / "plan.json").write_text(text)
        assert "plan.json: not the plan of a comparison" in refused(tmp_path)


ODD: list[Any] = [None, 1, "x", [], ["a"], {}, {"a": 1}, [[1]]]


def test_a_begun_json_of_other_types_is_refused_in_a_line(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "checkpoints" / "fingerprint.json"
    sound = json.loads(path.read_text())
    for name in ("data", "versions", "given", "settings"):
        for odd in ODD if name != "given" else ("x", ["a"], [[1]], 1):
            path.write_text(json.dumps({**sound, name: odd}))
            assert refused(cut, federation, model), (name, odd)
    path.write_text("[" * 200_000)
    assert "fingerprint.json: cannot be read" in refused(cut, federation, model)
    path.unlink()
    os.mkfifo(path)  # reading it would never end
    with pytest.raises(UserError, match=r"fingerprint\.json: not a file"):
        fedc2i.resume(cut, federation, model)


def test_a_state_of_other_types_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """With the right checksum: of another layout, or made to do harm."""
    cut_run(monkeypatch, tmp_path, plan(federation, model, seeds=(0,)))
    saved = checkpoint.load(tmp_path / "checkpoints")
    assert saved is not None
    names = ("sent", "downloads", "patience", "report_bytes", "on_cpu", "layout")
    for name, odd in [*((name, None) for name in names), ("sent", []), ("report_bytes", float("inf"))]:
        values = {"0": {**saved.values["0"], name: odd}}
        checkpoint.save(tmp_path / "checkpoints", 1, saved.tensors, values)
        with pytest.raises(UserError, match=r"the checkpoint after round 1 is damaged \("):
            fedc2i.resume(tmp_path, federation, model)


METHOD = """
from dataclasses import dataclass
from fedc2i.methods.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    name = "mine"
    title = "Mine"
"""
NET = """
from torch import nn
import fedc2i

def net(classes, image):
    def build():
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 5), nn.Tanh(), nn.Linear(5, classes))
    return fedc2i.split(build, head="3", name="net")
"""


@pytest.fixture
def own_files(tmp_path: Path) -> tuple[Path, Path]:
    """A method's and a model's."""
    files = tmp_path / "mine.py", tmp_path / "net.py"
    for path, content in zip(files, (METHOD, NET), strict=True):
        path.write_text(content)
    return files


@pytest.mark.parametrize("what", ["method", "model"])
def test_a_changed_file_of_a_method_or_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, own_files: tuple[Path, Path], what: str
) -> None:
    method, model = own_files
    (planned,) = prepare([f"{method}:Mine"], {**SETTINGS, "model": f"{model}:net"}, federation)
    execute(planned, tmp_path / "whole")
    cut, changed = tmp_path / "cut", {"method": method, "model": model}[what]
    cut_run(monkeypatch, cut, planned)
    before = changed.read_text()
    changed.write_text(before + "\n# an afterthought\n")
    line = refused(cut, federation, trust=True)
    assert f"{changed}, where its {what} comes from, is not what it was when the run started" in line
    assert line.endswith(f"or run it again (fedc2i run --config {cut / 'config.toml'})")
    changed.write_text(before)
    fedc2i.resume(cut, federation, trust=True)
    assert result_files(cut) == result_files(tmp_path / "whole")


def test_a_folder_of_an_earlier_version_goes_on_without_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, own_files: tuple[Path, Path]
) -> None:
    method, model = own_files
    (planned,) = prepare([f"{method}:Mine"], {**SETTINGS, "model": f"{model}:net"}, federation)
    cut_run(monkeypatch, tmp_path / "cut", planned)
    path = tmp_path / "cut" / "checkpoints" / "fingerprint.json"
    written = json.loads(path.read_text())
    assert written.pop("files").keys() == {"method", "model"}
    path.write_text(json.dumps(written))
    method.write_text(METHOD + "\n")
    assert isinstance(fedc2i.resume(tmp_path / "cut", federation, trust=True), fedc2i.Result)


def test_a_changed_file_in_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model, own_files: tuple[Path, Path]
) -> None:
    """Of a run that was not begun yet, too: the plan of the comparison has the checksum."""
    wanted = ["fedavg", f"{own_files[0]}:Mine"]
    with cut_off(monkeypatch, RunWriter, "record", 3):
        fedc2i.compare(wanted, federation, model=model, out=tmp_path / "cut", **SETTINGS)
    assert not (tmp_path / "cut" / "mine").exists()
    own_files[0].write_text(METHOD + "\n")
    with pytest.raises(UserError, match="where its method comes from, is not what it was"):
        fedc2i.resume(tmp_path / "cut", federation, model, trust=True)


@pytest.mark.parametrize("name", ["fingerprint.json", "plan.json"])
def test_records_too_large_for_memory_are_not_read(cut: Path, federation: Federation, model: Model, name: str) -> None:
    path = cut / "checkpoints" / name if name == "fingerprint.json" else cut / name
    with path.open("ab") as file:
        file.truncate(2**42)
    with pytest.raises(UserError, match=rf"{name}: its contents declare 4,398,046,511,104 bytes, but .* are free"):
        fedc2i.resume(cut, federation, model)


def test_a_run_with_noise_that_goes_on_sends_what_was_sent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Bit for bit, also in rounds that are done a second time: noise and all, nothing is sent that was not."""
    sent: dict[int, list[dict[str, torch.Tensor]]] = {}
    receive = Mailbox.receive

    def listen(self: Mailbox, clients: Any, uploads: Any, round: int, *measured: Any) -> dict[int, str]:
        sent.setdefault(round, []).append({name: own.clone() for name, own in uploads.items()})
        return receive(self, clients, uploads, round, *measured)

    monkeypatch.setattr(Mailbox, "receive", listen)
    planned = plan(federation, model, rounds=4, seeds=(0,), clip=0.3, noise=0.5)
    cut_run(monkeypatch, tmp_path, planned, after=3)
    (tmp_path / "checkpoints" / "round000003.safetensors").write_bytes(b"")  # it falls back by one more
    fedc2i.resume(tmp_path, federation, model)
    assert {round: len(own) for round, own in sent.items()} == {1: 1, 2: 1, 3: 2, 4: 2}
    assert all(same(own[0], own[-1]) for own in sent.values())
    assert not same(sent[3][0], sent[4][0])


# How much a checkpoint writes.


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {}),
        ("fedc2i", {}),
        ("fedrep", {}),
        ("fedavg", {"clip": 0.5, "noise": 0.1}),
        ("fedc2i", {"seeds": (0, 1)}),
        ("fedavg", {"clients_per_round": 2, "evaluate_every": 0}),
        ("ditto", {"clients_per_round": 2}),
    ],
    ids=str,
)
def test_the_size_of_a_checkpoint_is_known_from_the_shapes(
    tmp_path: Path, federation: Federation, model: Model, name: str, settings: dict[str, Any]
) -> None:
    """Up to a model of the server's; of three clients that is a part worth mentioning."""
    planned = plan(federation, model, name, **{"rounds": 3, "seeds": (0,), "clients_per_round": "100%", **settings})
    sizes: list[int] = []

    def keep(number: int, state: Callable[[], Any]) -> None:
        checkpoint.save(tmp_path, number, *state())
        sizes.append((tmp_path / f"round{number:06d}.safetensors").stat().st_size)

    compute(planned, on_state=keep)
    assert state_size(*planned.parts) == pytest.approx(max(sizes), rel=0.25)


def test_large_checkpoints_are_told_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    said: list[str] = []

    class Told:
        def begin(self, result: fedc2i.Result) -> None:
            said.append("begin")

        def client(self, done: int, of: int) -> None: ...

        def round(self, report: Round) -> None: ...

        def say(self, line: str) -> None:
            said.append(line)

    execute(plan(federation, model), tmp_path / "small", Told())
    monkeypatch.setattr(writer, "MUCH", 200_000)  # two seeds of three clients with 4,642 numbers write 223 kB
    for often in (0, 30):
        execute(plan(federation, model, clients_per_round=3, checkpoint_seconds=often), tmp_path / str(often), Told())
    lines = [
        f"checkpoints of about 0.0 GB are written into {tmp_path / name / 'checkpoints'} {often}; "
        "checkpoint_seconds=S (--set) changes that"
        for name, often in (("0", "after every round"), ("30", "every 30 s or more"))
    ]
    assert said == ["begin", lines[0], "begin", lines[1], "begin"]


# Two at once.


def test_only_one_process_at_a_time(cut: Path, federation: Federation, model: Model) -> None:
    """Another process holds the folder until it dies, however it dies."""
    hold = "import fcntl, os, sys, time; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); "
    hold += "print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", hold, str(cut)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert refused(cut, federation, model).endswith("another process is at work on this run; wait for it or end it")
        other.kill()
        other.wait()
    fedc2i.resume(cut, federation, model)


def test_a_run_that_goes_on_cannot_be_resumed_beside_it(tmp_path: Path, federation: Federation, model: Model) -> None:
    lines: list[str] = []

    class Impatient:
        def begin(self, result: fedc2i.Result) -> None: ...

        def client(self, done: int, of: int) -> None: ...

        def round(self, report: Round) -> None:
            with pytest.raises(UserError) as error:
                fedc2i.resume(tmp_path / "run", federation, model)
            lines.append(str(error.value))

    fedc2i.run("fedavg", federation, model=model, out=tmp_path / "run", observer=Impatient(), **SETTINGS)
    assert len(lines) == 6
    assert all("another process is at work" in line for line in lines)


# Comparisons, and the command.


def test_a_comparison_goes_on_with_what_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_federation: Callable[..., Federation]
) -> None:
    """The first method is finished, the second is in its second round, the third has not begun."""
    data = write_arrays(tmp_path / "data", make_federation((12, 9, 7)))
    settings: dict[str, Any] = {**SETTINGS, "model": "lenet5"}
    methods = ["local", "fedc2i:gamma=2", "fedavg"]
    monkeypatch.chdir(tmp_path)
    fedc2i.compare(methods, data, out="whole", **settings)
    with cut_off(monkeypatch, RunWriter, "record", 6 + 3):
        fedc2i.compare(methods, data, out="cut", **settings)
    assert sorted(path.name for path in Path("cut").iterdir()) == ["fedc2i-gamma=2.0", "local", "plan.json"]
    answer = call("resume", "cut", "--json")
    assert answer.code == 0, answer.err
    assert "cut/fedc2i-gamma=2.0 resumes after round 1" in answer.err
    assert list(json.loads(answer.out)["results"]) == ["local", "fedc2i:gamma=2.0", "fedavg"]
    for name in ("local", "fedc2i-gamma=2.0", "fedavg"):
        assert result_files(Path("cut") / name) == result_files(Path("whole") / name)
    assert Path("cut/comparison.md").read_text() == Path("whole/comparison.md").read_text()
    for key, got in json.loads(Path("cut/comparison.json").read_text()).items():
        want = json.loads(Path("whole/comparison.json").read_text())[key]
        assert {name for name in want if got[name] != want[name]} <= {"seconds", "seconds_per_round"}
    before = files_below(Path("cut"))
    again = call("resume", "cut", "--json")
    assert "cut is finished" in again.err
    assert (again.code, json.loads(again.out)) == (0, json.loads(answer.out))
    assert files_below(Path("cut")) == before


def test_an_error_that_does_not_name_the_path_gets_no_hint() -> None:
    with pytest.raises(UserError, match=r"^device=cuda: no device$"), paths_from_start({"data": "table:d"}):
        raise UserError("device=cuda: no device")


def test_a_relative_path_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_federation: Callable[..., Federation]
) -> None:
    write_arrays(tmp_path / "data", make_federation((12, 9)))
    monkeypatch.chdir(tmp_path)
    with cut_off(monkeypatch, RunWriter, "record", 2):
        fedc2i.run("local", "arrays:data", out="cut", **{**SETTINGS, "model": "lenet5"})
    (tmp_path / "other").mkdir()
    monkeypatch.chdir("other")
    answer = call("resume", "../cut")
    assert answer.code == 2
    assert "is relative to the folder in which the run was started; repeat the command there\n" in answer.err
    monkeypatch.chdir(tmp_path)
    answer = call("resume", "cut", "--device", "cuda:99")
    assert (answer.code, "relative" in answer.err) == (2, False)
    assert call("resume", "cut").code == 0


def test_methods_of_ones_own_in_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    monkeypatch.setitem(Method.registry, Own.name, Own)  # as for everyone whose class is not forgotten again
    methods = [Own(), Own(strength=3.0)]
    with cut_off(monkeypatch, RunWriter, "record", 6 + 3):
        fedc2i.compare(methods, federation, model=model, out=tmp_path / "cut", **SETTINGS)
    results = fedc2i.resume(tmp_path / "cut", federation, model, methods[::-1])
    assert isinstance(results, list)
    assert [result.key for result in results] == ["own-method", "own-method:strength=3.0"]


def test_the_figures_are_drawn_before_a_run_counts_as_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    with cut_off(monkeypatch, figures, "draw_run"):
        fedc2i.run("fedavg", federation, model=model, out=tmp_path / "run", **SETTINGS)
    monkeypatch.setattr(figures, "draw_run", lambda result, folder: (folder / "accuracy.png").write_bytes(b"drawn"))
    fedc2i.resume(tmp_path / "run", federation, model)
    assert (tmp_path / "run" / "accuracy.png").read_bytes() == b"drawn"
