"""Real SuperLinks and SuperNodes on loopback, with TLS and authentication, started by the commands that users type."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr.app")
import fedc2i
from fedc2i.deploy.child_process import free_port
from fedc2i.runs.results import summary as summary_of

PROGRAM = (sys.executable, "-m", "fedc2i")
TOLERANCE = 1e-4  # of an accuracy in percent: the engines do the same operations in the same order
SITES = ("Scans", "Photos", "Ink")


def command(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=600, env=environment, **more)


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return found


def assert_same_accuracies(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    for point in ("received", "trained"):
        for name, score in theirs["points"][point]["accuracy"].items():
            assert mine["points"][point]["accuracy"][name]["mean"] == pytest.approx(score["mean"], abs=TOLERANCE)


def in_process(method: str, sites: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    return summary_of(fedc2i.run(method, fedc2i.load("digits").select(sites), model="lenet5", **settings))


def test_two_real_hospitals_give_the_numbers_of_the_in_process_engine(tmp_path: Path) -> None:
    words = ("--data", "heart:switzerland,va", "--rounds", "2", "--out", str(tmp_path / "run"), "--json")
    done = command("flower-local", "fedc2i", *words)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (only,) = told["results"].values()
    want = summary_of(fedc2i.run("fedc2i", "heart:switzerland,va", rounds=2, device="cpu"))
    assert only["points"] == want["points"]
    assert "Switzerland has joined" in done.stderr
    assert "The models were the sites' and are removed with them; --keep DIR keeps both" in done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not (tmp_path / "run" / "models").exists()


# A federation as it is really set up, site by site.


class Federation:
    """Folders of a coordinator and of some sites on loopback."""

    def __init__(self, folder: Path, sites: tuple[str, ...], port: int) -> None:
        self.folder, self.names = folder, sites
        self.coordinator = folder / "coordinator"
        words = ("--host", "localhost", "--port", str(port))
        assert command("coordinator", "init", str(self.coordinator), *words).returncode == 0
        for name in sites:
            words = ("--name", name, "--data", "digits", "--client", name, "--coordinator", f"127.0.0.1:{port}")
            words += ("--ca", str(self.coordinator / "ca.crt"))
            done = command("site", "init", str(folder / name), *words)
            assert done.returncode == 0, done.stderr
            done = command("coordinator", "admit", str(self.coordinator), str(folder / name / f"{name}.csr"))
            assert done.returncode == 0, done.stderr

    @contextmanager
    def site(self, name: str) -> Iterator[subprocess.Popen[str]]:
        log = (self.folder / f"{name}.out").open("w")
        running = subprocess.Popen(
            [*PROGRAM, "site", "start", str(self.folder / name)], stdout=log, stderr=log, text=True
        )
        try:
            yield running
        finally:
            running.terminate()
            running.wait(60)
            log.close()

    def start(self, *words: str) -> subprocess.Popen[str]:
        log = (self.folder / "coordinator.out").open("a")
        return subprocess.Popen(
            [*PROGRAM, "coordinator", "start", str(self.coordinator), *words], stdout=log, stderr=log, text=True
        )

    def said(self) -> str:
        return (self.folder / "coordinator.out").read_text()

    def run_folder(self) -> Path:
        (only,) = (self.coordinator / "runs").iterdir()
        return only


def until(what: Callable[[], Any], limit: float = 300.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.2)


def node_of(folder: Path) -> list[int]:
    """The processes of a site's SuperNode: those that name its folder, but for `fedc2i site start` itself."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(b"--superlink" in word for word in words) and str(folder).encode() in b" ".join(words):
            found.append(int(path.name))
    return found


@pytest.mark.slow
def test_a_site_killed_in_the_middle_of_a_round_does_not_stop_it_and_is_taken_back(tmp_path: Path) -> None:
    federation = Federation(tmp_path, SITES[:3], free_port())
    with federation.site(SITES[0]), federation.site(SITES[1]), federation.site(SITES[2]):
        running = federation.start("fedc2i", "--rounds", "40", "--deadline", "120")
        try:
            until(lambda: "round 2/40" in federation.said())
            for process in node_of(tmp_path / SITES[2]):
                os.kill(process, signal.SIGKILL)
            until(lambda: f"sites answered; {SITES[2]}" in federation.said())
            until(lambda: f"{SITES[2]} takes part again" in federation.said())
        finally:
            running.send_signal(signal.SIGINT)
            assert running.wait(60) == 130
    assert "Traceback" not in federation.said()


@pytest.mark.slow
def test_a_coordinator_killed_in_the_middle_goes_on_by_the_same_command(tmp_path: Path) -> None:
    federation = Federation(tmp_path, SITES[:2], free_port())
    words = ("fedc2i", "--rounds", "8")
    with federation.site(SITES[0]), federation.site(SITES[1]):
        running = federation.start(*words)
        until(lambda: "round 3/8" in federation.said())
        running.kill()
        running.wait()
        again = federation.start(*words)
        assert again.wait(300) == 0, federation.said()
    assert "resumes in round" in federation.said()
    assert_same_accuracies(summary(federation.run_folder()), in_process("fedc2i", SITES[:2], rounds=8))
    trained = [path.name for path in (tmp_path / SITES[0] / "state").glob("*/*.safetensors")]
    assert {"received.safetensors", "trained.safetensors"} <= set(trained)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["interrupted", "killed"])
def test_a_federation_on_one_machine_that_was_cut_off_goes_on_by_resume(number: signal.Signals, tmp_path: Path) -> None:
    log, out = tmp_path / "said", tmp_path / "run"
    words = ("flower-local", "fedc2i", "--data", "digits", "--sites", "2", "--rounds", "4", "--out", str(out))
    with log.open("w") as file:
        running = subprocess.Popen([*PROGRAM, *words], stdout=file, stderr=file)
        until(lambda: "round 2/4" in log.read_text() or running.poll() is not None)
        running.send_signal(number)
        assert running.wait(60) == (130 if number == signal.SIGINT else -signal.SIGKILL), log.read_text()
    if number == signal.SIGINT:
        assert f"`fedc2i resume {out}` resumes after the last finished round" in log.read_text()
    done = command("resume", str(out))
    assert done.returncode == 0, done.stderr
    assert "resumes in round" in done.stderr
    assert_same_accuracies(summary(out), in_process("fedc2i", SITES[:2], rounds=4))
    assert not (out / "federation").exists()
    again = command("resume", str(out))
    assert f"{out} is finished" in again.stderr
    assert again.stdout == done.stdout


THIEF = """
from pathlib import Path

from fedc2i.data.federation import InputSpec
from fedc2i.models import networks

site = Path(__file__).parents[4]
reached = []
if (site / "site.pub").name and Path(__file__).parent.name == "plugins":
    for name in ("site.key", "audit.log", "site.toml"):
        try:
            reached.append(f"{name} {len((site / name).read_bytes())}")
        except OSError:
            pass
    print(f"executed, and reached {reached}")


def build(classes, shape):
    return networks.build("lenet5", classes, InputSpec(shape))
"""


@pytest.mark.slow
def test_code_from_the_coordinator_waits_for_a_person_at_every_site(tmp_path: Path) -> None:
    federation, model = Federation(tmp_path, SITES[:2], free_port()), tmp_path / "thief.py"
    model.write_text(THIEF)
    logs = {name: tmp_path / name / "logs" / f"{name}.log" for name in SITES[:2]}
    with federation.site(SITES[0]), federation.site(SITES[1]):
        running = federation.start("fedavg", "--model", f"{model}:build", "--rounds", "2")
        try:
            until(lambda: federation.said().count("only after a person has approved it: model_thief.py") >= 1)
            shown = command("site", "pending", str(tmp_path / SITES[0])).stdout
            digits = shown.split()[1]
            assert 'print(f"executed' in shown
            assert "executed, and" not in "".join(log.read_text() for log in logs.values())
            for name in SITES[:2]:
                until(lambda name=name: digits in command("site", "pending", str(tmp_path / name)).stdout)
                done = command("site", "approve", str(tmp_path / name), digits[:16])
                assert done.returncode == 0, done.stderr
            assert running.wait(300) == 0, federation.said()
        finally:
            running.kill()
    for name, log in logs.items():
        assert "approved code: executed, and reached []" in log.read_text()
        done = command("site", "audit", str(tmp_path / name))
        assert done.returncode == 0, done.stderr
        assert "approved  model_thief.py" in done.stdout or "approved model_thief.py" in done.stdout
        assert "round 2, fedavg" in done.stdout
