"""Where the published benchmarks lie, for tests that need them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("FEDC2I_DATA") or Path(__file__).parents[2].parent / "shared" / "data")


def needs(name: str) -> pytest.MarkDecorator:
    """Skips a test where this folder of the data is missing."""
    return pytest.mark.skipif(not (SHARED / name).is_dir(), reason=f"the data of {name} is not on this machine")
