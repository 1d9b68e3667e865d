"""Runs that are cut off at a chosen moment, and what must be the same when they have gone on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedc2i
from fedc2i import Federation, Method, Model, UserError
from fedc2i.core.settings import EngineSettings, TrainingSettings
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import ResumePoint, last_rounds
from fedc2i.engine.records import POINTS, Outcome, Round
from fedc2i.engine.simulator import simulate
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.writer import RunWriter
from support.helpers import files_below

CPU = torch.device("cpu")
TRAINING = TrainingSettings(batch_size=5, lr=0.02, epochs=1)


class Cut(BaseException):
    """The moment at which a process is gone; nothing in the package catches it."""


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
        for point in POINTS:
            assert same(got[seed].logits[point], one.logits[point]), (seed, point)
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
    how = EngineSettings(**{"rounds": 3, **vars(TRAINING), "executor": "looped", **settings})
    reports: list[Round] = []

    def keep(number: int, state: Callable[[], Any]) -> None:
        checkpoint.save(folder / str(number), number, *state())

    whole = simulate(method, model, federation, how, seeds, device, reports.append, on_state=keep)
    for cut in range(1, max(report.round for report in reports) + 1):
        saved = checkpoint.load(folder / str(cut))
        assert saved is not None
        assert last_rounds(saved.values, cut).keys() == set(seeds)
        before = [report for report in reports if report.round <= cut]
        last = {report.seed: report for report in before}
        after: list[Round] = []
        start = ResumePoint(saved.round, saved.tensors, saved.values, last)
        assert_same_end(simulate(method, model, federation, how, seeds, device, after.append, resume=start), whole)
        assert [without_time(own)["round"] for own in after] == [own.round for own in reports if own.round > cut]
        for got, want in zip(before + after, reports, strict=True):
            assert same(without_time(got), without_time(want))
    return whole


SETTINGS: dict[str, Any] = {
    **{"rounds": 3, "epochs": 1, "batch_size": 5, "seeds": (0, 2), "clients_per_round": 2},
    **{"executor": "looped", "device": "cpu", "checkpoint_seconds": 0},
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
    with cut_off(monkeypatch, RunWriter, "record", seeds * after + 1):
        execute(planned, folder)


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


def refused(folder: Path, *given: Any, **more: Any) -> str:
    """The line of a refusal, which leaves everything as it was."""
    before = files_below(folder)
    with pytest.raises(UserError) as error:
        fedc2i.resume(folder, *given, **more)
    assert files_below(folder) == before
    assert "\n" not in str(error.value)
    return str(error.value)
