"""Killed with SIGKILL at moments that cover all phases of a round, gone on with each time, and equal to the bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedc2i import Federation
from support.helpers import write_arrays

DRIVER = Path(__file__).with_name("kill_driver.py")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
MOMENTS, BY_CLOCK = 35, 2

pytestmark = pytest.mark.skipif(os.name != "posix", reason="SIGKILL and fork are of POSIX")


def drive(folder: Path, kills: int, seed: int, again: float) -> list[dict[str, Any]]:
    command = [sys.executable, str(DRIVER), str(folder), str(kills), str(seed), str(again)]
    done = subprocess.run(command, capture_output=True, text=True, env=ONE_THREAD, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_equal(cases: Sequence[dict[str, Any]], moments: int) -> None:
    assert not [case for case in cases if case["differs"]]
    assert all(case["cuts"] for case in cases[:moments])
    assert sum(case["cuts"] for case in cases) >= moments
    labels = [case["where"][0].partition(",")[0] for case in cases[:moments]]
    assert len(set(labels)) == moments


def test_killed_in_every_phase_of_a_round(tmp_path: Path) -> None:
    cases = drive(tmp_path, MOMENTS + BY_CLOCK, seed=0, again=0.2)
    assert len(cases) == MOMENTS + BY_CLOCK
    assert_all_equal(cases, MOMENTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_killed_at_other_moments(tmp_path: Path, seed: int) -> None:
    assert_all_equal(drive(tmp_path, MOMENTS + 40, seed, again=0.4), MOMENTS)


# The real commands, killed by the clock.


def fedc2i(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from fedc2i.cli.main import main; main()", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=ONE_THREAD,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's is ignored
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def numbers(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name in ("metrics.jsonl", "config.toml") or path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif path.name == "influence.npz":
            with np.load(path) as archive:
                found[name] = {part: archive[part].tobytes() for part in archive.files}
    return found


def is_begun(folder: Path) -> bool:
    return any(folder.rglob("checkpoints/round*.json")) or any(folder.rglob("summary.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "fedc2i", "--rounds", "200", "--seeds", "0,1", "--set", "executor=workers", "--set", "workers=2"),
        ("run", "fedc2i-server", "--rounds", "150", "--set", "executor=stacked", "--topology", "ring"),
        ("compare", "local", "fedavg", "fedc2i", "--rounds", "60", "--set", "clients_per_round=3"),
    ],
    ids=["workers", "stacked", "compare"],
)
def test_the_command_is_killed_and_resumed_until_it_is_done(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    dice = random.Random(0)
    arguments = (*arguments, "--set", "checkpoint_seconds=0")
    finished(fedc2i(*arguments, "--out", "whole", folder=tmp_path))
    process, kills = fedc2i(*arguments, "--out", "cut", folder=tmp_path), 0
    while not is_begun(tmp_path / "cut"):
        assert process.poll() is None
        time.sleep(0.02)
    while process.poll() is None:
        time.sleep(dice.uniform(0, 1.5))
        kills += process.poll() is None
        process.kill()
        process.communicate()
        process = fedc2i("resume", "cut", "--json", folder=tmp_path)
        if kills >= 4:
            break
        time.sleep(dice.uniform(2, 3))  # most of which is the start of Python
    out = finished(process)
    assert kills >= 2
    assert json.loads(out)["folder"] == "cut"
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert not [path for path in (tmp_path / "cut").rglob("*") if path.name in ("checkpoints", "rounds")]


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    settings = ("--rounds", "500", "--set", "executor=looped", "--set", "checkpoint_seconds=0")
    process = fedc2i("run", "fedavg", *settings, "--out", "run", folder=tmp_path)
    while not is_begun(tmp_path / "run"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    try:
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.rstrip().splitlines()[-2:] == [
        "To resume: fedc2i resume run",
        "fedc2i: interrupted",
    ]
    assert "Traceback" not in err


# Real sites under secure aggregation


@pytest.mark.slow
def test_a_coordinator_killed_inside_a_secure_round_ends_with_the_models_of_a_plain_run(
    tmp_path: Path, make_federation: Callable[..., Federation]
) -> None:
    pytest.importorskip("flwr.app")
    data = write_arrays(tmp_path / "arrays", make_federation((24, 24, 24)))
    local = ("--set", "epochs=1", "--set", "optimizer=sgd")  # Adam would enlarge differences in the last digit
    words = ("fedavg", "--data", data, "--model", "lenet5", "--rounds", "3", *local)
    finished(fedc2i("flower-local", *words, "--out", "plain", "--keep", "plain-sites", folder=tmp_path))
    secure = fedc2i(
        "flower-local", *words, "--out", "secure", "--keep", "sites", "--secure-aggregation", folder=tmp_path
    )
    secrets = [tmp_path / "sites" / "sites" / name / "masks.bin" for name in "abc"]
    until = time.monotonic() + 300
    log = tmp_path / "secure" / "log.txt"
    while not (log.exists() and "round 1/3" in log.read_text() and all(own.exists() for own in secrets)):
        assert secure.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    secure.kill()
    secure.communicate()
    finished(fedc2i("resume", "secure", folder=tmp_path))
    for name in "abc":
        plain, masked = (
            load_file(next((tmp_path / sites / "sites" / name / "state").glob("*-seed0/received.safetensors")))
            for sites in ("plain-sites", "sites")
        )
        for key, tensor in plain.items():
            np.testing.assert_allclose(masked[key], tensor, rtol=1e-4, atol=1e-5)
