"""Plain English: phrases that a reader must solve are counted, and their number may only fall."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IN_SOURCE = 0  # in src/

# By what to say instead.
AVOIDED = {
    "resume, continue": r"\bgone on with\b|\bgo(es|ing)? on\b|\bwent on\b",
    "interrupted": r"\bcut off\b",
    "after round 3": r"\bbehind (round|every|each|the last|the first|its (last|first|newest))\b",
    "ignored, skipped, rejected, excluded": r"\bleft out\b|\bcounts? no longer\b",
    "not significant, indistinguishable": r"\bnot told apart\b|\btells? apart\b|\btold apart\b",
    "started": r"\bbegun\b",
    "again": r"\banew\b",
    "every n-th, this many": r"\bso manieth\b|\bso many\b",
    "its own, a separate": r"\bof (its|one's|their|his|your) own\b(?!\s+\w)",
    "seed run": r"\blanes?\b",
    "shared memory": r"\barenas?\b",
    "unchanged, by default": r"\bas it (is|stands|comes)\b|\bas they come\b",
    "prints, names, reports": r"\b(is|are|was|were) (said|told)\b",
    "offline": r"\bhas gone\b",
    "fixed": r"\bmend(s|ed)?\b",
    "at the end, finally": r"\bcomes? to rest\b|\bfor want of\b",
}


def found(text: str) -> list[str]:
    """Every avoided phrase in a text, with its line."""
    return [
        f"line {text.count(chr(10), 0, match.start()) + 1}: '{match.group(0)}'; say: {instead}"
        for instead, pattern in AVOIDED.items()
        for match in re.finditer(pattern.replace(" ", r"\s+"), text, flags=re.IGNORECASE)
    ]


PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "benchmarks").glob("*.md"),
    *(ROOT / "examples").glob("*.*"),
    ROOT / "docs" / "hooks.py",
    ROOT / "mkdocs.yml",
]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pages_and_examples_avoid_them(path: Path) -> None:
    assert found(path.read_text(encoding="utf-8")) == []


def test_their_number_in_the_source_only_falls() -> None:
    sources = [path for path in (ROOT / "src").rglob("*") if path.suffix in (".py", ".toml", ".html", ".js", ".css")]
    number = sum(len(found(path.read_text(encoding="utf-8"))) for path in sources)
    assert number <= IN_SOURCE


@pytest.mark.parametrize(
    "text", ["A run that was cut\noff", "it goes on with it", "behind every round", "so many rounds"]
)
def test_phrases_are_found(text: str) -> None:
    assert len(found(text)) == 1


@pytest.mark.parametrize(
    "text", ["resume an interrupted run", "leave-one-out", "as they compute", "plane", "behind a gate"]
)
def test_plain_words_are_not(text: str) -> None:
    assert found(text) == []
