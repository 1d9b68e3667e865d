"""What every study ends with: whether each target was met, and sentences that say so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """Targets, met or missed, and the sentences for a reader. What counts as met is decided before any run."""

    targets: Mapping[str, bool]
    sentences: tuple[str, ...]


def met(yes: bool) -> str:
    """A target's fate in a word."""
    return "met" if yes else "missed"


def counted(number: int, thing: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {thing}{'s' * (number != 1)}"
