"""The state after any round, through a file and back: a run resumes from it to the bit, or rejects it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fedc2i
from fedc2i import Federation, Method, Model, UserError
from fedc2i.core.params import prefixed, size_in_bytes, unprefixed
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import ResumePoint, layout, state_size
from fedc2i.engine.checkpoint_check import check_state
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import POINTS
from fedc2i.engine.simulator import simulate
from fedc2i.methods.fedavg import FedAvg
from fedc2i.runs.driver import execute
from fedc2i.runs.folder import RunFolder
from support.cut_runs import SETTINGS, assert_goes_on, cut_off, cut_run, plan, refused, result_files
from support.helpers import call, write_arrays
from support.method_checks import OF_THEIR_OWN


def model_for(name: str, make_model: Callable[..., Model]) -> Model:
    return make_model(batch_norm=True) if name == "fedbn" else make_model()


@pytest.mark.parametrize("name", [name for name in OF_THEIR_OWN if name != "pooled"])
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


ON_A_GPU = [
    *(
        (name, case)
        for name in ("fedavg", "fedc2i", "fedc2i-plus", "fedrep", "fedproto", "pfedgraph")
        for case in ("looped", "stacked", "stacked-half")
    ),
    ("fedavg", "private"),
    ("fedc2i", "private"),
]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "case"), ON_A_GPU)
def test_a_gpu_goes_on(
    tmp_path: Path, name: str, case: str, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    federation, method = make_federation((12, 9, 7, 6), validation=4), Method.registry[name]()
    assert_goes_on(tmp_path, method, make_model(), federation, (3, 0), torch.device("cuda"), **CASES.get(case, {}))


def test_a_model_with_statistics_and_dropout_goes_on(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(batch_norm=True, dropout=0.3), federation)


def test_seeds_that_have_ended_are_kept(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    federation = make_federation((12, 9, 7), validation=4)
    settings: dict[str, Any] = {"rounds": 12, "patience": 1, **vars(TrainingSettings(epochs=1, lr=0.02))}
    outcomes = assert_goes_on(tmp_path, Method.registry["fedc2i"](), model, federation, (0, 1, 2), **settings)
    assert len({outcome.last.round for outcome in outcomes.values()}) > 1, "seeds are to be chosen so that they differ"


def test_what_was_told_counts_in_the_upload_behind_an_interruption(
    tmp_path: Path, make_federation: Callable[..., Federation], model: Model
) -> None:
    method, federation = Method.registry["fedc2i-top-k"](k=1), make_federation((12, 9, 7, 8))
    assert_goes_on(tmp_path, method, model, federation, rounds=2)
    saved = checkpoint.load(tmp_path / "1")
    assert saved is not None
    assert saved.values["0"]["report_bytes"] > 0


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


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        ({}, 3 + 3),
        ({"evaluate_every": 2}, 3 + 3),
        ({"clip": 1.0}, 3 + 3 + 3),
        ({"clients_per_round": 2}, 3 + 3 + 3),
        ({"clients_per_round": 2, "evaluate_every": 2}, 3 + 2 + 3),
    ],
)
def test_the_size_of_a_state_by_hand(
    settings: dict[str, Any], models: int, federation: Federation, model: Model
) -> None:
    found = state_size(Method.registry["fedc2i"](), model, federation, EngineSettings(rounds=3, **settings), (0, 1))
    assert found == 2 * models * size_in_bytes(model.init(0))


def test_the_state_of_another_model_is_refused(
    tmp_path: Path, federation: Federation, make_model: Callable[..., Model]
) -> None:
    assert_goes_on(tmp_path, FedAvg(), make_model(), federation)
    saved = checkpoint.load(tmp_path / "1")
    assert saved is not None
    with pytest.raises(UserError, match="the checkpoint after round 1 is of another model or of other clients"):
        simulate(
            FedAvg(), make_model(bias=False), federation, EngineSettings(rounds=3), [0], resume=ResumePoint(*saved, {})
        )


# A checkpoint with the right checksum that is not one of the run; nothing is computed from it.

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
    *(("norms", odd) for odd in ([], [0.0], ["a"] * 3, [-1.0] * 3, [float("nan")] * 3, [1] * 3)),
    *(("patience", odd) for odd in ([None, None], [0.5, None], ["a", 0], [0.5, -1], [0.5, 2], [float("nan"), 0])),
    *(("report_bytes", odd) for odd in (-1, 10**30, 0.5, "1")),
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
        assert "no checkpoint can be used (round 1: the checkpoint after round 1 is " in line, how
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
    assert f"a seed that continues after round {number} of 3" in refused(tmp_path, federation, model)


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("fedavg", "received"),
        ("fedc2i", "mailbox"),
        *(("fedc2i-top-k:k=1", part) for part in ("received", "server0/reports")),
        ("pfedgraph", "server0/personal"),
    ],
)
def test_a_state_with_a_matching_layout_is_rejected_by_what_the_run_knows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_federation: Callable[..., Federation],
    model: Model,
    method: str,
    part: str,
) -> None:
    """A stranger may change tensors and the layout that the state records."""
    federation = make_federation((12, 9, 7, 6, 8))
    cut_run(monkeypatch, tmp_path, plan(federation, model, method, seeds=(0,), clients_per_round=4))
    saved = kept_by(tmp_path)
    name = next(name for name in saved.tensors if name.startswith(f"seed0/{part}/"))
    known = set(TURNED) if part == "received" else {"of other clients"}
    for how in sorted(known | ({"of another type"} if part.endswith("reports") else set())):
        tensors = with_other(saved, name, TURNED[how])
        values = {"0": {**saved.values["0"], "layout": layout(unprefixed("seed0/", tensors))}}
        checkpoint.save(tmp_path / "checkpoints", 1, tensors, values)
        assert "the checkpoint after round 1 is damaged (" in refused(tmp_path, federation, model), how


def test_the_models_of_a_seed_that_has_ended_must_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, federation: Federation, model: Model
) -> None:
    """Cut off behind the last round, before the run's results are written."""
    planned = plan(federation, model)
    execute(planned, tmp_path / "whole")
    cut = tmp_path / "cut"
    with cut_off(monkeypatch, RunFolder, "finish"):
        execute(planned, cut)
    saved = kept_by(cut)
    assert saved.values == {"0": {"ended": 3}, "2": {"ended": 3}}
    for path in (cut / "checkpoints").glob("round000002.*"):
        path.unlink()
    for part in ("own", "received", "logits"):
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


def test_a_seed_has_not_ended_behind_the_state(federation: Federation, model: Model) -> None:
    method, settings = Method.registry["fedavg"](), EngineSettings(rounds=3)
    firsts = RunContext(method, model, settings, 3, 0).first_models(federation.names, "common")
    tensors = prefixed("seed0/own/", firsts) | prefixed("seed0/received/", firsts)
    check_state(method, model, federation, settings, [0], (tensors, {"0": {"ended": 1}}), 1)  # they were too many
    tested = sum(len(client.test) for client in federation.clients)
    tensors |= {f"seed0/logits/{point}": torch.zeros(tested, len(federation.classes)) for point in POINTS}
    check_state(method, model, federation, settings, [0], (tensors, {"0": {"ended": 1}}), 1)
    with pytest.raises(UserError, match=r"the checkpoint after round 1 is damaged \(ended=2\)"):
        check_state(method, model, federation, settings, [0], (tensors, {"0": {"ended": 2}}), 1)


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
