"""What a user's Python file imports from beside it: that is in no checksum, and does not travel to sites."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path


def local_import(file: Path) -> str | None:
    """The first name that a file imports from beside it and that is not installed; None without one."""
    for name in _imports(file):
        beside = (file.parent / f"{name}.py").is_file() or any((file.parent / name).glob("*.py"))
        if name.startswith(".") or (beside and name not in _installed()):
            return name
    return None


def _installed() -> set[str]:
    return {"fedc2i", *sys.stdlib_module_names, *importlib.metadata.packages_distributions()}


def _imports(file: Path) -> Iterator[str]:
    """The first parts of the names that a file imports, with leading dots if relative."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # loading the file reports this
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or node.names[0].name).split(".")[0]
