"""Imports point one way."""

from __future__ import annotations

import ast
import functools
import sys
from pathlib import Path

import pytest

import fedc2i

SOURCE = Path(fedc2i.__file__).parent
# Each may import those below it. `api` holds the public functions, which draw figures into the folders of runs.
ROOMS = (
    "cli",
    "api",
    "deploy",
    "report",
    "analysis",
    "runs",
    "flower",
    "engine",
    "methods",
    "training",
    "models",
    "data",
    "core",
)
OPTIONAL = {
    "flwr": {"flower", "deploy", "cli"},
    "ray": {"flower"},
    "cryptography": {"deploy", "flower"},
    "plotly": {"report"},
    "jinja2": {"report"},
    "pandas": {"data", "report", "runs"},
    "mlflow": {"report"},
    "wandb": {"report"},
    "tensorboard": {"report"},
    "triton": {"engine"},
}


@functools.cache
def imported(file: Path) -> set[str]:
    """Every name that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute here"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULES = {
    ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(SOURCE.rglob("*.py"))
}


def graph() -> dict[str, set[str]]:
    """The modules of this package that each of them imports."""
    found: dict[str, set[str]] = {}
    for module, path in MODULES.items():
        names = {name for name in imported(path) if name.split(".")[0] == "fedc2i"}
        own = {name if name in MODULES else name.rpartition(".")[0] for name in names}
        found[module] = {name for name in own if name in MODULES} - {module}
    return found


def room(module: str) -> str:
    return module.split(".")[1]


def test_imports_point_down() -> None:
    upward = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in sorted(others)
        if module.count(".") and other.count(".") and module != "fedc2i.__main__"
        if ROOMS.index(room(module)) > ROOMS.index(room(other))
    ]
    assert upward == []


def test_only_the_public_names_are_flat() -> None:
    flat = {path.name for path in SOURCE.glob("*.py")}
    assert flat == {"__init__.py", "__main__.py", "api.py"}
    assert {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"} == {*ROOMS} - {
        "api"
    }


def test_no_cycles() -> None:
    left = {module: set(others) for module, others in graph().items() if module.count(".")}
    while free := [module for module, others in left.items() if not others & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize(("package", "rooms"), OPTIONAL.items())
def test_optional_packages_are_imported_where_they_are_used(package: str, rooms: set[str]) -> None:
    users = {module for module, path in MODULES.items() if package in {name.split(".")[0] for name in imported(path)}}
    assert {room(module) for module in users} <= rooms


def test_core_imports_only_torch_numpy_and_the_standard_library() -> None:
    core = [path for module, path in MODULES.items() if module.startswith("fedc2i.core.")]
    others = {name.split(".")[0] for path in core for name in imported(path)}
    assert others - set(sys.stdlib_module_names) <= {"torch", "numpy", "fedc2i"}
