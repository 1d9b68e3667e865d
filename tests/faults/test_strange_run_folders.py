"""A run folder from a stranger: it runs no code, takes no memory beyond its settings, and writes to nowhere else."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readers import sound, write_files

import fedc2i
from fedc2i.analysis.influence_intervals import intervals
from fedc2i.cli.main import main
from fedc2i.core.errors import UserError
from fedc2i.runs.finished_run import read_run, reopen

EVIL = "from pathlib import Path\nPath({mark!r}).touch()\n"
HEART = {"rounds": 1, "epochs": 1, "device": "cpu"}
OWN = Path("/proc/self")
pytestmark = pytest.mark.skipif(not OWN.is_dir(), reason="memory is measured as Linux does")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of three clients."""
    write_files(tmp_path / "run", sound("run folder"))
    return tmp_path / "run"


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Exists when the code of evil.py was executed."""
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    return tmp_path / "mark"


def settings(folder: Path, **changed: str) -> None:
    path = folder / "config.toml"
    text = path.read_text()
    for name, value in changed.items():
        text, found = re.subn(rf"(?m)^{name} = .*$", f'{name} = "{value}"', text)
        assert found == 1
    path.write_text(text)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the command in this process; returns its exit code and all that it prints."""

    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fedc2i", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return call


# Code


@pytest.mark.parametrize("what", ["method", "model"])
@pytest.mark.parametrize("command", ["resume", "reopen", "intervals"])
def test_code_that_a_run_folder_names_is_not_executed(folder: Path, mark: Path, what: str, command: str) -> None:
    settings(folder, **{what: f"{mark.parent}/evil.py:Thing"}, data="heart")
    if command == "resume":
        (folder / "summary.json").unlink()
    call: dict[str, Callable[[], object]] = {
        "resume": lambda: fedc2i.resume(folder),
        "reopen": lambda: reopen(folder),
        "intervals": lambda: intervals(folder),
    }
    with pytest.raises(UserError, match=r"evil\.py:Thing.*--trust|measures no influence"):
        call[command]()
    assert not mark.exists()


def test_trusted_code_is_executed(folder: Path, mark: Path) -> None:
    settings(folder, method=f"{mark.parent}/evil.py:Thing", data="heart")
    with pytest.raises(UserError, match="defines no 'Thing'"):
        reopen(folder, trust=True)
    assert mark.exists()


def test_commands_need_trust_in_words(folder: Path, mark: Path, command: Callable[..., tuple[int, str]]) -> None:
    """Of a comparison, too, whose plan.json names the code."""
    settings(folder, method=f"{mark.parent}/evil.py:Thing", data="heart")
    (folder / "summary.json").unlink()
    whole = folder.with_name("comparison")
    whole.mkdir()
    entry = {"folder": "thing", "config": (folder / "config.toml").read_text(), "fingerprint": None}
    entry["fingerprint"] = {"settings": "{}", "data": {}, "versions": {}, "device": "cpu", "given": [], "notes": []}
    entry["fingerprint"]["files"] = {}
    (whole / "plan.json").write_text(json.dumps({"runs": [entry]}))
    (folder / "job.json").unlink(missing_ok=True)
    for where in (folder, whole):
        code, said = command("resume", str(where))
        assert code == 2, said
        assert "--trust" in said
        assert not mark.exists()
    assert "defines no 'Thing'" in command("resume", str(folder), "--trust")[1]
    assert mark.exists()


def test_a_local_federation_runs_no_code_that_its_job_names(tmp_path: Path, mark: Path) -> None:
    pytest.importorskip("flwr.app")
    from fedc2i.deploy.job import Job
    from fedc2i.deploy.local_federation import FEDERATION, read_job

    for named in ({"method": f"{mark.parent}/evil.py:Thing"}, {"settings": {"model": f"{mark.parent}/evil.py:f"}}):
        Job(**{"out": tmp_path, "method": "fedavg", "sites": ("a",), "local": FEDERATION, **named}).write()
        (tmp_path / FEDERATION / "sites").mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError, match=r"evil\.py.*--trust"):
            read_job(tmp_path)
        assert read_job(tmp_path, trust=True).local == FEDERATION


# Memory

LITTLE = 150_000  # kilobytes; each attack took three times as much or more


def kilobytes(what: str) -> int:
    return int(re.search(rf"{what}:\s+(\d+)", (OWN / "status").read_text())[1])  # type: ignore[index]


@contextmanager
def little_memory() -> Iterator[None]:
    """Fails if more than a little is taken at any moment."""
    (OWN / "clear_refs").write_text("5")  # forgets the peak of earlier tests
    before = kilobytes("VmRSS")
    yield
    assert kilobytes("VmHWM") - before < LITTLE


def archive(path: Path, **arrays: np.ndarray[Any, Any]) -> None:
    """Arrays into an npz file, whatever else is in it; zeros are packed a thousandfold."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as new:
        for name in set(old.namelist()) - {f"{name}.npy" for name in arrays}:
            new.writestr(name, old.read(name))
        for name, array in arrays.items():
            with new.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))  # type: ignore[arg-type]
                for _ in range(0, array.nbytes, 2**20):
                    file.write(bytes(2**20))
    path.write_bytes(buffer.getvalue())


def far_round(folder: Path) -> None:
    (folder / "influence.npz").unlink()  # as of a method that measures none; it would lack rounds
    entry = {"seed": 0, "round": 10**7, "client": "a", "point": "trained", "metric": "accuracy", "value": 1}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def many_rounds(folder: Path) -> None:
    """The settings have as many."""
    text = re.sub(r"(?m)^rounds = .*$", "rounds = 10000000", (folder / "config.toml").read_text())
    (folder / "config.toml").write_text(text)
    far_round(folder)


def large_array(name: str, *shape: int, file: str = "influence.npz") -> Callable[[Path], None]:
    return lambda folder: archive(folder / file, **{name: zeros(*shape)})


def zeros(*shape: int) -> np.ndarray[Any, Any]:
    """Zeros that take no memory here."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


@pytest.mark.parametrize(
    "attack",
    [
        far_round,
        many_rounds,
        large_array("seed0_influence_vector", 2**15, 3, 2**10),
        large_array("seed0_influence_vector", 2, 2**13, 2**13),
        large_array("seed0_received", 2**18, 2**9, file="predictions.npz"),
        large_array("labels", 2**27, file="predictions.npz"),
    ],
    ids=["round", "rounds", "influence of many rounds", "of many clients", "predictions", "labels"],
)
def test_memory_is_bounded_by_the_settings(folder: Path, attack: Callable[[Path], None]) -> None:
    """Each of these could take gigabytes."""
    attack(folder)
    with little_memory(), pytest.raises(UserError) as refused:
        read_run(folder)
    assert "bytes of memory are free" not in str(refused.value)  # refused by what it is, whatever the machine


def test_reports_of_an_interrupted_run_are_bounded(tmp_path: Path) -> None:
    from readers import _report

    from fedc2i.runs.folder import read_reports, write_report

    write_report(tmp_path, _report())
    archive(tmp_path / "round000001.npz", **{"influence/influence_vector": zeros(3, 2**26)})
    with little_memory(), pytest.raises(UserError, match="not a round's report"):
        read_reports(tmp_path, 2)


# Links


def test_links_in_a_run_folder_are_refused_before_anything_is_written(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "diary.txt").write_text("mine\n")
    (folder / "summary.json").unlink()
    for name, target in {"metrics.jsonl": "diary.txt", "accuracy.png": "diary.txt", "checkpoints": ".."}.items():
        place = folder / name
        content = place.read_bytes() if place.is_file() else None
        place.unlink(missing_ok=True)
        place.symlink_to(victim / target)
        with pytest.raises(UserError, match=rf"{name}: a link.*remove"):
            fedc2i.resume(folder)
        place.unlink()
        if content is not None:
            place.write_bytes(content)
    assert [(path.name, path.read_text()) for path in victim.iterdir()] == [("diary.txt", "mine\n")]


def test_a_pipe_in_a_run_folder_is_refused(folder: Path) -> None:
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    with pytest.raises(UserError, match="not a file"):
        read_run(folder)
    (folder / "summary.json").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl: not a file"):
        fedc2i.resume(folder)


def test_intervals_are_not_written_into_a_folder_with_links(folder: Path, tmp_path: Path) -> None:
    (folder / "models").rename(tmp_path / "elsewhere")
    (folder / "models").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="models: a link"):
        intervals(folder)


def test_a_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    """The name of the temporary file can be guessed."""
    from fedc2i.core.files import write_atomically

    (tmp_path / "diary").write_text("mine")
    (tmp_path / f".a.json.{os.getpid()}.part").symlink_to(tmp_path / "diary")
    write_atomically(tmp_path / "a.json", b"{}")
    assert (tmp_path / "diary").read_text() == "mine"
    assert (tmp_path / "a.json").read_bytes() == b"{}"


# The terminal

STRANGE = "\x1b]0;owned\x07\x9b31m\u202e\x7f"


def test_no_control_characters_in_the_terminal(folder: Path, command: Callable[..., tuple[int, str]]) -> None:
    strange = json.dumps(STRANGE)[1:-1]
    for path in (folder / "summary.json", folder / "metrics.jsonl"):
        text = path.read_text()
        for name in "abc":
            text = text.replace(f'"{name}"', f'"{name}{strange}"')
        path.write_text(text)
    said = json.loads((folder / "summary.json").read_text())
    said |= {"title": f"T{STRANGE}", "notes": [STRANGE], "model": STRANGE, "data": STRANGE, "key": STRANGE}
    said["classes"] = [name + STRANGE for name in said["classes"]]
    (folder / "summary.json").write_text(json.dumps(said))
    page = str(folder.parent / "page.html")
    for words in ("resume", "report", "watch --once", "influence show", "resume --json", "report --json"):
        out = ["--out", page] if "report" in words else []
        code, said = command(*words.split(), str(folder), *out)
        assert code == (2 if "influence" in words else 0), said
        assert not {letter for letter in said if not letter.isprintable()} - {"\n"}, words
