"""Jobs over processes: every answer once, reports on the way, errors with their reason, and no process left."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from fedc2i.core.errors import UserError
from fedc2i.runs.job_process import Report
from fedc2i.runs.side_by_side_runs import side_by_side


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


def test_a_process_that_dies_is_one_line() -> None:
    with pytest.raises(UserError, match="ended unexpectedly"):
        list(side_by_side(lambda job, report: os._exit(3), range(2), 2))
