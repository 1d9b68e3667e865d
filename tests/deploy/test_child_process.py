"""Programs as processes of ours: they end with us, and a SuperNode is restarted whenever it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr")

from processes_helpers import exists, pid, wait

from fedc2i.deploy.child_process import ChildProcess, environment
from fedc2i.deploy.process_tree import below
from fedc2i.deploy.supernode import keep_running


class Shell(ChildProcess):
    """A program that starts at once."""

    site = SimpleNamespace(coordinator="nowhere:1")

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__("shell", folder)
        self.script, self.starts = script, 0

    def start(self) -> None:
        self.starts += 1
        self.launch(["sh", "-c", self.script], patience=1.0)

    def node_id(self) -> int | None:
        return None

    def rejection(self) -> str | None:
        return None

    def complaints(self) -> list[str]:
        return []


# The end of a tree of processes


def test_stop_ends_what_the_program_started_even_in_sessions_of_its_own(tmp_path: Path) -> None:
    with Shell(tmp_path, "setsid sleep 60 & (sleep 61 & sleep 62 &) ; sleep 63") as shell:
        pids = wait(lambda: len(found := below(pid(shell))) >= 5 and found, 5)
        assert pids
    assert not any(map(exists, pids))


def test_the_end_of_the_program_ends_what_it_left(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "setsid sleep 60 & echo $! >pid; exit 3")
    shell.start()
    assert wait(lambda: not shell.is_alive(), 5)
    assert shell.exit_code == 3
    assert not exists(int((tmp_path / "pid").read_text()))


def test_a_program_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    with Shell(tmp_path, "trap '' TERM; echo ready; while true; do sleep 0.1; done") as shell:
        assert wait(lambda: "ready" in shell.output(), 5)
        assert (pids := below(pid(shell)))
    assert shell.exit_code == 128 + signal.SIGKILL
    assert not any(map(exists, pids))


_PARENT = """
import sys, time
from pathlib import Path
from fedc2i.deploy.child_process import ChildProcess
program = ChildProcess("shell", Path(sys.argv[1]))
program.launch(["sh", "-c", "setsid sleep 60 & sleep 61"])
time.sleep(60)
"""


def test_programs_end_when_our_process_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)])
    try:
        pids = wait(lambda: len(found := below(parent.pid)) >= 4 and found, 20)
        assert pids
    finally:
        parent.kill()
        parent.wait()
    assert wait(lambda: not any(map(exists, pids)), 5)


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    program = ChildProcess("nothing", tmp_path)
    program.launch([str(tmp_path / "missing")])
    assert wait(lambda: not program.is_alive(), 5)
    assert program.exit_code == 127
    assert "cannot start" in program.tail()


def test_environment_drops_settings_of_other_flower_installations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    found = environment(tmp_path, "10.1.2.3")
    assert "FLWR_INTERNAL_GRPC_FLEET_API" not in found
    assert found["FLWR_HOME"] == str(tmp_path)
    assert found["FLWR_TELEMETRY_ENABLED"] == "0"
    assert found["NO_PROXY"].startswith("example.org,127.0.0.1")
    assert found["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert found["NO_PROXY"].endswith(",10.1.2.3")


# A SuperNode that is kept running


def test_a_node_is_restarted_until_it_is_stopped(tmp_path: Path) -> None:
    shell, stop, said = Shell(tmp_path, "echo broken; exit 4"), threading.Event(), list[str]()

    def listen(line: str) -> None:
        said.append(line)
        if shell.starts == 2 and "restarting" in line:
            stop.set()

    keep_running(shell, stop, listen)  # type: ignore[arg-type]
    assert shell.starts == 2
    assert "ended with code 4: broken" in said[1]
    assert "restarting in 1 s" in said[1]
    assert "restarting in 2 s" in said[3]
    assert said[-1] == "shell: stopped"


def test_a_node_ends_on_sigterm(tmp_path: Path) -> None:
    shell, said = Shell(tmp_path, "sleep 60"), list[str]()
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    keep_running(shell, say=said.append)  # type: ignore[arg-type]
    assert said[-1] == "shell: stopped"
    assert not shell.is_alive()
    assert signal.getsignal(signal.SIGTERM) is before
