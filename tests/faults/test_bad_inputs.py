"""Bad inputs are refused in one line, in little memory and time, without running code or writing a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("resource")
if not Path("/proc/self/clear_refs").exists():
    pytest.skip("peaks of memory are measured on Linux", allow_module_level=True)

from bad_inputs import BAD_INPUTS, NAMES

MOST_MEGABYTES, MOST_SECONDS = 200, 10


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the program found, by reader and name."""
    here = Path(__file__)
    command = [sys.executable, str(here.with_name("bad_inputs.py")), str(tmp_path_factory.mktemp("bad"))]
    paths = os.pathsep.join([str(here.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"ended in {lines[-1:]}: {done.stderr[-2000:]}"
    return {(line["reader"], line["name"]): line for line in lines}


@pytest.mark.parametrize(("reader", "name"), NAMES)
def test_bad_input(found: dict[tuple[str, str], dict[str, Any]], reader: str, name: str) -> None:
    one, (_, *words) = found[reader, name], BAD_INPUTS[reader][name]
    assert one["ended"] == "UserError", one
    assert 0 < len(one["message"]) < 1000
    assert one["message"].isprintable()
    assert all(word in one["message"] for word in words), one["message"]
    assert one["grown"] < MOST_MEGABYTES, one
    assert one["seconds"] < MOST_SECONDS, one
    assert not one["sprung"]
    assert one["same"]
