"""What the documents show works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
LINKS = [
    (path.name, target)
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8"))
    if "://" not in target
]


# The same five clients with a tenth of their images: what a snippet says is run as it stands, only sooner.
SMALL = """
from fedc2i.data import embedded as _embedded
for _sizes in (_embedded.SCANNED, _embedded.RENDERED):
    _sizes |= {part: size // 10 for part, size in _sizes.items()}
"""


@pytest.mark.parametrize("code", SNIPPETS, ids=lambda code: code.strip().splitlines()[-1][:40])
def test_readme_snippets_run(code: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL + code]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_readme_has_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize(("document", "target"), LINKS)
def test_links_lead_somewhere(document: str, target: str) -> None:
    folder = ROOT if (ROOT / document).is_file() else ROOT / "docs"
    assert (folder / target).exists()


def test_no_placeholder_is_left() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        assert not re.search(r"@[A-Z0-9]+@", path.read_text(encoding="utf-8")), path.name
