from __future__ import annotations

import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data import arrays, sources
from fedc2i.data.sources import load


def write_client(root: Path) -> None:
    x, y = np.zeros((12, 8, 8), np.uint8), np.arange(12) % 2
    np.savez(root / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y)


def test_dispatch_with_argument_and_size(tmp_path: Path) -> None:
    write_client(tmp_path)
    federation = load(f"arrays:{tmp_path}", image_size=16)
    assert federation.names == ("a",)
    assert federation.input.shape == (3, 16, 16)
    assert load("digits:ink").names == ("Ink",)


def test_data_in_the_package_starts_without_importing_scikit_learn() -> None:
    code = "import sys; from fedc2i.data.sources import load; load('heart'); load('digits'); "
    code += "print('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_argument_may_hold_a_colon(tmp_path: Path) -> None:
    root = tmp_path / "c:d"
    root.mkdir()
    write_client(root)
    assert load(f"arrays:{root}").names == ("a",)


def test_partition_and_seed_are_passed_on() -> None:
    first = load("digits:fonts", partition="dirichlet:3:0.5", seed=1)
    assert first.names == ("Fonts/1", "Fonts/2", "Fonts/3")
    assert first.preset["model"] == "lenet5"
    other = load("digits:fonts", partition="dirichlet:3:0.5", seed=2)
    assert first.checksums != other.checksums


@pytest.mark.parametrize("spec", ["", "mnist", "Digits", "os", "partition:iid", "../digits", ":x"])
def test_unknown_sources(spec: str) -> None:
    with pytest.raises(UserError, match=r"is unknown( \(did you mean 'digits'\?\))?, allowed are heart, digits, "):
        load(spec)


@pytest.mark.parametrize("size", [7, 513, -28, 0, 28.0, "28", True])
def test_image_size_out_of_range(size: object) -> None:
    with pytest.raises(UserError, match="allowed are whole numbers from 8 to 512"):
        load("digits", image_size=size)  # type: ignore[arg-type]


def test_errors_of_the_partition_reach_the_caller() -> None:
    with pytest.raises(UserError, match="partition 'iid' is not understood"):
        load("digits:ink", partition="iid")


@pytest.mark.parametrize("module", [sources, arrays])
def test_examples_in_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(("file", "meant"), [("a/cat/1.png", "folder:pacs"), ("a.npz", "arrays:pacs")])
def test_a_folder_that_exists_is_recognised(
    file: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pacs" / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "pacs" / file).touch()
    with pytest.raises(UserError, match=rf" \(did you mean '{meant}'\?\), allowed are"):
        load("pacs")


def test_a_table_is_recognised_by_its_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hint = r"'wine\.csv' is unknown \(did you mean 'table:wine\.csv'\?{}\), allowed are"
    with pytest.raises(UserError, match=hint.format(r" There is no such file\.")):
        load("wine.csv")
    with pytest.raises(UserError, match=r"'tabel' is unknown \(did you mean 'table'\?\), allowed are"):
        load("tabel:wine.csv")
    (tmp_path / "wine.csv").touch()
    with pytest.raises(UserError, match=hint.format("")):
        load("wine.csv")
