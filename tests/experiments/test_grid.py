"""The grid runner with processes that share a GPU: the same processes under every heading, the numbers of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from experiments.grid import Grid, parser

from experiments import grid
from fedc2i.runs import gpu_share, job_processes, side_by_side_runs


def test_processes_stay_for_all_headings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def study(out: Path) -> list[list[float]]:
        given = parser("trial", "", "0").parse_args(["--out", str(out), "--rounds", "1", "--device", "cpu"])
        found, work = list[list[float]](), Grid(given)
        plans = [work.plan("heart", methods) for methods in (["local", "fedavg"], ["fedprox", "fedproto"])]
        with work.computing(plan for own in plans for plan in own):
            for own in plans:
                work.heading("next")
                found += [result.accuracy("trained").ravel().tolist() for result in work.compute(own)]
        return found

    expected = study(tmp_path / "one")
    started: list[int] = []

    class Counted(job_processes.JobProcesses):
        def __init__(self, count: int, on_gpu: bool = False) -> None:
            started.append(count)
            super().__init__(count, on_gpu)

    monkeypatch.setattr(grid, "JobProcesses", Counted)
    monkeypatch.setattr(job_processes.PrivateMps, "start", lambda: None)
    monkeypatch.setattr(gpu_share, "open_gpu", lambda: None)
    for module in (grid, side_by_side_runs):
        monkeypatch.setattr(module, "processes_for", lambda config, plans=(): 2)
    assert study(tmp_path / "two") == expected
    assert started == [2]
