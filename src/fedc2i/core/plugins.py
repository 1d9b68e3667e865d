"""A user's own method or model in a Python file: loading it, and what it imports from beside it.

Imported only where a run has such a file.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.files import plugin_file
from fedc2i.core.plugin_errors import located


def load_plugin(name: str, fits: Callable[[Any], bool]) -> tuple[Any, ModuleType]:
    """The object called NAME in FILE.py, and the module that the file is; it is executed, as with ``python FILE.py``.

    Of what the file defines, an error lists only what ``fits``.

    Raises:
        UserError: if there is no such file, it fails, or it does not define the name.
    """
    file, attribute = plugin_file(name), name.rpartition(":")[2]
    path = Path(file)
    try:
        there = path.is_file()
    except OSError:  # the name is too long for a file
        there = False
    if not there:
        raise UserError(f"{one_line(file)}: no such file")
    if (beside := local_import(path)) is not None:
        raise UserError(
            f"{file}: imports '{beside}' from beside it, which no checksum covers; move what it needs into "
            f"{path.name}, or install '{beside.lstrip('.')}' as a package"
        )
    spec = importlib.util.spec_from_file_location(f"fedc2i_plugin_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while the file is executed
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses its own arguments
        raise UserError(located(error, [file])) from error
    if not hasattr(module, attribute):
        defined = {found: own for found, own in vars(module).items() if getattr(own, "__module__", "") == spec.name}
        fitting = sorted(found for found, own in defined.items() if not found.startswith("_") and fits(own))
        others = f", only {', '.join(fitting)}" if fitting else ""
        raise UserError(f"{file} defines no '{one_line(attribute)}'{nearest(attribute, fitting)}{others}")
    return getattr(module, attribute), module


def local_import(file: Path) -> str | None:
    """The first name that a file imports from beside it and that is not installed; None without one.

    What lies beside it is in no checksum, and does not travel to sites.
    """
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
