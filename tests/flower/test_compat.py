"""What depends on Flower's internals is in one module, which is written for one version of Flower."""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr.app")
import fedc2i
from fedc2i.flower import compat

SOURCE = Path(fedc2i.__file__).parent


def test_the_supported_version_is_installed_and_pinned() -> None:
    """A new version may change what compat.py uses: read that module again before you change this number."""
    assert version("flwr") == compat.SUPPORTED == "1.41.0"
    assert f'"flwr=={compat.SUPPORTED}"' in (SOURCE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")


@cache
def flower_names(path: Path) -> set[str]:
    """The names in Flower that a file imports, and dotted names of its modules in texts."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
            found.add(node.value)
    return {name for name in found if name == "flwr" or name.startswith("flwr.")}


def test_only_compat_uses_what_is_not_public() -> None:
    private = {
        f"{path.relative_to(SOURCE)}: {name}"
        for path in SOURCE.rglob("*.py")
        if path != Path(compat.__file__)
        for name in flower_names(path)
        if name != "flwr" and name.rpartition(".")[0] not in compat.PUBLIC
    }
    assert private == set()
    used = flower_names(Path(compat.__file__)) - set(compat.PUBLIC)
    assert "flwr.superlink.extensions" in used  # the check sees such imports
    assert "flwr.supercore.superexec.run_superexec" in used


@pytest.mark.parametrize("module", compat.PUBLIC)
def test_public_modules_say_what_is_public(module: str) -> None:
    import importlib

    public = set(importlib.import_module(module).__all__)
    for path in SOURCE.rglob("*.py"):
        used = {name.rpartition(".")[2] for name in flower_names(path) if name.startswith(f"{module}.")}
        assert used <= public, path


@pytest.mark.parametrize(
    ("code", "reason", "words", "lost"),
    [
        (3, "Message Unavailable.", "the message was lost", True),
        (5, "node\nunavailable", "its connection was lost", True),
        (2, "boom\n  at line 3", "its program failed (boom at line 3)", False),
        (99, "", "error 99", False),
        (1, None, "its Flower App could not be loaded; is fedc2i installed there?", False),
    ],
)
def test_error_replies_in_words(code: int, reason: str | None, words: str, lost: bool) -> None:
    error = SimpleNamespace(code=code, reason=reason)
    assert compat.explain(error) == words
    assert compat.is_lost(error) == lost


def test_log_lines_of_a_supernode() -> None:
    assert compat.node_id("INFO : SuperNode ID: 12\nINFO : SuperNode ID: 34\n") == 34
    assert compat.node_id("INFO : Starting\n") is None
    rejected = "ERROR: Exit Code: 305\nFailed to initialize connection\n  [code: 2004] not registered\n"
    assert compat.rejection(rejected) == "[code: 2004] not registered"
    assert compat.rejection("Exit Code: 1\n") is None
