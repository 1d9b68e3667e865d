"""A user's file that imports another one beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedc2i.core.errors import UserError
from fedc2i.core.plugins import load_plugin


def test_a_neighbour_is_refused_wherever_the_command_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "help_er.py").write_text("half = 0.5\n")
    (tmp_path / "prox.py").write_text("import math\n\nfrom help_er import half\n\nmu = half\n")
    for path in (sys.path, [str(tmp_path), *sys.path]):  # as the installed command, and as `python -m fedc2i` there
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(UserError, match=r"prox.py: imports 'help_er' from beside it, which no checksum covers"):
            load_plugin(f"{tmp_path}/prox.py:mu", callable)


def test_installed_packages_may_be_imported(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("import json\nimport torch\n\nmu = 3\n")
    assert load_plugin(f"{tmp_path}/own.py:mu", callable)[0] == 3
