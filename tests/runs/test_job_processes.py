"""Jobs over processes: every answer once, reports on the way, errors with their reason, and no process left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedc2i.core.errors import UserError
from fedc2i.runs import job_processes
from fedc2i.runs.job_process import JobProcess, Report
from fedc2i.runs.job_processes import JobProcesses, side_by_side
from support.processes import is_running, within


def test_answers_and_reports_of_real_processes() -> None:
    shared, reports = list(range(10)), list[tuple[int, str]]()

    def square(job: int, report: Report) -> tuple[int, int]:
        report(f"job {job}")
        return shared[job] ** 2, os.getpid()

    found = dict(side_by_side(square, range(6), 2, lambda job, report: reports.append((job, report))))
    assert {job: answer for job, (answer, _) in found.items()} == {job: job**2 for job in range(6)}
    assert sorted(reports) == [(job, f"job {job}") for job in range(6)]
    assert len({process for _, process in found.values()}) == 2
    assert os.getpid() not in {process for _, process in found.values()}


def test_one_worker_is_this_process() -> None:
    reports: list[Any] = []

    def own(job: int, report: Report) -> int:
        report(job)
        return os.getpid()

    found = list(side_by_side(own, [3, 4], 1, lambda job, report: reports.append((job, report))))
    assert found == [(3, os.getpid()), (4, os.getpid())]
    assert reports == [(3, 3), (4, 4)]


def test_errors_come_back_and_the_others_are_stopped() -> None:
    def fail(job: int, report: Report) -> None:
        if job == 0:
            raise UserError("not with this one")
        time.sleep(60)

    began = time.monotonic()
    with pytest.raises(UserError, match="not with this one"):
        list(side_by_side(fail, range(4), 2))
    assert time.monotonic() - began < 40


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda: os._exit(3), "ended unexpectedly, with exit code 3; if memory ran out, try --workers 1"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "ended unexpectedly, by SIGKILL"),
        (lambda: sys.exit("enough"), "sys.exit was called, with 'enough'"),
        (lambda: os.closerange(3, 99) or time.sleep(60), "closed its connection, though it is still running"),
    ],
)
def test_a_process_that_ends_is_one_line(end: Callable[[], None], said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(side_by_side(lambda job, report: end(), range(2), 2))


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were started before it end."""
    started: list[JobProcess] = []

    def start(*given: Any) -> JobProcess:
        if started:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        started.append(JobProcess(*given))
        return started[0]

    monkeypatch.setattr(job_processes, "JobProcess", start)
    with pytest.raises(UserError, match=r"a process cannot be started \(.*unavailable\); try --workers 1"):
        JobProcesses(3)
    assert not is_running(started[0].pid)


def test_work_that_is_abandoned_does_not_answer_later_jobs() -> None:
    def slow(job: int, report: Report) -> str:
        time.sleep(0.1 if job == 0 else 60)
        return "old"

    with JobProcesses(2) as processes:
        work = processes.work(slow, [0, 1])
        assert next(work) == (0, "old")
        work.close()
        assert dict(processes.work(lambda job, report: "new", range(3))) == dict.fromkeys(range(3), "new")


def test_processes_end_with_the_one_that_started_them_even_if_it_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys, time\n"
        "from fedc2i.runs.job_processes import side_by_side\n"
        "folder = sys.argv[1]\n"
        "def run(job, report):\n"
        "    pathlib.Path(folder, str(os.getpid())).touch()\n"
        "    time.sleep(600)\n"
        "list(side_by_side(run, range(2), 2))\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    assert within(30, lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert all(map(is_running, pids))
    starter.kill()
    starter.wait()
    assert within(5, lambda: not any(map(is_running, pids)))
