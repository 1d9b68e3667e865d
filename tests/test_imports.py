"""Importing the package is quick and light, and imports point one way."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fedc2i

SOURCE = Path(fedc2i.__file__).parent
HEAVY = ("matplotlib.pyplot", "flwr", "h5py", "pandas", "opacus")
SECONDS = 1.0  # of the processor, so that waiting for it on a busy machine proves nothing; beyond torch's own import
TRIES = 3  # the quickest counts

MEASURE = """
import json, sys, time
import torch
began = time.process_time()
import fedc2i
print(json.dumps({"seconds": time.process_time() - began, "modules": list(sys.modules)}))
"""


def test_import_is_quick_and_light() -> None:
    quickest = float("inf")
    for _ in range(TRIES):
        done = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
        found = json.loads(done.stdout)
        assert not set(HEAVY) & set(found["modules"])
        quickest = min(quickest, found["seconds"])
        if quickest < SECONDS:
            break
    assert quickest < SECONDS


def imported(file: Path) -> set[str]:
    """Every module that a file imports, wherever in it, by full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def files(*parts: str) -> list[Path]:
    found = [file for part in parts for file in sorted(SOURCE.glob(part))]
    assert found
    return found


def rooms(file: Path) -> set[str]:
    """The rooms of this package that a file imports from: ``methods``, ``engine``, ``runs``, ..."""
    own = [name.split(".")[1] for name in imported(file) if name.startswith("fedc2i.")]
    return set(own)


@pytest.mark.parametrize("file", files("influence.py", "params.py"), ids=lambda file: file.name)
def test_maths_imports_only_torch(file: Path) -> None:
    standard = {name for name in imported(file) if name.split(".")[0] in sys.stdlib_module_names}
    others = imported(file) - standard
    assert {name.split(".")[0] for name in others} <= {"torch", "fedc2i"}
    assert rooms(file) <= {"influence", "params"}


# What a room may not know of: cli -> paper, report -> runs, engine -> methods -> training, evaluate -> maths.
OUTER = {"cli", "cli_data", "report", "paper", "runs", "results", "plans", "api", "progress", "config"}
FORBIDDEN = [
    (("data/*.py",), OUTER | {"engine", "methods", "training", "evaluate", "models"}),
    (("models.py", "training.py", "seeding.py", "options.py", "errors.py"), OUTER | {"engine", "methods", "data"}),
    (("methods/*.py",), OUTER | {"engine", "data", "evaluate"}),
    (("engine/*.py", "evaluate.py"), OUTER | {"deploy"}),
    (("engine/flower/*.py",), (OUTER | {"deploy"}) - {"runs"}),  # a site's memory writes files as a run folder does
    (("config.py",), OUTER - {"config"}),
    (("results.py",), OUTER - {"config", "results"}),
    (("runs.py",), OUTER - {"config", "results", "runs"}),
    (("report/*.py", "paper.py"), {"cli", "cli_data", "api", "plans", "progress"}),
    (("plans.py", "api.py", "progress.py", "plugins.py"), {"cli", "cli_data"}),
]


@pytest.mark.parametrize(
    ("file", "forbidden"),
    [(file, forbidden) for parts, forbidden in FORBIDDEN for file in files(*parts)],
    ids=lambda value: str(value.relative_to(SOURCE)) if isinstance(value, Path) else "",
)
def test_imports_point_one_way(file: Path, forbidden: set[str]) -> None:
    assert not rooms(file) & forbidden
