"""Plans over real processes: the bits of one process, the order, what is shown, errors, interruption, resuming."""

from __future__ import annotations

import io
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.report.progress import ProgressView
from fedc2i.runs import side_by_side_runs
from fedc2i.runs.cache import RunCache
from fedc2i.runs.job_processes import JobProcesses
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.side_by_side_runs import compute_all, in_order
from support.helpers import files_below
from support.processes import is_running

METHODS = ("local", "fedavg", "fedc2i")


@pytest.fixture
def plans(make_federation: Callable[..., Federation], model: Model) -> list[Plan]:
    federation = make_federation((6, 8, 5), validation=4)
    quick = {"rounds": 2, "epochs": 1, "seeds": "0,1", "device": "cpu", "workers": 1, "evaluate_every": 0}
    return prepare(METHODS, quick, federation, model)


@pytest.fixture(scope="module")
def processes() -> Iterator[JobProcesses]:
    """For all tests that leave them idle: each takes seconds to start."""
    with JobProcesses(2) as started:
        yield started


@pytest.fixture(autouse=True)
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many processes as on a GPU; these compute on the CPU."""
    monkeypatch.setattr(side_by_side_runs, "processes_for", lambda config, plans=(): 2)


def contents(cache: RunCache) -> dict[str, Any]:
    """All files of all runs, without the seconds that rounds took."""

    def timeless(content: bytes | None) -> Any:
        return content and re.sub(rb'("\w*seconds\w*": *)[0-9.e-]+', rb"\1-", content)

    return {name: timeless(content) for name, content in files_below(cache.root).items()}


def test_every_bit_is_that_of_one_process(plans: list[Plan], tmp_path: Path, processes: JobProcesses) -> None:
    here, there = RunCache(tmp_path / "here"), RunCache(tmp_path / "there")
    expected = [here.compute(plan) for plan in plans]
    compute_all(there, plans, processes=processes)
    assert not any(there.missing(plan) for plan in plans)
    found, one = contents(there), contents(here)
    assert len(one) > 6 * 4
    assert {name for name in found.keys() | one.keys() if found.get(name) != one.get(name)} == set()
    assert any(name.endswith(".safetensors") for name in one)
    for plan, result in zip(plans, expected, strict=True):
        again = there.compute(plan)
        assert [own.metrics for own in again.rounds] == [own.metrics for own in result.rounds]


@pytest.mark.parametrize("terminal", [True, False])
def test_each_run_is_shown_once_with_its_scores(
    plans: list[Plan], tmp_path: Path, processes: JobProcesses, terminal: bool
) -> None:
    file, computed = io.StringIO(), list[str]()
    cache = RunCache(tmp_path)
    cache.compute(replace(plans[1], config=replace(plans[1].config, seeds=(0,))))  # one of its seeds is there
    with ProgressView(Console(file=file, force_terminal=terminal, width=160), 3) as view:
        compute_all(cache, plans, view, processes, lambda plan: computed.append(plan.label))
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    last = [line for line in shown.splitlines() if "] " in line]
    if terminal:
        last = last[-3:]  # each picture of a terminal has all bars
    for label, seeds in (("Local", "seeds 0, 1"), ("FedAvg", "seed 1"), ("FedC²I", "seeds 0, 1")):
        (line,) = [own for own in last if f" {label} on toy, {seeds}" in own]
        assert re.search(r"2/2|2 rounds in ", line)
        assert re.search(r"[0-9.]+ % before local training, [0-9.]+ % after", line)
    numbers = [match for line in last for match in re.findall(r"\[(\d)/3\]", line)]
    assert numbers == ["1", "2", "3"]
    assert sorted(computed) == ["FedAvg", "FedC²I", "Local"]


def test_different_data_in_turn_and_long_runs_first(
    make_federation: Callable[..., Federation], model: Model, plans: list[Plan]
) -> None:
    small, large = plans[0].federation, make_federation((60, 80, 50))

    def plan(name: str, federation: Federation, rounds: int) -> Plan:
        return replace(plans[0], federation=federation, config=replace(plans[0].config, rounds=rounds), label=name)

    given = [plan(f"short {k}", small, 2) for k in range(4)] + [plan(f"long {k}", large, 2) for k in range(4)]
    turns = [own.label for own in in_order(given)]
    assert turns == [f"{kind} {k}" for k in range(4) for kind in ("long", "short")]
    lengths = in_order([plan(str(rounds), small, rounds) for rounds in (2, 7, 3, 7)])
    assert [own.label for own in lengths] == ["7", "7", "3", "2"]
    few = in_order([plan("large", large, 2), *(plan(f"small {k}", small, 2) for k in range(3))])
    assert [own.label for own in few] == ["small 0", "large", "small 1", "small 2"]


class Interrupting(ProgressView):
    """Does something when the second run begins."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(Console(file=io.StringIO()), 3)
        self._act = act

    def count_start(self) -> str:
        if self._started == 1:
            self._act()
        return super().count_start()


def stop() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_study_resumes_to_the_same_bits(
    plans: list[Plan], tmp_path: Path, processes: JobProcesses
) -> None:
    here, there = RunCache(tmp_path / "here"), RunCache(tmp_path / "there")
    with pytest.raises(KeyboardInterrupt), JobProcesses(2) as stopped, Interrupting(stop) as view:  # noqa: PT012
        pids = stopped.pids
        compute_all(there, plans, view, stopped)
    assert len(pids) == 2
    assert not any(map(is_running, pids))
    assert any(there.missing(plan) for plan in plans)
    for summary in there.root.glob("*/summary.json"):  # what is there is whole
        json.loads(summary.read_text())
    compute_all(there, plans, processes=processes)
    for plan in plans:
        here.compute(plan)
    found, one = contents(there), contents(here)
    assert {name for name in found.keys() | one.keys() if found.get(name) != one.get(name)} == set()


def test_ctrl_c_stops_nobody_but_the_first_process(plans: list[Plan], tmp_path: Path, processes: JobProcesses) -> None:
    """In a terminal all processes get the signal; those at work leave it alone until they are stopped."""
    cache = RunCache(tmp_path)
    with Interrupting(lambda: os.kill(processes.pids[1], signal.SIGINT)) as view:
        compute_all(cache, plans, view, processes)
    assert not any(cache.missing(plan) for plan in plans)


def test_nothing_is_started_for_one_process(plans: list[Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side_runs, "JobProcesses", None)
    compute_all(RunCache(tmp_path), plans[:1])
    cache = RunCache(tmp_path / "all")
    for plan in plans[:2]:
        cache.compute(plan)
    compute_all(cache, plans)  # one is left
    monkeypatch.setattr(side_by_side_runs, "processes_for", lambda config, plans=(): 1)
    compute_all(RunCache(tmp_path), plans)
    assert not [path for path in tmp_path.iterdir() if path.name != "all"]


def test_an_error_names_the_run_it_came_from(plans: list[Plan], tmp_path: Path, processes: JobProcesses) -> None:
    cache = RunCache(tmp_path)
    cache.folder(plans[1], 0).parent.mkdir(exist_ok=True)
    cache.folder(plans[1], 0).write_text("in the way")
    with pytest.raises(UserError, match=r"FedAvg on toy: .*cannot be written"), JobProcesses(2) as stopped:
        compute_all(cache, plans, processes=stopped)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("mps", [True, False])
def test_on_a_gpu_every_bit_is_that_of_one_process(
    make_federation: Callable[..., Federation],
    model: Model,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mps: bool,
) -> None:
    if not mps:
        monkeypatch.setattr("fedc2i.runs.cuda_mps.PrivateMps.start", lambda: None)
    quick = {"rounds": 2, "seeds": "0,1", "device": "cuda", "evaluate_every": 0}
    plans = prepare(METHODS, quick, make_federation((6, 8, 5), validation=4), model)
    here, there = RunCache(tmp_path / "here"), RunCache(tmp_path / "there")
    for plan in plans:
        here.compute(plan)
    compute_all(there, plans)
    found, one = contents(there), contents(here)
    assert {name for name in found.keys() | one.keys() if found.get(name) != one.get(name)} == set()
