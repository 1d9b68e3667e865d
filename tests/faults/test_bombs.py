"""Files made to do harm are refused in one line, in little memory and time, without running code or writing a file."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource")
if not Path("/proc/self/clear_refs").exists():
    pytest.skip("peaks of memory are measured on Linux", allow_module_level=True)

from bombs import BOMBS

MOST_MEGABYTES, MOST_SECONDS = 200, 10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bombs")
    command = [sys.executable, str(Path(__file__).with_name("bombs.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended in '{lines[-1]['name'] if lines else ''}': {done.stderr[-2000:]}"
    return {line["name"]: line for line in lines}


@pytest.mark.parametrize("name", BOMBS)
def test_bomb(found: dict[str, dict[str, Any]], name: str) -> None:
    one = found[name]
    assert one["ended"] == "UserError", one
    assert 0 < len(one["said"]) < 1000
    assert one["said"].isprintable()
    assert one["grown"] < MOST_MEGABYTES, one
    assert one["seconds"] < MOST_SECONDS, one
    assert not one["sprung"]
    assert one["same"]
