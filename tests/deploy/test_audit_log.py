"""A site's log: every change of it is found and named, and it survives being killed at any moment."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedc2i.core.errors import UserError
from fedc2i.deploy.audit import AuditLog, check_course, spent
from fedc2i.engine.accountant import epsilon


def task(
    log: AuditLog, run: str = "r", round: int = 1, upload: str = "u", noise: float = 2.0, terms: str = "t"
) -> None:
    told = {"run": run, "round": round, "upload": upload, "noise": noise, "terms": terms, "outcome": "sent"}
    log.append("task", **told)


@pytest.fixture
def log(tmp_path: Path) -> AuditLog:
    made = AuditLog(tmp_path)
    for number in range(1, 6):
        task(made, round=number, upload=f"u{number}")
    return made


def rewrite(log: AuditLog, change: Callable[[list[bytes]], list[bytes]]) -> None:
    log.path.write_bytes(b"".join(line + b"\n" for line in change(log.path.read_bytes().splitlines())))


CHANGES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "a changed value": (lambda own: [own[0], own[1].replace(b'"u2"', b'"u9"'), *own[2:]], "line 3 does not follow"),
    "the last line changed": (lambda own: [*own[:4], own[4].replace(b'"u5"', b'"u9"')], "line 5 is not the one"),
    "a line removed": (lambda own: own[:2] + own[3:], "line 3 does not follow"),
    "a line twice": (lambda own: [*own[:2], own[1], *own[2:]], "line 3 does not follow"),
    "two lines exchanged": (lambda own: [own[1], own[0], *own[2:]], "line 1 does not follow"),
    "a damaged line": (lambda own: [*own[:3], own[3][:20], own[4]], "line 4 is damaged"),
    "the last line removed": (lambda own: own[:4], "line 5 is missing; there were 5"),
    "all lines removed": (lambda own: [], "line 1 is missing; there were 5"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_log_is_found_and_named_and_takes_no_more_lines(log: AuditLog, name: str) -> None:
    change, says = CHANGES[name]
    rewrite(log, change)
    with pytest.raises(UserError, match=says):
        log.entries()
    with pytest.raises(UserError, match=says):
        task(log)


def test_a_cut_line_is_named(log: AuditLog) -> None:
    log.path.write_bytes(log.path.read_bytes()[:-30])
    with pytest.raises(UserError, match="line 5 is incomplete; there were 5"):
        log.entries()


def test_a_line_that_a_power_failure_cut_is_replaced(log: AuditLog) -> None:
    with log.path.open("ab") as file:
        file.write(b'{"line": 6, "time"')  # the head does not know it: nothing was sent for it
    assert len(log.entries()) == 5
    task(log, round=6)
    assert [entry["round"] for entry in log.entries()] == [1, 2, 3, 4, 5, 6]


def test_a_head_that_lags_one_line_behind_is_accepted(log: AuditLog) -> None:
    before = log.head.read_bytes()
    task(log, round=6)
    log.head.write_bytes(before)  # killed between the line and its head
    assert len(log.entries()) == 6
    task(log, round=7)
    log.head.write_bytes(before)
    with pytest.raises(UserError, match=r"is not the one that audit\.head names"):
        log.entries()


def test_only_the_owner_can_read_it(log: AuditLog) -> None:
    assert log.path.stat().st_mode & 0o777 == 0o600


def test_killed_at_any_moment_it_stays_whole(tmp_path: Path) -> None:
    log, grew = AuditLog(tmp_path), 0
    for attempt in range(12):
        child = os.fork()
        if child == 0:
            while True:
                task(log, upload=str(time.monotonic_ns()))
        time.sleep(0.05 + 0.011 * attempt)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        lines = len(log.entries())
        assert lines >= grew
        grew = lines
    assert grew > 12


def test_what_was_spent_is_counted_once_for_equal_uploads_and_anew_after_a_renewal(log: AuditLog) -> None:
    task(log, round=5, upload="u5")  # a resumed coordinator asked again: the same bits
    task(log, run="s", upload="v", noise=4.0)
    log.append("task", run="x", outcome="refused", upload="w", noise=1.0)
    own = spent(log.entries())
    assert (own.runs, len(own.noises)) == (("r", "s"), 6)
    assert own.epsilon() == pytest.approx(epsilon(2.0 / (5 + 1 / 4) ** 0.5, 1))
    log.append("renewed", by="me")
    task(log, run="z", upload="z")
    assert spent(log.entries()).runs == ("z",)
    assert len(spent(log.entries(), renewed=False).noises) == 7


def test_a_run_keeps_its_settings_and_has_few_uploads_a_round(log: AuditLog) -> None:
    entries = log.entries()
    check_course(entries, "r", "t", 1)
    check_course(entries, "other", "other", 1)
    with pytest.raises(UserError, match="other settings or code"):
        check_course(entries, "r", "changed", 1)
    for upload in ("again", "and again"):
        task(log, round=1, upload=upload)
    with pytest.raises(UserError, match="was answered with 3 uploads"):
        check_course(log.entries(), "r", "t", 1)
    check_course(log.entries(), "r", "t", 2)


def test_its_lines_are_plain_json(log: AuditLog) -> None:
    first = json.loads(log.path.read_bytes().splitlines()[0])
    assert (first["line"], first["event"], first["previous"]) == (1, "task", "0" * 64)
