"""Many rounds at flat memory, many clients with few at a time, and many processes in one folder."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data.arrays import from_arrays
from fedc2i.runs.cache import RunCache
from fedc2i.runs.folder import new_folder
from fedc2i.runs.plan import prepare

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is measured on Linux")


def child(*arguments: object, folder: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def measured(*arguments: object) -> dict[str, Any]:
    process = child(HERE / "measure.py", *arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err[-2000:]
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def grown_per_round(found: dict[str, Any]) -> float:
    """Kilobytes a round, by a straight line through the second half of the samples."""
    rounds, kilobytes = np.array(found["memory"]).T
    half = len(rounds) // 2
    return float(np.polyfit(rounds[half:], kilobytes[half:], 1)[0])


def test_memory_stays_flat() -> None:
    found = measured("long", "fedc2i", 60, 3)
    assert found["rounds"] == 60
    assert grown_per_round(found) < 50  # of 4 clients; what a round reports is some 4 kB, one kept model 30 kB


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedc2i"])
def test_memory_stays_flat_over_2000_rounds(method: str) -> None:
    found = measured("long", method, 2000, 100)
    print(method, found)
    assert found["rounds"] == 2000
    assert grown_per_round(found) < 10


@pytest.mark.slow
def test_a_hundred_clients() -> None:
    found = measured("wide", "fedc2i:influence=first-order", 100, 2)
    assert found["participants"] == [10, 10]
    assert found["peak"] - found["start"] < 300 * 1024


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedc2i:influence=first-order"])
def test_a_thousand_clients(method: str) -> None:
    found = measured("wide", method, 1000, 5)
    print(method, found)
    assert found["participants"] == [100] * 5
    assert found["peak"] - found["start"] < 4 * 2**20


RUN = ("run", "fedavg", "--data", "digits:scans,ink", "--model", "lenet5", "--rounds", "1", "--device", "cpu")
SHORT = ("--set", "epochs=1", "--set", "executor=looped", "--set", "evaluate_every=0", "--set", "batch_size=256")


def together(count: int, folder: Path, *more: str) -> list[tuple[int, str]]:
    """So many processes of one command at the same time: how each ended, and what it said on stderr."""
    started = [child("-m", "fedc2i", *RUN, *SHORT, *more, folder=folder) for _ in range(count)]
    return [(process.wait(), err) for process in started for _, err in [process.communicate()]]


def test_eight_claims_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        unnamed = list(pool.map(lambda _: new_folder(None, "a"), range(8)))
        assert sorted(folder.name for folder in unnamed) == [f"a-{number:03d}" for number in range(1, 9)]
        gate = Barrier(8)

        def claim(_: int) -> str:
            gate.wait()
            try:
                return str(new_folder(Path("mine")))
            except UserError as error:
                return str(error)

        said = list(pool.map(claim, range(8)))
    assert said == ["mine"] * 8  # it is empty; the lock of the run itself then decides


@pytest.mark.slow
def test_runs_without_a_name_each_have_a_folder(tmp_path: Path) -> None:
    assert [code for code, _ in together(8, tmp_path)] == [0] * 8
    assert len(list((tmp_path / "runs").iterdir())) == 8
    for folder in (tmp_path / "runs").iterdir():
        assert (folder / "summary.json").is_file()
        assert tomllib.loads((folder / "config.toml").read_text())["rounds"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("there", [False, True])
def test_only_one_run_takes_a_folder(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "mine").mkdir()
    ends = together(8, tmp_path, "--out", "mine")
    assert sorted(code for code, _ in ends) == [0] + [2] * 7
    for code, err in ends:
        assert "Traceback" not in err
        if code:
            assert err.splitlines()[-1].startswith("fedc2i: error: mine: ")
    assert (tmp_path / "mine" / "summary.json").is_file()
    lines = (tmp_path / "mine" / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == len(set(lines))


@pytest.mark.parametrize("count", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_processes_share_a_store(tmp_path: Path, count: int) -> None:
    processes = [child(HERE / "measure.py", "store", tmp_path) for _ in range(count)]
    found = []
    for process in processes:
        out, err = process.communicate()
        assert process.returncode == 0, err[-2000:]
        found.append(json.loads(out.splitlines()[-1]))
    assert all(one["accuracy"] == found[0]["accuracy"] for one in found)
    assert sum(one["computed"] for one in found) == 4  # two methods, two seeds: each once in all
    assert len(list(tmp_path.iterdir())) == 4


def test_store_knows_what_a_topology_file_says(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 256, (6, 16, 16), np.uint8)
    y = np.arange(6) % 2
    data = from_arrays(dict.fromkeys("abc", (x, y, x, y)))
    folders = []
    for text in ("a: b\nb: a\nc:\n", "a:\nb:\nc:\n"):
        (tmp_path / "circle.txt").write_text(text)
        (plan,) = prepare(["fedavg"], {"topology": str(tmp_path / "circle.txt"), "rounds": 1}, data, "lenet5")
        folders.append(RunCache(tmp_path / "store").folder(plan, 0))
    assert folders[0] != folders[1]
