"""Who shares a GPU: how many processes, started early or not at all, and what happens where it cannot be opened."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedc2i.core.errors import UserError
from fedc2i.data.federation import Federation
from fedc2i.models.model import Model
from fedc2i.runs import gpu_share, job_processes
from fedc2i.runs.gpu_share import MOST_PROCESSES, OPEN_BYTES, memory_of, most_processes, processes_for
from fedc2i.runs.job_process import Report
from fedc2i.runs.job_processes import JobProcesses, side_by_side, started_early
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.settings import RunSettings
from support.processes import is_running, within


@pytest.fixture
def plan(make_federation: Callable[..., Federation], model: Model) -> Plan:
    return prepare(["fedavg"], {"device": "cpu", "seeds": "0,1"}, make_federation((6, 8, 5)), model)[0]


def give_gpu(patch: pytest.MonkeyPatch, memory: float, cores: int = 16) -> None:
    properties = SimpleNamespace(total_memory=int(memory))
    patch.setattr(RunSettings, "torch_device", lambda self: torch.device("cuda"))
    patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    patch.setattr(gpu_share, "cores", lambda: cores)


@pytest.mark.parametrize(("cores", "count"), [(1, 1), (3, 1), (4, 2), (8, 4), (64, MOST_PROCESSES)])
def test_as_many_processes_as_cores_allow(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    monkeypatch.setattr(gpu_share, "cores", lambda: cores)
    assert most_processes(0) == count
    assert [most_processes(workers) for workers in (1, 2, 7)] == [1, 2, 7]  # what the user says


def test_one_process_on_a_cpu(plan: Plan) -> None:
    assert processes_for(replace(plan.config, workers=3), [plan]) == 1


def test_only_as_many_as_fit_into_the_gpu(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    each = memory_of(plan)
    assert each > OPEN_BYTES
    large = replace(plan, config=replace(plan.config, seeds=tuple(range(20))))
    assert (memory_of(large) - OPEN_BYTES) == pytest.approx(10 * (each - OPEN_BYTES))
    for room, count in ((100, MOST_PROCESSES), (3.01, 3), (2.5, 2), (1.2, 1), (0.5, 1)):
        give_gpu(monkeypatch, room * each / gpu_share.MEMORY_SHARE)
        assert processes_for(plan.config, [plan, plan]) == count
        assert processes_for(replace(plan.config, workers=2), [plan]) == 2
    give_gpu(monkeypatch, 100 * each, cores=4)
    assert processes_for(plan.config, [plan]) == 2

    def odd(*_: Any) -> int:
        raise RuntimeError("cannot run so")

    monkeypatch.setattr("fedc2i.engine.executors.stacked.chunks.bytes_of_a_step", odd)
    assert processes_for(plan.config, [plan]) == 1


def give_cores(patch: pytest.MonkeyPatch, count: int) -> None:
    for module in (gpu_share, job_processes):
        patch.setattr(module, "cores", lambda: count)


@pytest.mark.parametrize("settings", [{"device": "cpu"}, *({"workers": own} for own in ("1", "many", "-1", "5000"))])
def test_nothing_is_started_early_where_it_is_not_needed(
    settings: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_processes, "GPU_FILES", "null")
    give_cores(monkeypatch, 16)
    monkeypatch.setattr(job_processes, "JobProcesses", None)
    with started_early(settings) as processes:
        assert processes is None
    monkeypatch.setattr(job_processes, "GPU_FILES", "no-such-device")
    with started_early({}) as processes:
        assert processes is None


class Service:
    """In place of a CUDA MPS."""

    environment = {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}  # noqa: RUF012
    ended = waited = 0

    def end(self) -> None:
        self.ended += 1

    def wait(self) -> None:
        self.waited += 1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Service:
    found = Service()
    monkeypatch.setattr(job_processes.PrivateMps, "start", lambda: found)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    return found


def test_processes_started_early_for_nothing_end_at_once(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    monkeypatch.setattr(job_processes, "GPU_FILES", "null")
    give_cores(monkeypatch, 4)
    began = time.monotonic()
    with pytest.raises(UserError, match="no such data"), started_early({}) as processes:  # noqa: PT012
        assert processes is not None
        pids = processes.pids
        assert len(pids) == 2
        raise UserError("no such data")
    assert time.monotonic() - began < job_processes._PATIENCE
    assert not any(map(is_running, pids))


def where(job: int, report: Report) -> str:
    return os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "without")


def test_a_gpu_is_opened_under_mps(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    monkeypatch.setattr(gpu_share, "open_gpu", lambda: None)
    assert dict(side_by_side(where, range(4), 2, on_gpu=True)) == dict.fromkeys(range(4), "/nowhere")
    assert (service.ended, service.waited) == (1, 1)


def test_others_take_the_place_of_those_that_cannot_open_it_under_mps(
    monkeypatch: pytest.MonkeyPatch, service: Service, tmp_path: Path
) -> None:
    marker = tmp_path / "first"

    def open_gpu() -> None:
        """Under MPS the first one fails, the second one dies, and the third one never ends."""
        if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
            for k in range(3):
                try:
                    marker.with_name(str(k)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                if k == 0:
                    raise RuntimeError("CUDA error: device busy")
                if k == 1:
                    os._exit(9)
                time.sleep(600)

    monkeypatch.setattr(gpu_share, "open_gpu", open_gpu)
    monkeypatch.setattr(job_processes, "_OPENING", 8.0)
    with JobProcesses(3, on_gpu=True) as processes:
        first = set(processes.pids)
        for _ in range(3):  # used again, as under the headings of a study
            assert dict(processes.work(where, range(6))) == dict.fromkeys(range(6), "without")
        pids = processes.pids
        assert len(pids) <= 3
        assert within(30, lambda: not any(map(is_running, first - set(pids))))
    assert not any(map(is_running, pids))
    assert (service.ended, service.waited) == (1, 1)


def test_another_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch, service: Service) -> None:
    def open_gpu() -> None:
        raise RuntimeError("CUDA error: device busy")

    monkeypatch.setattr(gpu_share, "open_gpu", open_gpu)
    with JobProcesses(1, on_gpu=True) as processes:
        monkeypatch.setattr(job_processes, "JobProcess", Mock(side_effect=BlockingIOError(11, "no more")))
        with pytest.raises(UserError, match=r"a process cannot be started \(.*no more\); try --workers 1"):
            list(processes.work(where, range(2)))
    assert (service.ended, service.waited) == (1, 1)


def test_fewer_processes_do_where_some_cannot_open_the_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(job_processes.PrivateMps, "start", lambda: None)
    marker = tmp_path / "one"

    def open_gpu() -> None:
        try:
            marker.touch(exist_ok=False)
        except FileExistsError:
            raise RuntimeError("CUDA error: device busy") from None

    monkeypatch.setattr(gpu_share, "open_gpu", open_gpu)
    with JobProcesses(3, on_gpu=True) as processes:

        def is_one_left() -> bool:
            assert dict(processes.work(where, range(3))) == dict.fromkeys(range(3), "without")
            return len(processes.pids) == 1

        assert within(30, is_one_left)


def test_a_gpu_that_cannot_be_opened_is_one_line() -> None:
    """With the real opening, on a machine without a GPU."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with (
        pytest.raises(UserError, match="the GPU cannot be opened: ") as caught,
        JobProcesses(2, on_gpu=True) as processes,
    ):
        list(processes.work(where, range(3)))
    assert "\n" not in str(caught.value)
