"""Our own CUDA MPS, with a script in place of NVIDIA's program: it starts, ends, and never outlives us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedc2i.runs import cuda_mps
from fedc2i.runs.cuda_mps import TOOL, PrivateMps, await_service
from support.processes import is_running, within

RUNS_ALREADY = cuda_mps._runs_already

FAKE = """#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
    sleep 600 & echo $! > server
    [ -n "$STUBBORN" ] || trap 'kill $(cat server); exit 0' TERM
    echo $$ > control
    wait
fi
while read -r order; do
    case "$order" in
        get_server_list) cat server ;;
        quit) if [ -n "$STUBBORN" ]; then sleep 600; else kill "$(cat control)"; fi ;;
    esac
done
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "bin" / TOOL
    path.parent.mkdir()
    path.write_text(FAKE)
    path.chmod(0o755)
    (tmp_path / "scratch").mkdir()
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cuda_mps, "_runs_already", lambda: False)  # somebody else's on this machine
    return path


def processes_of(pipes: Path) -> list[int]:
    assert within(5, lambda: (pipes / "control").exists() and (pipes / "control").read_text() != "")
    return [int((pipes / name).read_text()) for name in ("control", "server")]


@pytest.mark.parametrize("stubborn", ["", "1"])
def test_it_runs_in_its_own_folder_and_nothing_is_left(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stubborn: str
) -> None:
    monkeypatch.setenv("STUBBORN", stubborn)
    service = PrivateMps.start()
    assert service is not None
    pipes, logs = (Path(service.environment[f"CUDA_MPS_{name}_DIRECTORY"]) for name in ("PIPE", "LOG"))
    assert pipes.is_dir()
    assert logs.is_dir()
    assert pipes.parent == logs.parent
    assert pipes.parent.parent == tmp_path / "scratch"
    assert pipes.parent.stat().st_mode & 0o077 == 0  # nobody else's
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(pipes))
    await_service()
    assert list(pipes.iterdir())
    running = processes_of(pipes)
    assert all(map(is_running, running))
    service.end()
    service.wait()
    assert within(2, lambda: not any(map(is_running, running)))
    assert list((tmp_path / "scratch").iterdir()) == []


def test_it_ends_with_us_even_if_we_are_killed(tool: Path, tmp_path: Path) -> None:
    code = (
        "import os, signal, pathlib, time\n"
        "from fedc2i.runs.cuda_mps import PrivateMps\n"
        "pipes = pathlib.Path(PrivateMps.start().environment['CUDA_MPS_PIPE_DIRECTORY'])\n"
        "while not (pipes / 'control').exists(): time.sleep(0.01)\n"
        "time.sleep(0.1); print((pipes / 'control').read_text(), (pipes / 'server').read_text(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False, timeout=30)
    assert done.returncode == -9
    running = [int(pid) for pid in done.stdout.split()]
    assert len(running) == 2
    assert within(5, lambda: not any(map(is_running, running)))
    assert within(5, lambda: list((tmp_path / "scratch").iterdir()) == [])


def test_there_is_none_without_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert PrivateMps.start() is None


def test_a_users_own_service_is_left_alone(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(cuda_mps, "_runs_already", RUNS_ALREADY)
        patch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        assert PrivateMps.start() is None
        with subprocess.Popen([tool, "-f"]) as theirs:
            control, server = processes_of(tmp_path)
            assert control == theirs.pid
            patch.delenv("CUDA_MPS_PIPE_DIRECTORY")
            assert PrivateMps.start() is None  # theirs has the usual folder, or one we do not know
            theirs.terminate()
    assert within(2, lambda: not is_running(server))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.parametrize(
    ("visible", "starts"), [("0", True), ("0,1", True), ("GPU-8c5f", True), ("1", False), ("1,0", False)]
)
def test_none_where_it_would_number_gpus_otherwise(
    tool: Path, monkeypatch: pytest.MonkeyPatch, visible: str, starts: bool
) -> None:
    """NVIDIA: a service that sees GPU 1 alone calls it 0 to its clients, whose own variable says 1."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    service = PrivateMps.start()
    assert (service is not None) == starts
    if service is not None:
        service.end()
        service.wait()


def test_a_service_that_cannot_be_started_leaves_no_folder(
    tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert PrivateMps.start() is None
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_program_that_fails_does_no_harm(tool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool.write_text("#!/bin/sh\nexit 1\n")
    service = PrivateMps.start()
    assert service is not None
    monkeypatch.setattr("fedc2i.runs.cuda_mps._STARTING", 0.1)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", service.environment["CUDA_MPS_PIPE_DIRECTORY"])
    await_service()  # not for long
    service.end()
    service.wait()
    assert list((tmp_path / "scratch").iterdir()) == []
