"""A run that was cut off and gone on with ends like one that never was, bit for bit."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i import Federation, Method, Model, UserError, checkpoint, keeping, runs
from fedc2i.engine import Outcome, Round, Settings, federate
from fedc2i.engine.client import Recipe
from fedc2i.engine.lane import Lane
from fedc2i.engine.saving import Start, ends_of
from fedc2i.methods.fedavg import FedAvg
from fedc2i.params import unprefixed
from fedc2i.plans import Plan, prepare
from fedc2i.report import figures
from fedc2i.runs import RunFolder
from fedc2i.training import Training
from helpers import call, files_below, write_arrays
from method_checks import OF_THEIR_OWN

CPU = torch.device("cpu")
TRAINING = Training(batch_size=5, lr=0.02, epochs=1)


class Cut(BaseException):
    """The moment at which a process is gone; nothing in the package catches it."""


# The engine: the state behind any round, through a file and back.


def same(one: Any, other: Any) -> bool:
    """To the bit, nan and the sign of zero included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and same(one.cpu().numpy(), other.cpu().numpy())
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    return repr(one) == repr(other)


def without_time(report: Round) -> dict[str, Any]:
    return {**vars(report), "seconds": 0.0, "metrics": dict(report.metrics), "influence": dict(report.influence)}


def assert_same_end(got: dict[int, Outcome], want: dict[int, Outcome]) -> None:
    assert list(got) == list(want)
    for seed, one in want.items():
        for part in ("trained", "received"):
            assert same(getattr(got[seed], part), getattr(one, part)), (seed, part)
        assert same(without_time(got[seed].last), without_time(one.last))


def assert_goes_on(
    folder: Path,
    method: Method,
    model: Model,
    federation: Federation,
    seeds: tuple[int, ...] = (0,),
    device: torch.device = CPU,
    **settings: Any,
) -> dict[int, Outcome]:
    """After every round the state goes to disk and back, a fresh federation goes on from there, and ends the same."""
    how = Settings(**{"rounds": 3, "training": TRAINING, "executor": "looped", **settings})
    reports: list[Round] = []

    def keep(number: int, is_last: bool, state: Callable[[], Any]) -> None:
        checkpoint.save(folder / str(number), number, *state())

    whole = federate(method, model, federation, how, seeds, device, reports.append, keep=keep)
    for cut in range(1, max(report.round for report in reports) + 1):
        saved = checkpoint.load(folder / str(cut))
        assert saved is not None
        assert ends_of(saved.values, cut).keys() == set(seeds)
        before = [report for report in reports if report.round <= cut]
        last = {report.seed: report for report in before}
        after: list[Round] = []
        start = Start(saved.round, saved.tensors, saved.values, last)
        assert_same_end(federate(method, model, federation, how, seeds, device, after.append, start=start), whole)
        assert [without_time(own)["round"] for own in after] == [own.round for own in reports if own.round > cut]
        for got, want in zip(before + after, reports, strict=True):
            assert same(without_time(got), without_time(want))
    return whole


def model_for(name: str, make_model: Callable[..., Model]) -> Model:
    return make_model(batch_norm=True) if name == "fedbn" else make_model()


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_every_method_goes_on(
    tmp_path: Path, name: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation = make_federation((12, 9, 7, 8), validation=4)
    method, model = Method.registry[name](), model_for(name, make_model)
    assert_goes_on(tmp_path, method, model, federation, clients_per_round="50%", evaluate_every=2)


CASES: dict[str, dict[str, Any]] = {
    "stacked": {"executor": "stacked"},
    "stacked-half": {"executor": "stacked", "clients_per_round": "50%"},
    "workers": {"executor": "workers", "workers": 2},
    "ring": {"topology": "ring", "clients_per_round": 2, "evaluate_every": 0},
    "private": {"clip": 0.5, "noise": 0.3, "clients_per_round": 2, "evaluate_every": 2},
    "own-starts": {"init": "independent", "evaluate_every": 3, "rounds": 4},
}


@pytest.mark.parametrize(
    ("name", "case"),
    [*(("fedc2i", case) for case in CASES), *(("fedc2i-server", case) for case in ("stacked", "ring"))],
)
def test_every_way_to_run_goes_on(
    tmp_path: Path, name: str, case: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation = make_federation((12, 9, 7, 6), validation=4)
    assert_goes_on(tmp_path, Method.registry[name](), make_model(), federation, (3, 0), **CASES[case])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["looped", "stacked", "stacked-half", "private"])
@pytest.mark.parametrize("name", ["fedavg", "fedc2i", "fedc2i-plus", "fedrep", "fedproto", "pfedgraph"])
def test_a_gpu_goes_on(
    tmp_path: Path, name: str, case: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation, method = make_federation((12, 9, 7, 6), validation=4), Method.registry[name]()
    if case == "private" and name not in ("fedavg", "fedc2i"):
        pytest.skip("one method of each kind is enough")
    assert_goes_on(tmp_path, method, make_model(), federation, (3, 0), torch.device("cuda"), **CASES.get(case, {}))


def test_a_model_with_statistics_and_dropout_goes_on(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(batch_norm=True, dropout=0.3), federation)


def test_seeds_that_have_ended_are_kept(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    federation = make_federation((12, 9, 7), validation=4)
    settings: dict[str, Any] = {"rounds": 12, "patience": 1, "training": Training(epochs=1, lr=0.02)}
    outcomes = assert_goes_on(tmp_path, Method.registry["fedc2i"](), model, federation, (0, 1, 2), **settings)
    assert len({outcome.last.round for outcome in outcomes.values()}) > 1, "seeds are to be chosen so that they differ"


def test_a_client_with_unusable_uploads_goes_on(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """One that never got through has zeros in the mailbox, with the round 0 beside them."""
    assert_goes_on(tmp_path, FedAvg(), model, make_federation((12, 9, 7)), attack="nan@b")


def test_what_is_the_same_is_written_once(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """FedC²I relays the uploads, which are the clients' own models: a model each, and the starts of the next round."""
    federation = make_federation((12, 9, 7, 6))
    assert_goes_on(tmp_path, Method.registry["fedc2i"](), model, federation, rounds=1)
    size = (tmp_path / "1" / "round000001.safetensors").stat().st_size
    models = 4 * 4 * sum(tensor.numel() for tensor in model.init(0).values())
    assert 2 * models < size < 2.1 * models


def test_the_state_of_another_model_is_refused(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(), federation)
    saved = checkpoint.load(tmp_path / "1")
    assert saved is not None
    with pytest.raises(UserError, match="the checkpoint after round 1 is of another model or of other clients"):
        federate(FedAvg(), make_model(bias=False), federation, Settings(rounds=3), [0], start=Start(*saved, {}))


# Folders.


@pytest.fixture(autouse=True)
def _without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than all the rest; that they are drawn is tested where it matters."""
    monkeypatch.setattr(figures, "draw_run", lambda result, folder: None)
    monkeypatch.setattr(
        figures, "draw_comparison", lambda results, folder: (folder / "comparison.png").write_bytes(b"")
    )


SETTINGS: dict[str, Any] = {
    **{"rounds": 3, "epochs": 1, "batch_size": 5, "seeds": (0, 2), "clients_per_round": 2},
    **{"executor": "looped", "device": "cpu"},
}


def plan(federation: Federation, model: Model, wanted: str | Method = "fedc2i", **settings: Any) -> Plan:
    return prepare([wanted], {**SETTINGS, **settings}, federation, model)[0]


@contextmanager
def cut_off(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, at: int = 1) -> Iterator[None]:
    """The process is gone when ``owner.name`` is called for the ``at``-th time."""
    real, calls = getattr(owner, name), []

    def count(*given: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise Cut
        return real(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, count)
        with pytest.raises(Cut):
            yield


def cut_run(monkeypatch: pytest.MonkeyPatch, folder: Path, planned: Plan, after: int = 1) -> None:
    """Runs a plan until it has written the checkpoint of round ``after``; it is gone in the round behind that."""
    seeds = len(planned.config.seeds)
    with cut_off(monkeypatch, RunFolder, "record", seeds * after + 1):
        planned.execute(folder)


def result_files(folder: Path) -> dict[str, Any]:
    """What must be the same: metrics, models and the summary without times by their bytes, influence by its arrays."""
    found: dict[str, Any] = {}
    for name, content in files_below(folder).items():
        if name.endswith((".png", ".md")):
            continue
        assert name == "." or not Path(name).name.startswith("."), "something half-written was left"
        found[name] = content
    summary = json.loads(found["summary.json"])
    found["summary.json"] = {name: own for name, own in summary.items() if not name.startswith("seconds")}
    if "influence.npz" in found:
        with np.load(folder / "influence.npz") as archive:
            found["influence.npz"] = {name: archive[name].tobytes() for name in archive.files}
    return found


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_folder_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model, every: int
) -> None:
    planned = plan(federation, model, rounds=4, checkpoint_every=every)
    planned.execute(tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned, after=3)
    kept = sorted(path.name for path in (tmp_path / "cut" / "checkpoints").glob("*.json"))
    assert (
        kept
        == {
            1: ["begun.json", "round000002.json", "round000003.json"],
            2: ["begun.json", "round000002.json"],
            5: ["begun.json"],
        }[every]
    )
    result = fedc2i.resume(tmp_path / "cut", federation, model)
    assert isinstance(result, fedc2i.Result)
    assert [(own.seed, own.round) for own in result.rounds] == [(seed, n) for seed in (0, 2) for n in (1, 2, 3, 4)]
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")
    assert not {"checkpoints", "rounds"} & {path.name for path in (tmp_path / "cut").iterdir()}


def test_no_checkpoints_are_written_if_none_are_wanted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    planned = plan(federation, model, checkpoint_every=0)
    planned.execute(tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned, after=2)
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == ["begun.json"]
    assert not (tmp_path / "cut" / "rounds").exists()
    fedc2i.resume(tmp_path / "cut", federation, model)
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")


def test_damage_is_repaired_or_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """A torn line, half a file, a damaged newest checkpoint, a missing report of the one before it."""
    planned = plan(federation, model, rounds=5)
    planned.execute(tmp_path / "whole")
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
    plan(federation, model).execute(folder)
    before = files_below(folder)
    (folder / "checkpoints").mkdir()
    result = fedc2i.resume(folder)
    assert isinstance(result, fedc2i.Result)
    assert files_below(folder) == before
    assert result.summary() == json.loads(before["summary.json"] or b"")


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


def refused(folder: Path, *given: Any, **more: Any) -> str:
    """The line of a refusal, which leaves everything as it was."""
    before = files_below(folder)
    with pytest.raises(UserError) as error:
        fedc2i.resume(folder, *given, **more)
    assert files_below(folder) == before
    assert "\n" not in str(error.value)
    return str(error.value)


def test_objects_of_python_are_asked_for(cut: Path, federation: Federation, model: Model) -> None:
    assert refused(cut).endswith(f"its data was an object of Python; go on there with fedc2i.resume('{cut}', data=...)")
    assert "its model was an object" in refused(cut, federation)
    fedc2i.resume(cut, federation, model)


def test_a_method_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    planned = plan(federation, model, Own(strength=2.0))
    planned.execute(tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned)
    assert "its method was an object" in refused(tmp_path / "cut", federation, model)
    assert "config.toml, a topology's file or an object given is not what" in refused(
        tmp_path / "cut", federation, model, Own()
    )
    fedc2i.resume(tmp_path / "cut", federation, model, Own(strength=2.0))
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")


def test_other_data(cut: Path, make_federation: Callable[..., Federation], model: Model) -> None:
    other = make_federation()
    other.clients[1].test.x[0, 0, 0, 0] += 1
    assert refused(cut, other, model).endswith("the data is not what the run was begun with (clients b)")
    assert "(clients c)" in refused(cut, other.select(["a", "b"]), model).replace("b, c", "c")


def test_other_settings(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "config.toml"
    path.write_text(path.read_text().replace("rounds = 3", "rounds = 9"))
    assert refused(cut, federation, model).endswith(
        "config.toml, a topology's file or an object given is not what the run was begun with (rounds was 3, is 9)"
    )
    path.write_text(path.read_text().replace("rounds = 9", "rounds = 3").replace("workers = 0", "workers = 1"))
    fedc2i.resume(cut, federation, model)


def test_another_topology_in_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    path, cut = tmp_path / "who", tmp_path / "cut"
    path.write_text("a: b\nb: c\nc: a\n")
    cut_run(monkeypatch, cut, plan(federation, model, topology=str(path)))
    path.write_text("a: c\nb: c\nc: a\n")
    assert "a topology's file" in refused(cut, federation, model)


def test_what_a_run_is_begun_on_is_on_the_disk_before_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Cut off between the two, a folder without config.toml says so; the other way round its data would be guessed."""
    synced: list[str] = []
    monkeypatch.setattr(runs, "_sync", lambda path: synced.append(path.name))
    with cut_off(monkeypatch, RunFolder, "restart"):
        plan(federation, model).execute(tmp_path)
    places = [next(k for k, own in enumerate(synced) if name in own) for name in ("begun.json", "config.toml")]
    assert places == sorted(places)


def test_a_state_goes_to_another_device(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    """Where it was kept on a CPU all of it moves, but for what a server always has there: what clients reported.

    Clients' models and the latest uploads are the same bits here, and take up their memory once.
    """
    federation, method = make_federation((12, 9, 7, 8)), Method.registry["fedc2i"](top_k=1)
    how, kept = Settings(rounds=2, training=TRAINING, executor="looped"), list[Any]()
    federate(method, model, federation, how, [0], CPU, keep=lambda number, is_last, state: kept.append(state()))
    checkpoint.save(tmp_path, 1, *kept[0])
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    recipe, samples = Recipe(method, model, TRAINING, 2, 0), torch.ones(4, device="meta")
    lane = Lane(recipe, how, federation.names, samples, torch.device("meta"))
    lane.restore(unprefixed("seed0/", saved.tensors), saved.values["0"], 1)
    state = lane.state()[0]
    there = {name: tensor.device.type for name, tensor in state.items()}
    reports = {name for name in there if "/reports/" in name}
    assert reports
    assert there == {name: "cpu" if name in reports else "meta" for name in there}
    assert all(state[f"mailbox/{name}"] is state[f"own/{name}"] for name in model.init(0))


def test_other_versions(cut: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model) -> None:
    real = keeping.versions()
    monkeypatch.setattr(keeping, "versions", lambda: {**real, "torch": "1.0"})
    line = refused(cut, federation, model)
    assert f"begun with torch {real['torch']}, and here is 1.0" in line
    monkeypatch.setattr(keeping, "versions", lambda: {**real, "matplotlib": "1.0"})
    fedc2i.resume(cut, federation, model)


def test_another_device(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "checkpoints" / "begun.json"
    path.write_text(path.read_text().replace('"device": "cpu",\n  "given"', '"device": "cuda",\n  "given"'))
    line = refused(cut, federation, model)
    assert "begun on cuda, and here it would go on on cpu" in line
    assert line.endswith("--device cpu goes on nonetheless")
    result = fedc2i.resume(cut, federation, model, device="cpu")
    assert isinstance(result, fedc2i.Result)
    said = json.loads((cut / "summary.json").read_text())["notes"]
    assert said == ["Begun on cuda and gone on with on cpu after an interruption."]


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("flower-sim", "engine=flower-sim keeps no checkpoints; run it again with `fedc2i run --config .*config.toml`"),
        ("flower", "a run over real sites; `fedc2i coordinator start` goes on with it when given once more"),
    ],
)
def test_other_engines_have_their_own_ways(tmp_path: Path, engine: str, words: str) -> None:
    (tmp_path / "config.toml").write_text(f'method = "fedavg"\nengine = "{engine}"\n')
    with pytest.raises(UserError, match=words):
        fedc2i.resume(tmp_path)


def test_what_is_not_a_run_folder(tmp_path: Path) -> None:
    assert call("resume", str(tmp_path / "nowhere")).err.endswith("nowhere: no such folder\n")
    answer = call("resume", str(tmp_path))
    assert (answer.code, answer.out) == (2, "")
    assert "has no config.toml, so it is not a run folder, or the run had not begun" in answer.err
    (tmp_path / "plan.json").write_text('{"runs": [{"folder": "../up", "config": "", "begun": {}}]}')
    assert "plan.json: not the plan of a comparison" in call("resume", str(tmp_path)).err


ODD: list[Any] = [None, 1, "x", [], ["a"], {}, {"a": 1}, [[1]]]


def test_a_begun_json_of_other_types_is_refused_in_a_line(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "checkpoints" / "begun.json"
    sound = json.loads(path.read_text())
    for name in ("data", "versions", "given", "settings"):
        for odd in ODD if name != "given" else ("x", ["a"], [[1]], 1):
            path.write_text(json.dumps({**sound, name: odd}))
            assert refused(cut, federation, model), (name, odd)
    path.write_text("[" * 200_000)
    assert "begun.json: cannot be read" in refused(cut, federation, model)


def test_a_plan_that_is_none_is_refused_in_a_line(tmp_path: Path) -> None:
    for text in ('{"runs": []}', '{"runs": {}}', "[" * 200_000, "1", '{"runs": [1]}'):
        (tmp_path / "plan.json").write_text(text)
        assert "plan.json: not the plan of a comparison" in refused(tmp_path)


def test_a_state_of_other_types_is_refused_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """With the right checksum: of another layout, or made to do harm."""
    cut_run(monkeypatch, tmp_path, plan(federation, model, seeds=(0,)))
    saved = checkpoint.load(tmp_path / "checkpoints")
    assert saved is not None
    names = ("sent", "audience", "downloads", "patience", "bytes_told", "on_cpu")
    for name, odd in [*((name, None) for name in names), ("sent", []), ("bytes_told", float("inf"))]:
        values = {"0": {**saved.values["0"], name: odd}}
        checkpoint.save(tmp_path / "checkpoints", 1, saved.tensors, values)
        with pytest.raises(UserError, match=r"the checkpoint after round 1 is damaged \("):
            fedc2i.resume(tmp_path, federation, model)


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
            lines.append(refused(tmp_path / "run", federation, model))

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
    with cut_off(monkeypatch, RunFolder, "record", 6 + 3):
        fedc2i.compare(methods, data, out="cut", **settings)
    assert sorted(path.name for path in Path("cut").iterdir()) == ["fedc2i-gamma=2.0", "local", "plan.json"]
    answer = call("resume", "cut", "--json")
    assert answer.code == 0, answer.err
    assert "cut/fedc2i-gamma=2.0 goes on behind round 1" in answer.err
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


def test_methods_of_ones_own_in_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    monkeypatch.setitem(Method.registry, Own.name, Own)  # as for everyone whose class is not forgotten again
    methods = [Own(), Own(strength=3.0)]
    with cut_off(monkeypatch, RunFolder, "record", 6 + 3):
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
