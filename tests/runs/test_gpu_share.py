"""Who shares a GPU: how many processes, started ahead or not at all, and what happens where it cannot be opened."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.runs import gpu_share, head_start, side_by_side_runs
from fedc2i.runs.gpu_share import MOST, OPEN, memory_of, most_processes, processes_for
from fedc2i.runs.head_start import started_ahead
from fedc2i.runs.job_process import Report
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.settings import RunSettings
from fedc2i.runs.side_by_side_runs import Processes, side_by_side


@pytest.fixture
def plan(make_federation: Callable[..., Federation], model: Model) -> Plan:
    return prepare(["fedavg"], {"device": "cpu", "seeds": "0,1"}, make_federation((6, 8, 5)), model)[0]


def give_gpu(patch: pytest.MonkeyPatch, memory: float, cores: int = 16) -> None:
    properties = SimpleNamespace(total_memory=int(memory))
    patch.setattr(RunSettings, "torch_device", lambda self: torch.device("cuda"))
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(gpu_share, "cores", lambda: cores)


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (3, 1), (4, 2), (8, 4), (64, MOST)])
def test_as_many_processes_as_cores_allow(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(gpu_share, "cores", lambda: cores)
    assert most_processes(0) == count
    assert [most_processes(workers) for workers in (1, 2, 7)] == [1, 2, 7]  # what the user says


def test_one_process_on_a_cpu(plan: Plan) -> None:
    assert processes_for(replace(plan.config, workers=3), [plan]) == 1


def test_only_as_many_as_fit_into_the_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    each = memory_of(plan)
    assert each > OPEN
    large = replace(plan, config=replace(plan.config, seeds=tuple(range(20))))
    assert (memory_of(large) - OPEN) == pytest.approx(10 * (each - OPEN))
    for room, count in ((100, MOST), (3.01, 3), (2.5, 2), (1.2, 1), (0.5, 1)):
        give_gpu(monkeypatch, room * each / gpu_share.SHARE)
        assert processes_for(plan.config, [plan, plan]) == count
        assert processes_for(replace(plan.config, workers=2), [plan]) == 2
    give_gpu(monkeypatch, 100 * each, cores=4)
    assert processes_for(plan.config, [plan]) == 2

    def odd(*_: Any) -> int:
        raise RuntimeError("cannot run so")

    monkeypatch.setattr("fedc2i.engine.executors.stacked.chunks.bytes_of_a_step", odd)
    assert processes_for(plan.config, [plan]) == 1


@pytest.mark.parametrize("settings", [{"device": "cpu"}, {"workers": "1"}, {"workers": "many"}, {"workers": "-1"}])
def test_nothing_is_started_ahead_where_it_is_not_needed(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_start, "GPU_FILES", "null")
    monkeypatch.setattr(gpu_share, "cores", lambda: 16)
    monkeypatch.setattr(head_start, "Processes", None)
    with started_ahead(settings) as processes:
        assert processes is None
    monkeypatch.setattr(head_start, "GPU_FILES", "no-such-device")
    with started_ahead({}) as processes:
        assert processes is None


def test_processes_started_ahead_for_nothing_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "GPU_FILES", "null")
    for module in (gpu_share, head_start):
        monkeypatch.setattr(module, "cores", lambda: 4)
    began = time.monotonic()
    with pytest.raises(UserError, match="no such data"), started_ahead({}) as processes:  # noqa: PT012
        assert processes is not None
        pids = processes.pids
        assert len(pids) == 2
        raise UserError("no such data")
    assert time.monotonic() - began < side_by_side_runs._PATIENCE
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


class Service:
    """In place of a CUDA MPS."""

    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}  # noqa: RUF012
    ended = waited = 0

    def end(self) -> None:
        self.ended += 1

    def wait(self) -> None:
        self.waited += 1


def where(job: int, report: Report) -> str:
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "without")


@pytest.mark.parametrize("fails", [False, True])
def test_a_gpu_is_opened_under_mps_or_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool) -> None:
    service, marker = Service(), tmp_path / "first"
    monkeypatch.setattr(side_by_side_runs.PrivateMps, "start", lambda: service)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)

    def open_gpu() -> None:
        """Under MPS the first one fails, and the other one dies."""
        if fails and "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            try:
                marker.touch(exist_ok=False)
            except FileExistsError:
                os._exit(9)
            raise RuntimeError("CUDA error: device busy")

    monkeypatch.setattr(gpu_share, "open_gpu", open_gpu)
    found = dict(side_by_side(where, range(4), 2, on_gpu=True))
    assert found == dict.fromkeys(range(4), "without" if fails else "/nowhere")
    assert (service.ended, service.waited) == (1, 1)
    assert marker.exists() == fails


def test_a_gpu_that_cannot_be_opened_is_one_line() -> None:
    """With the real opening, on a machine without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="the GPU cannot be opened: ") as caught, Processes(2, on_gpu=True) as processes:
        list(processes.work(where, range(3)))
    assert "\n" not in str(caught.value)
