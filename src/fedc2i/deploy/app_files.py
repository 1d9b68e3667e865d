"""A user's own method and model files, which travel to the sites inside the Flower App."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import is_plugin, plugin_file

PLUGINS = "plugins"  # a folder of the Flower App


def place_in_app(kind: str, name: str) -> str:
    """``FILE.py:NAME`` with the file's place in the Flower App; other names of methods and models unchanged."""
    if not is_plugin(name):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{PLUGINS}/{kind}_{Path(file).name}:{attribute}"


def place_at_site(name: str, root: Path | None) -> str:
    """The reverse at a site, where the app lies in ``root``; no file outside of the app is ever executed."""
    folder, _, file = name.partition("/")
    if root is None or folder != PLUGINS or "/" in file or "\\" in file:
        raise UserError(f"'{name}' is no file of this run's Flower App")
    return str(root / name)


def own_files(method: str, model: str | None) -> dict[str, Path]:
    """The user's files that a run needs, by their place in the Flower App."""
    named = {"method": method, "model": model or ""}
    return {
        place_in_app(kind, file).rpartition(":")[0]: Path(plugin_file(file))
        for kind, name in named.items()
        if is_plugin(name)
        for file in [":".join(name.split(":")[:2])]
    }


def reject_local_imports(method: str, model: str | None) -> None:
    """Rejects a user's file that imports another one beside it, since only the named file travels."""
    for file in own_files(method, model).values():
        installed = {"fedc2i", *sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
        for name in _imports(file):
            beside = (file.parent / f"{name}.py").is_file() or any((file.parent / name).glob("*.py"))
            if name.startswith(".") or (beside and name not in installed):
                raise UserError(
                    f"{file}: imports '{name}' from beside it, which does not travel to the sites; move what it needs "
                    f"into {file.name}, or install '{name.lstrip('.')}' as a package here and at every site"
                )


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
