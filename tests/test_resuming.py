"""A run that was cut off and gone on with ends like one that never was, bit for bit."""

from __future__ import annotations

import json
import os
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
from fedc2i.engine.schedule import choose
from fedc2i.engine.server import Mailbox
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
    if case == "private":
        pytest.importorskip("opacus")
        if name not in ("fedavg", "fedc2i"):
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


# A state with the right checksum that is not one of the run.

TURNED = {  # what is there in place of a tensor
    "of another type": lambda own: own.to(torch.int32),
    "of another shape": lambda own: own.unsqueeze(-1),
    "of other clients": lambda own: own[:-1],
    "missing": lambda own: None,
}
VALUES: list[tuple[str, Any]] = [
    *(("downloads", odd) for odd in (["a"], [[99]], [[-1]], [[0, 0]], [[True]], [[0, 1, 2, 3]], [], [[0], [1]], [0])),
    *(
        ("sent", odd)
        for odd in ([], [1, 1], [99, 98, 97], [0, 0, 2], [-1, 0, 0], ["a", 0, 0], [None] * 3, [True] * 3, [1.0] * 3)
    ),
    *(("patience", odd) for odd in ([None, None], [0.5, None], ["a", 0], [0.5, -1], [0.5, 2], [float("nan"), 0])),
    *(("audience", odd) for odd in ([], [0], [0, 1, 99], [0, 1, 1], ["a"])),
    *(("bytes_told", odd) for odd in (-1, 10**30, 0.5, "1")),
    *(("on_cpu", odd) for odd in (["nothing"], [0], [None])),
    *(("layout", odd) for odd in ({}, [], {"own/a": ["float32", 3]})),
]


def with_other(saved: checkpoint.Checkpoint, name: str, turn: Callable[[torch.Tensor], Any]) -> dict[str, torch.Tensor]:
    changed = {**saved.tensors, name: turn(saved.tensors[name])}
    return {name: own for name, own in changed.items() if own is not None}


def kept_by(folder: Path) -> checkpoint.Checkpoint:
    saved = checkpoint.load(folder / "checkpoints")
    assert saved is not None
    return saved


@pytest.mark.parametrize("part", ["own", "received", "mailbox", "server0/shared"])
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model, part: str
) -> None:
    """In whatever way, in one of a part's tensors; before anything is computed or written."""
    cut_run(monkeypatch, tmp_path, plan(federation, model, seeds=(0,)))
    saved = kept_by(tmp_path)
    name = next(name for name in saved.tensors if name.startswith(f"seed0/{part}/"))
    for how, turn in TURNED.items():
        checkpoint.save(tmp_path / "checkpoints", 1, with_other(saved, name, turn), saved.values)
        line = refused(tmp_path, federation, model)
        assert "no checkpoint can be used (the checkpoint after round 1 is " in line, how
        said = "of another model or of other clients" if part == "own" else f"damaged ({name.removeprefix('seed0/')}: ["
        assert said in line, how
    checkpoint.save(tmp_path / "checkpoints", *saved)
    fedc2i.resume(tmp_path, federation, model)


def test_values_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    cut_run(monkeypatch, tmp_path, plan(federation, model, seeds=(0,), clients_per_round=3))
    saved = kept_by(tmp_path)
    for name, odd in VALUES:
        assert repr(saved.values["0"][name]) != repr(odd)
        checkpoint.save(tmp_path / "checkpoints", 1, saved.tensors, {"0": {**saved.values["0"], name: odd}})
        assert "the checkpoint after round 1 is damaged (" in refused(tmp_path, federation, model), (name, odd)
    checkpoint.save(tmp_path / "checkpoints", *saved)
    fedc2i.resume(tmp_path, federation, model)


def test_an_audience_must_be_of_clients_and_have_those_who_train_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """As many as have received, so that only the numbers tell."""
    planned = plan(federation, model, seeds=(0,))
    cut_run(monkeypatch, tmp_path, planned)
    saved, next_ones = kept_by(tmp_path), [*choose(0, planned.config.settings(), 3, 2)]
    (other,) = {0, 1, 2} - {*next_ones}
    for odd in ([*next_ones, 99], [*next_ones, next_ones[0]], [*next_ones, "a"]):
        checkpoint.save(tmp_path / "checkpoints", 1, saved.tensors, {"0": {**saved.values["0"], "audience": odd}})
        assert "there are 3 clients" in refused(tmp_path, federation, model), odd
    few = {name: own[:2] if "/received/" in name else own for name, own in saved.tensors.items()}
    layout = {
        name: [kind, 2, *own] for name, (kind, _, *own) in saved.values["0"]["layout"].items() if "eived/" in name
    }
    said = {**saved.values["0"], "layout": {**saved.values["0"]["layout"], **layout}, "audience": [other, next_ones[0]]}
    checkpoint.save(tmp_path / "checkpoints", 1, few, {"0": said})
    assert "too few" in refused(tmp_path, federation, model)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_seed_goes_on_only_between_two_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model, number: int
) -> None:
    cut_run(monkeypatch, tmp_path, plan(federation, model, seeds=(0,)))
    saved = kept_by(tmp_path)
    for path in (tmp_path / "checkpoints").glob("round*"):
        path.unlink()
    values = {"0": {**saved.values["0"], "sent": [0, 0, 0]}}
    checkpoint.save(tmp_path / "checkpoints", number, saved.tensors, values)
    assert f"a seed that goes on behind round {number} of 3" in refused(tmp_path, federation, model)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        *(("fedavg", part) for part in ("received", "mailbox")),
        *(("fedc2i:top_k=1", part) for part in ("received", "server0/reports")),
        ("pfedgraph", "server0/personal"),
    ],
)
def test_a_state_that_does_not_say_how_it_is_laid_out(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_federation: Callable[..., Federation],
    model: Model,
    method: str,
    part: str,
) -> None:
    """As one of an earlier version: it is gone on with, and refused by what the run itself knows."""
    federation = make_federation((12, 9, 7, 6, 8))
    planned = plan(federation, model, method, seeds=(0,), clients_per_round=4)
    planned.execute(tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned)
    saved = kept_by(tmp_path / "cut")
    values = {"0": {name: own for name, own in saved.values["0"].items() if name != "layout"}}
    name = next(name for name in saved.tensors if name.startswith(f"seed0/{part}/"))
    known = set(TURNED) if part == "received" else {"of other clients"}
    for how in sorted(known | ({"of another type"} if part.endswith("reports") else set())):
        checkpoint.save(tmp_path / "cut" / "checkpoints", 1, with_other(saved, name, TURNED[how]), values)
        assert "the checkpoint after round 1 is damaged (" in refused(tmp_path / "cut", federation, model), how
    checkpoint.save(tmp_path / "cut" / "checkpoints", 1, saved.tensors, values)
    fedc2i.resume(tmp_path / "cut", federation, model)
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")


def test_the_models_of_a_seed_that_has_ended_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Cut off behind the last round, before the run's results are written."""
    planned = plan(federation, model)
    planned.execute(tmp_path / "whole")
    cut = tmp_path / "cut"
    with cut_off(monkeypatch, RunFolder, "finish"):
        planned.execute(cut)
    saved = kept_by(cut)
    assert saved.values == {"0": {"ended": 3}, "2": {"ended": 3}}
    for path in (cut / "checkpoints").glob("round000002.*"):
        path.unlink()
    for part in ("own", "received"):
        name = next(name for name in saved.tensors if name.startswith(f"seed2/{part}/"))
        for how, turn in TURNED.items():
            checkpoint.save(cut / "checkpoints", 3, with_other(saved, name, turn), saved.values)
            assert "the checkpoint after round 3 is " in refused(cut, federation, model), (part, how)
    for odd in (0, 4, -1, True, 2.5):
        checkpoint.save(cut / "checkpoints", 3, saved.tensors, {**saved.values, "2": {"ended": odd}})
        assert "the checkpoint after round 3 is damaged (ended=" in refused(cut, federation, model), odd
    checkpoint.save(cut / "checkpoints", *saved)
    fedc2i.resume(cut, federation, model)
    assert result_files(cut) == result_files(tmp_path / "whole")


def test_behind_a_state_that_does_not_fit_the_one_before_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    planned = plan(federation, model, rounds=4)
    planned.execute(tmp_path / "whole")
    cut_run(monkeypatch, tmp_path / "cut", planned, after=3)
    saved = kept_by(tmp_path / "cut")
    name = next(name for name in saved.tensors if name.startswith("seed2/received/"))
    spoiled = with_other(saved, name, TURNED["of another type"])
    checkpoint.save(tmp_path / "cut" / "checkpoints", 3, spoiled, saved.values)
    result = fedc2i.resume(tmp_path / "cut", federation, model)
    assert isinstance(result, fedc2i.Result)
    assert result_files(tmp_path / "cut") == result_files(tmp_path / "whole")


def test_the_command_refuses_a_state_that_does_not_fit_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_federation: Callable[..., Federation]
) -> None:
    data = write_arrays(tmp_path / "data", make_federation((12, 9, 7)))
    with cut_off(monkeypatch, RunFolder, "record", 3):
        fedc2i.run("fedc2i", data, out=tmp_path / "run", **SETTINGS, model="lenet5")
    saved = kept_by(tmp_path / "run")
    spoiled = with_other(saved, "seed0/received/conv1.weight", TURNED["of another type"])
    checkpoint.save(tmp_path / "run" / "checkpoints", 1, spoiled, saved.values)
    answer = call("resume", str(tmp_path / "run"))
    assert (answer.code, answer.out) == (2, "")
    assert "the checkpoint after round 1 is damaged (received/conv1.weight: ['float32', " in answer.err
    assert "Traceback" not in answer.err
    assert answer.err.count("\n") == 1


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
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A method's and a model's; what they define is forgotten again."""
    monkeypatch.setattr(Method, "registry", dict(Method.registry))
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
    planned.execute(tmp_path / "whole")
    cut, changed = tmp_path / "cut", {"method": method, "model": model}[what]
    cut_run(monkeypatch, cut, planned)
    before = changed.read_text()
    changed.write_text(before + "\n# an afterthought\n")
    line = refused(cut, federation)
    assert f"{changed}, where its {what} comes from, is not what it was when the run was begun" in line
    assert line.endswith(f"or run it anew (fedc2i run --config {cut / 'config.toml'})")
    changed.write_text(before)
    fedc2i.resume(cut, federation)
    assert result_files(cut) == result_files(tmp_path / "whole")


def test_a_folder_of_an_earlier_version_goes_on_without_the_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, own_files: tuple[Path, Path]
) -> None:
    method, model = own_files
    (planned,) = prepare([f"{method}:Mine"], {**SETTINGS, "model": f"{model}:net"}, federation)
    cut_run(monkeypatch, tmp_path / "cut", planned)
    path = tmp_path / "cut" / "checkpoints" / "begun.json"
    written = json.loads(path.read_text())
    assert written.pop("files").keys() == {"method", "model"}
    path.write_text(json.dumps(written))
    method.write_text(METHOD + "\n")
    assert isinstance(fedc2i.resume(tmp_path / "cut", federation), fedc2i.Result)


def test_a_changed_file_in_a_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model, own_files: tuple[Path, Path]
) -> None:
    """Of a run that was not begun yet, too: the plan of the comparison has the checksum."""
    wanted = ["fedavg", f"{own_files[0]}:Mine"]
    with cut_off(monkeypatch, RunFolder, "record", 3):
        fedc2i.compare(wanted, federation, model=model, out=tmp_path / "cut", **SETTINGS)
    assert not (tmp_path / "cut" / "mine").exists()
    own_files[0].write_text(METHOD + "\n")
    with pytest.raises(UserError, match="where its method comes from, is not what it was"):
        fedc2i.resume(tmp_path / "cut", federation, model)


@pytest.mark.parametrize("name", ["begun.json", "plan.json"])
def test_records_too_large_for_memory_are_not_read(cut: Path, federation: Federation, model: Model, name: str) -> None:
    path = cut / "checkpoints" / name if name == "begun.json" else cut / name
    with path.open("ab") as file:
        file.truncate(2**42)
    with pytest.raises(UserError, match=rf"{name}: its contents declare 4,398,046,511,104 bytes, but .* are free"):
        fedc2i.resume(cut, federation, model)


def test_a_pipe_in_place_of_a_record_is_refused(cut: Path, federation: Federation, model: Model) -> None:
    path = cut / "checkpoints" / "begun.json"
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"begun\.json: not a file"):
        fedc2i.resume(cut, federation, model)


def test_a_run_with_noise_that_goes_on_sends_what_was_sent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Bit for bit, also in rounds that are done a second time: noise and all, nothing is sent that was not."""
    sent: dict[int, list[dict[str, torch.Tensor]]] = {}
    receive = Mailbox.receive

    def listen(self: Mailbox, clients: Any, uploads: Any, round: int) -> dict[int, str]:
        sent.setdefault(round, []).append({name: own.clone() for name, own in uploads.items()})
        return receive(self, clients, uploads, round)

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

    def keep(number: int, is_last: bool, state: Callable[[], Any]) -> None:
        checkpoint.save(tmp_path, number, *state())
        sizes.append((tmp_path / f"round{number:06d}.safetensors").stat().st_size)

    planned.compute(keep=keep)
    assert planned.checkpoint_size() == pytest.approx(max(sizes), rel=0.25)


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

    plan(federation, model).execute(tmp_path / "small", Told())
    assert said == ["begin"]
    monkeypatch.setattr(keeping, "MUCH", 200_000)  # two seeds of three clients with 4,642 numbers write 223 kB
    for every, words in {1: "after every round", 2: "", 0: ""}.items():
        said.clear()
        plan(federation, model, clients_per_round=3, checkpoint_every=every).execute(tmp_path / str(every), Told())
        assert said[-1] == "begin"
        assert said[:-1] == (
            [
                f"checkpoints of about 0.2 MB are written into {tmp_path / '1' / 'checkpoints'} {words}; "
                "checkpoint_every=K (--set) writes them after every K rounds, 0 none"
            ]
            if words
            else []
        )


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
