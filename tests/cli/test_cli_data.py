"""``fedc2i data``: what its commands print and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

from fedc2i.cli.data import app
from fedc2i.core.errors import UserError
from fedc2i.data import catalog, converted_files, digit5
from fedc2i.data.federation import DataOptions
from support.published_files import digits, write_npz, write_usps


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDC2I_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "data").mkdir()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def run_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def problem(*arguments: str) -> str:
    """The one line of the `UserError` with which the command ends."""
    error = run(*arguments).exception
    assert isinstance(error, UserError)
    assert "\n" not in str(error)
    return str(error)


def usps(tmp_path: Path, count: int = 1200) -> Path:
    write_usps(tmp_path / "data", count, 100)
    return tmp_path / "data" / "usps.bz2"


def test_ls_of_folders_without_data(tmp_path: Path) -> None:
    result = run("ls")
    assert result.exit_code == 0
    assert result.stdout.count("missing") == 18
    assert result.stdout.count("built in") == 2
    assert "The Street View House Numbers (SVHN) Dataset" in result.stdout
    assert "train_32x32.mat, test_32x32.mat" in result.stdout
    other = tmp_path / "[red]x"  # printed as it is
    other.mkdir()
    assert "[red]x" in run("ls", "--data-dir", str(other)).stdout
    assert run_json("ls", "--data-dir", str(other))["data_dir"] == str(other)
    assert "absent: no such folder" in problem("ls", "--data-dir", str(tmp_path / "absent"))


def test_ls_tells_states_apart(tmp_path: Path) -> None:
    usps(tmp_path)
    write_npz(tmp_path / "data" / "synth.npz", digits(900, 28), digits(100, 28))
    states = {entry["domain"]: entry["state"] for entry in run_json("ls")["domains"]}
    assert (states["usps"], states["synth"], states["mnist"], len(states)) == ("raw", "ready", "missing", 18)
    text = run("ls").stdout
    assert "ready, a stand-in" in text
    assert "`fedc2i data prepare usps` converts it" in text
    assert run("prepare", "usps").exit_code == 0
    entry = next(entry for entry in run_json("ls")["domains"] if entry["domain"] == "usps")
    assert (entry["state"], entry["paths"]) == ("cached", [str(converted_files.file_of("digit5", "usps"))])


def test_prepare_then_check(tmp_path: Path) -> None:
    usps(tmp_path)
    result = run("prepare", "digit5")
    assert result.exit_code == 0
    assert "USPS: 1040 training and 260 test images in" in result.stdout
    assert "No published files found of MNIST, SVHN, SynthDigits, MNIST-M." in result.stderr
    report = next(entry for entry in run_json("check")["domains"] if entry["domain"] == "usps")
    assert (report["verified"], report["shape"], sum(report["train"]), report["problem"]) == (True, [28, 28], 1040, "")
    assert "ok, verified" in run("check", "usps").stdout
    before = converted_files.manifest(converted_files.file_of("digit5", "usps"))
    usps(tmp_path, 1500)
    run("prepare", "usps")  # replaces what is cached
    after = converted_files.manifest(converted_files.file_of("digit5", "usps"))
    assert before is not None
    assert after is not None
    assert before.sources != after.sources


def test_what_is_missing_or_damaged(tmp_path: Path) -> None:
    assert "no data for USPS" in problem("check", "usps")
    assert "`fedc2i data ls`" in problem("check")
    assert "no benchmark data 'cifar', allowed are digit5, office10, hapt, amazon, ham10000, mnist" in problem(
        "prepare", "cifar"
    )
    path = usps(tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    assert "usps.bz2: cannot be read" in problem("prepare", "usps")
    assert not converted_files.root().exists()
    path.unlink()
    write_npz(tmp_path / "data" / "usps.npz", digits(900, 28), digits(100, 28))
    assert "usps: no published files of USPS in" in problem("prepare", "usps")
    result = run("check")
    assert result.exit_code == 0
    assert "90-90" in result.stdout


def broken(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "data" / "usps.npz"
    train, test = digits(900, 28), digits(100, 28)
    if kind == "label":
        test[1][5] = 11
    elif kind == "class":
        train[1][train[1] == 4] = 3
    elif kind == "few":
        train = digits(500, 28)
    elif kind == "shape":
        train = (train[0][:, :, :, :2], train[1])
    write_npz(path, train, test)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-500])
    elif kind == "checksum":
        converted_files.write(path, {"x": np.zeros(1)}, [])
        write_npz(path, train, test)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("label", "label 11 is out of range"),
        ("class", "no train image of class '4'"),
        ("few", "USPS has 500 training images"),
        ("shape", "expected uint8 (N, H, W)"),
        ("cut", "usps.npz: cannot be read"),
        ("checksum", "its checksum differs from usps.manifest.json"),
    ],
)
def test_check_finds(tmp_path: Path, kind: str, message: str) -> None:
    broken(tmp_path, kind)
    assert message in problem("check", "usps")
    report = run_json("check", "usps")
    assert message in report["problems"][0]
    assert "PROBLEM" in run("check", "usps").stdout


def test_other_published_files_have_a_place_of_their_own(tmp_path: Path) -> None:
    """Those of another data folder are not hidden by what the cache holds of the first, nor take its place."""

    def entry() -> tuple[str, str]:
        found = next(entry for entry in run_json("ls")["domains"] if entry["domain"] == "usps")
        return found["state"], Path(found["paths"][0]).name

    def used() -> list[tuple[str, str]]:
        before = entry()
        digit5.load("usps", DataOptions())
        return [before, entry()]

    path = usps(tmp_path)
    assert used() == [("raw", "usps.bz2"), ("cached", "usps.npz")]
    kept = converted_files.sha256(converted_files.file_of("digit5", "usps"))
    usps(tmp_path, 1500)
    (_, (state, other)) = found = used()
    assert found[0] == ("raw", "usps.bz2")
    assert state == "cached"
    assert other.startswith("usps-")
    assert used() == [("cached", other)] * 2
    assert converted_files.sha256(converted_files.file_of("digit5", "usps")) == kept
    path.unlink()
    assert used() == [("cached", "usps.npz")] * 2


def test_files_that_come_and_go_as_people_look_are_no_others(tmp_path: Path) -> None:
    (tmp_path / "amazon" / "bike").mkdir(parents=True)
    (tmp_path / "amazon" / "bike" / "1.jpg").write_bytes(b"image")
    before = converted_files.fingerprint(tmp_path / "amazon")
    for name in (".DS_Store", "Thumbs.db"):
        (tmp_path / "amazon" / "bike" / name).write_bytes(b"more")
    assert converted_files.fingerprint(tmp_path / "amazon") == before


def test_the_name_of_a_benchmark_comes_before_that_of_a_domain() -> None:
    assert {domain.source for domain in catalog.select("amazon")} == {"amazon"}
    assert [(own.source, own.key) for own in catalog.select("office10/amazon")] == [("office10", "amazon")]
    assert [own.source for own in catalog.select("webcam")] == ["office10"]
