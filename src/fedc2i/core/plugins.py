"""A user's own method or model from a Python file, named on the command line as ``FILE.py:NAME``."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from fedc2i.core.errors import UserError, one_line


def is_plugin(name: str) -> bool:
    """Whether a name on the command line means a file."""
    return ".py:" in name


def file_of(name: str) -> str:
    """The FILE.py of ``FILE.py:NAME``, with or without options after it."""
    return name.partition(".py:")[0] + ".py"


def checksums(method: str, model: str | None) -> dict[str, str]:
    """SHA-256 of the files that define a run's ``method`` and ``model``; files that these import are not included."""
    named = {"method": method, "model": model or ""}
    files = {what: Path(file_of(name)) for what, name in named.items() if is_plugin(name)}
    return {what: hashlib.sha256(path.read_bytes()).hexdigest() for what, path in files.items() if path.is_file()}


def load(name: str) -> Any:
    """The object called NAME in FILE.py. The file is executed, as with ``python FILE.py``.

    Raises:
        UserError: if there is no such file, it fails, or it does not define the name.
    """
    file, attribute = file_of(name), name.rpartition(":")[2]
    module = _execute(file)
    if not hasattr(module, attribute):
        public = sorted(found for found in vars(module) if not found.startswith("_"))
        raise UserError(f"{file} defines no '{attribute}', only {', '.join(public)}")
    return getattr(module, attribute)


def module_of(name: str) -> ModuleType:
    """The module that `load` made of FILE.py."""
    return sys.modules[_module_name(file_of(name))]


def _module_name(file: str) -> str:
    return f"fedc2i_plugin_{Path(file).stem}"


def _execute(file: str) -> ModuleType:
    path = Path(file)
    try:
        there = path.is_file()
    except OSError:  # the name is too long for a file
        there = False
    if not there:
        raise UserError(f"{one_line(file)}: no such file")
    spec = importlib.util.spec_from_file_location(_module_name(file), path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up while the file is executed
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # SystemExit: a script that parses its own arguments
        raise UserError(f"{file}: {type(error).__name__}: {one_line(error)}") from error
    return module
