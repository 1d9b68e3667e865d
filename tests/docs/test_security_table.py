"""Each row of the threat model in SECURITY.md names tests, and these exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from fedc2i.flower import compat

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    table = TEXT.partition("## Threat model")[2]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return cells[2:]


def test_every_row_names_tests_that_exist() -> None:
    assert len(rows()) > 15
    for row in rows():
        assert len(row) == 4, row
        assert all(row), row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
        assert named, row
        for file, name in named:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, f"{file}::{name}"


def test_the_version_of_flower_is_the_supported_one() -> None:
    assert f"flwr {compat.SUPPORTED}" in TEXT


def test_what_it_links_to_exists() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", TEXT):
        assert (ROOT / target).is_file(), target
