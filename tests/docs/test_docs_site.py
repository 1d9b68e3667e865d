"""The documentation site builds without a warning, is complete, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import fedc2i
from fedc2i.core.options import options_of
from fedc2i.methods.base import Method
from fedc2i.runs.settings import RunSettings

pytest.importorskip("mkdocs", reason="the extra docs is not installed")
pytest.importorskip("material", reason="the extra docs is not installed")
pytest.importorskip("mkdocstrings", reason="the extra docs is not installed")
ROOT = Path(__file__).parents[2]
LOADS = {("img", "src"), ("script", "src"), ("link", "href"), ("iframe", "src"), ("source", "src"), ("object", "data")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=quiet)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


class Page(HTMLParser):
    """What a page links to and loads, the anchors it has, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.anchors: set[str] = set()
        self.text = ""
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if (tag, name) in LOADS and value:
                self.loads.append(value)
            elif (tag, name) == ("a", "href") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.anchors.add(value)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in site.rglob("*.html")}


def test_every_page_is_there(site: Path) -> None:
    written = {path.stem for path in (ROOT / "docs").glob("*.md")}
    made = {"index", "contributing", "changelog", "speed", "options", "api"}
    assert {path.stem for path in site.glob("*.html")} == written | made | {"404"}
    tables = {path.stem for path in (ROOT / "docs" / "tables").glob("*.md")}
    assert {path.stem for path in (site / "tables").glob("*.html")} == tables
    examples = {path.stem for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb")}
    assert {path.stem for path in (site / "examples").glob("*.html")} == examples


def test_nothing_comes_from_elsewhere(site: Path, pages: dict[Path, Page]) -> None:
    loads = [load for page in pages.values() for load in page.loads]
    assert len(loads) > 20
    assert [load for load in loads if re.match(r"(https?:)?//", load)] == []
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", styles)
    assert not any("mermaid" in path.read_text(encoding="utf-8") for path in pages)  # it would be loaded from a server


def test_links_within_the_site_lead_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the root of a server
            continue
        for link in page.links + page.loads:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            there = (path.parent / target).resolve() if target else path
            assert there.exists(), f"{path.name}: {link}"
            if anchor and there in pages:
                assert anchor in pages[there].anchors, f"{path.name}: {link}"
            checked += 1
    assert checked > 200


def test_readme_is_the_home_page(site: Path, pages: dict[Path, Page]) -> None:
    text = pages[(site / "index.html").resolve()].text
    for line in re.findall(r"^## (.*)$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        assert line in text


def test_every_option_is_listed(site: Path, pages: dict[Path, Page]) -> None:
    page = pages[(site / "options.html").resolve()]
    methods = {name for name, kind in Method.registry.items() if kind.__module__.startswith("fedc2i.")}
    assert methods <= page.anchors
    for kind in (RunSettings, *(Method.registry[name] for name in methods)):
        for option in options_of(kind).values():
            assert option.name in ("method", "options") or option.about.replace("`", "") in page.text


def test_the_api_is_what_is_exported(site: Path, pages: dict[Path, Page]) -> None:
    anchors = pages[(site / "api.html").resolve()].anchors
    for name in fedc2i.__all__:
        if name != "__version__":
            assert f"{getattr(fedc2i, name).__module__}.{name}" in anchors
    assert "fedc2i.report.plots.plot_influence" in anchors
