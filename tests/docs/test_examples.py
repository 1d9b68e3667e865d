"""The examples run by themselves, as a reader would run them, and show what they promise."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_docs import SMALL, few_digits  # noqa: F401

from fedc2i import Federation, Model, Uploads, UserError, run
from fedc2i.engine.records import POINTS

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """What an example prints, run in an empty folder."""

    def run_it(script: str, rounds: int) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.argv", [script, "--rounds", str(rounds)])
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        assert list(tmp_path.iterdir()) == []
        return shown.getvalue()

    return run_it


def test_own_data(start: Callable[..., str]) -> None:
    printed = start("own_data.py", rounds=1)
    assert "clinics: 3 clients, 10 classes, images 16x16" in printed
    assert re.search(r"<Result of FedC²I on clinics, seeds \[0\]: accuracy \d+\.\d+ before local training, \d", printed)
    assert "from files: 3 clients, {'dark': {'train': 300, 'validation': 0, 'test': 200}" in printed
    assert "one data set over four clients: {'Scans/1'" in printed


@pytest.mark.usefixtures("few_digits")
def test_own_model(start: Callable[..., str]) -> None:
    printed = start("own_model.py", rounds=2)
    assert "the head is 7.1.weight and 7.1.bias: 10 classes of 12 features" in printed
    assert re.search(r"^trained {'Scans': '\d", printed, flags=re.MULTILINE)


@pytest.mark.usefixtures("few_digits")
def test_own_method(start: Callable[..., str]) -> None:
    printed = start("own_method.py", rounds=2)
    assert "| Near | after * |" in printed
    rows = [[float(value) for value in re.findall(r"\d\.\d*", line)] for line in printed.splitlines()[-3:]]
    assert all(sum(row) == pytest.approx(1, abs=0.02) for row in rows)
    assert all(row[k] == max(row) for k, row in enumerate(rows))  # nobody is nearer to a client than itself


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's method."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "own_method", raising=False)
    return importlib.import_module("own_method").Near


def test_own_method_weighs_by_distance(near: Any) -> None:
    # On a line at 0, 3 and 6: distances 0 3 6 / 3 0 3 / 6 3 0 have the mean 8/3.
    rows = {"a": torch.tensor([[0.0], [3.0], [6.0]])}
    download, _ = near(power=1.0).combine(Uploads(rows, (0, 1, 2), torch.ones(3), torch.zeros(3)), {})
    weights = np.array([[1 / (1 + d / (8 / 3)) for d in row] for row in ([0, 3, 6], [3, 0, 3], [6, 3, 0])])
    weights /= weights.sum(1, keepdims=True)
    np.testing.assert_allclose(download.personal["influence_vector"], weights, rtol=1e-5)
    np.testing.assert_allclose(download.personal["a"][:, 0], weights @ [0, 3, 6], rtol=1e-5)


def test_own_method_without_power_is_fedavg(
    near: Any, make_federation: Callable[..., Federation], make_model: Callable[..., Model]
) -> None:
    settings: dict[str, Any] = {"model": make_model(), "rounds": 2, "epochs": 1, "executor": "looped"}
    own, fedavg = (run(method, make_federation(), **settings) for method in (near(power=0.0), "fedavg"))
    for point in POINTS:
        np.testing.assert_allclose(own.accuracy(point, "loss"), fedavg.accuracy(point, "loss"), rtol=1e-4)
    with pytest.raises(UserError, match="power must be a finite number of at least 0"):
        near(power=-1.0)


def test_own_method_is_short() -> None:
    lines = (EXAMPLES / "own_method.py").read_text(encoding="utf-8").splitlines()
    first, last = lines.index("@dataclass(frozen=True)"), lines.index("def main() -> None:")
    assert len([line for line in lines[first:last] if line]) <= 40


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Executed on a tenth of the images: what it says is run as it stands, only sooner."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    content = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    content.cells.insert(0, nbformat.v4.new_code_cell(SMALL))
    folder = tmp_path_factory.mktemp("notebook")
    client = nbclient.NotebookClient(content, timeout=300, resources={"metadata": {"path": str(folder)}})
    return client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})


def outputs(notebook: Any, word: str) -> list[Any]:
    """Of the one code cell that holds this word."""
    (cell,) = [cell for cell in notebook.cells if cell.cell_type == "code" and word in cell.source]
    return list(cell.outputs)


@pytest.mark.slow
def test_notebook_shows_tables_and_plots(notebook: Any) -> None:
    (table,) = outputs(notebook, "fedc2i.compare")
    assert "<table" in table["data"]["text/html"]
    for word in ("plt.subplots(len", "fedc2i.plot_accuracy(comparison", "round=1", 'client="Scans"'):
        assert [output for output in outputs(notebook, word) if "image/png" in output["data"]], word
    assert "dataframe" in outputs(notebook, "to_pandas")[0]["data"]["text/html"]
    assert outputs(notebook, "nanargmax")[0]["text"].count(" weighs most (") == 5


@pytest.mark.slow
def test_notebook_says_nothing_on_stderr(notebook: Any) -> None:
    streams = [
        output for cell in notebook.cells for output in cell.get("outputs", ()) if output["output_type"] == "stream"
    ]
    assert [output["text"] for output in streams if output["name"] == "stderr"] == []


def test_notebook_is_stored_with_outputs() -> None:
    """A reader on a code host sees tables and figures without running it."""
    content = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    assert all(cell["outputs"] for cell in code)
    kinds = [kind for cell in code for output in cell["outputs"] for kind in output.get("data", ())]
    assert kinds.count("image/png") == 4
    assert kinds.count("text/html") == 2
