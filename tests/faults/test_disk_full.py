"""A disk that is full or may not be written to: one line, exit code 2, and a checkpoint that still serves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedc2i
from fedc2i import Federation, Model, UserError
from fedc2i.engine import checkpoint
from fedc2i.engine.records import Round
from fedc2i.runs.driver import execute
from fedc2i.runs.plan import Plan, prepare
from support.helpers import call, files_below, write_arrays

SETTINGS = {"rounds": 4, "epochs": 1, "batch_size": 5, "seeds": (0, 1), "executor": "looped", "device": "cpu"}
SETTINGS |= {"checkpoint_seconds": 0}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def plan(federation: Federation, model: Model, **settings: Any) -> Plan:
    return prepare(["fedc2i"], {**SETTINGS, **settings}, federation, model)[0]


def numbers(folder: Path) -> dict[str, bytes | None]:
    found = files_below(folder)
    return {name: own for name, own in found.items() if name.endswith((".jsonl", ".safetensors", ".toml"))}


def fill(disk: Path, left: int) -> None:
    """A file that leaves so many bytes of a disk free, or fewer where the run writes at the same time."""
    with suppress(OSError), (disk / "filler").open("ab") as file:
        file.write(b"x" * max(0, shutil.disk_usage(disk).free - left))


class AfterTwoRounds:
    """An observer that does something to the disk once the second round is over."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def begin(self, result: fedc2i.Result) -> None: ...

    def client(self, done: int, of: int) -> None: ...

    def round(self, report: Round) -> None:
        if (report.round, report.seed) == (2, 1):
            self._act()


@pytest.mark.parametrize("left", [0, 9_000, 60_000, 250_000])
def test_a_full_disk_ends_the_run_and_space_lets_it_go_on(
    small_disk: Path, tmp_path: Path, make_federation: Callable[..., Federation], model: Model, left: int
) -> None:
    """Whatever is the first thing that does not fit: tensors, a report, metrics, or models at the end."""
    federation = make_federation((12, 9))
    execute(plan(federation, model), tmp_path / "whole")
    folder = small_disk / "run"
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)$"):
        execute(plan(federation, model), folder, AfterTwoRounds(lambda: fill(small_disk, left)))
    saved = checkpoint.load(folder / "checkpoints")
    assert saved is not None
    assert saved.round >= 1
    assert not list(folder.rglob(".*.part")), "what was half-written takes no space"
    fill(small_disk, 0)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)$"):
        fedc2i.resume(folder, federation, model)
    assert checkpoint.load(folder / "checkpoints") is not None
    (small_disk / "filler").unlink()
    fedc2i.resume(folder, federation, model)
    assert numbers(folder) == numbers(tmp_path / "whole")


def test_a_limit_on_the_size_of_files_ends_the_run_alike(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    """A stand-in for a quota, in a process of its own: models of several clients do not fit, all smaller files do."""
    data = write_arrays(tmp_path / "data", make_federation((12, 9)))
    arguments = ["run", "fedavg", "--data", data, "--model", "lenet5", "--rounds", "2", "--set", "epochs=1"]
    arguments += ["--set", "checkpoint_seconds=0"]
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY)); "
    code += "from fedc2i.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("round000001.safetensors: cannot be written (File too large)")
    assert "Traceback" not in done.stderr
    answer = call("resume", str(tmp_path / "run"), "--json")  # here there is no limit
    assert answer.code == 0, answer.err
    assert json.loads(answer.out)["results"]["fedavg"]["rounds"] == 2


def assert_goes_on_once_unlocked(
    planned: Plan, folder: Path, whole: Path, lock: Callable[[], None], unlock: Callable[[], None], why: str
) -> None:
    execute(planned, whole)
    with pytest.raises(UserError, match=rf"cannot be written \({why}\)$"):
        execute(planned, folder, AfterTwoRounds(lock))
    saved, before = checkpoint.load(folder / "checkpoints"), files_below(folder)
    assert saved is not None
    assert saved.round == 1
    with pytest.raises(UserError, match=rf"cannot be written \({why}\)$"):
        fedc2i.resume(folder, planned.federation, planned.model)
    assert files_below(folder) == before
    unlock()
    fedc2i.resume(folder, planned.federation, planned.model)
    assert numbers(folder) == numbers(whole)


def test_a_disk_that_becomes_read_only(small_disk: Path, tmp_path: Path, federation: Federation, model: Model) -> None:
    def remount(how: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{how}", str(small_disk)], check=True)

    planned = plan(federation, model)
    locks = (lambda: remount("ro")), (lambda: remount("rw"))
    assert_goes_on_once_unlocked(planned, small_disk / "run", tmp_path / "whole", *locks, "Read-only file system")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to(tmp_path: Path, federation: Federation, model: Model) -> None:
    folder = tmp_path / "run"

    def change(mode: int) -> None:
        for path in (folder, *(own for own in folder.rglob("*") if own.is_dir())):
            path.chmod(mode)

    locks = (lambda: change(0o555)), (lambda: change(0o755))
    assert_goes_on_once_unlocked(plan(federation, model), folder, tmp_path / "whole", *locks, "Permission denied")
