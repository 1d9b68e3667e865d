"""The documents' code runs, their links and paths exist, and every page says what it is for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from typer.main import get_command

import fedc2i
from fedc2i.cli.main import app
from fedc2i.data import digits
from support.helpers import call

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
TEXTS = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in PAGES}
README = TEXTS["README.md"]

# Pages whose Python code a reader runs from top to bottom; the snippets of the README are independent of each other.
WHOLE = ("docs/add-a-method.md", "docs/contribution.md", "docs/privacy.md", "docs/tables-and-signals.md")

# The same five clients with a tenth of their images, so that a snippet runs unchanged but sooner.
SMALL = """
from fedc2i.data import digits as _embedded
for _sizes in (_embedded.SCANNED, _embedded.RENDERED):
    _sizes |= {part: size // 10 for part, size in _sizes.items()}
"""


def snippets(name: str) -> list[str]:
    """The Python code of a page."""
    return re.findall(r"```python\n(.*?)```", TEXTS[name], flags=re.DOTALL)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


CODE = {f"README.md {k}": code for k, code in enumerate(snippets("README.md"))}
CODE |= {name: "\n".join(snippets(name)) for name in WHOLE}
ALONE = "README.md 0"  # runs in a program of its own
LINKS = [
    (name, target)
    for name, text in TEXTS.items()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", prose(text))
    if "://" not in target
]


COMMANDS = {
    command.strip()
    for text in TEXTS.values()
    for command in re.findall(r"(?:^\$ |`)(fedc2i [a-z][^`\n#]*)", text, flags=re.MULTILINE)
    if not re.search(r"[A-Z]{2}\.\.\.|\|", command)
}


@pytest.mark.parametrize("line", sorted(COMMANDS))
def test_commands_exist_with_their_options(line: str) -> None:
    words = shlex.split(line)[1:]
    found: click.Command = get_command(app)
    while hasattr(found, "get_command") and words:
        inner = found.get_command(click.Context(found), words.pop(0))
        assert inner is not None
        found = inner
    known = {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    assert given <= known | {"--help", "--version"}


_build_few = functools.cache(digits._build.__wrapped__)


@pytest.fixture
def few_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `SMALL` does, in this process and for a while."""
    for name in ("SCANNED", "RENDERED"):
        sizes = {part: size // 10 for part, size in getattr(digits, name).items()}
        monkeypatch.setattr(digits, name, sizes)
    monkeypatch.setattr(digits, "_build", _build_few)


SLOW = ("docs/contribution.md",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in CODE if name != ALONE]
)
@pytest.mark.usefixtures("few_digits")
def test_code_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        exec(compile(CODE[name], name, "exec"), {"__name__": "__main__"})
    assert shown.getvalue()


def test_code_runs_in_a_program_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SMALL + CODE[ALONE]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.slow
def test_tutorial_reads_the_output_that_its_commands_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = TEXTS["docs/tutorial.md"]
    compare, report = (
        call(*shlex.split(line)).out for line in re.findall(r"^\$ fedc2i ((?:compare|report) .*)$", page, re.MULTILINE)
    )

    def marks(text: str) -> list[tuple[str, ...]]:
        rows = re.findall(r"^  (\S+) +(before|after).* ± \S+( ~)? +\S+ ± \S+ *$", text, flags=re.MULTILINE)
        return [tuple(row) for row in rows]

    assert len(marks(page)) == 10
    assert marks(page) == marks(compare)
    printed = re.findall(r"(Local|FedAvg) by (\S+) points \(95 % interval (\S+) to (.+?)\)", report)
    told = re.findall(r"([\d.]+)(?: points)? above (Local|FedAvg) \((\S+) to (\S+?)\)", page.replace("\n", " "))
    assert [name for name, *_ in printed] == [name for _, name, *_ in told] == ["Local", "FedAvg"] * 2
    for (_, *found), (difference, _, *ends) in zip(printed, told, strict=True):
        assert [*map(float, found)] == pytest.approx([*map(float, (difference, *ends))], abs=0.5)  # other processors


def test_there_is_code_to_run() -> None:
    assert len(snippets("README.md")) >= 2
    assert all(snippets(name) for name in WHOLE)


@pytest.mark.parametrize(("name", "target"), LINKS)
def test_links_lead_somewhere(name: str, target: str) -> None:
    assert ((ROOT / name).parent / target).exists()


def test_paths_in_the_repository_exist() -> None:
    named = {
        (name, path)
        for name, text in TEXTS.items()
        for path in re.findall(r"(?<![\w/.])((?:src|tests|benchmarks|examples|docs)/[\w/.-]*\w/?)", text)
    }
    written = {"benchmarks/latest.json"}  # by the benchmarks
    assert len(named) > 30
    assert [(name, path) for name, path in named if path not in written and not (ROOT / path).exists()] == []


def test_pictures_name_the_command_that_made_them() -> None:
    for name, text in TEXTS.items():
        for after in re.findall(r"^!\[[^\]]*\]\([^)]*\)\n\n(.*?)\n\n", text + "\n\n", flags=re.MULTILINE | re.DOTALL):
            assert re.match(r"\*.*`(fedc2i|make|python) [^`]+`", after, flags=re.DOTALL), f"{name}: {after[:60]}"


@pytest.mark.parametrize("name", [name for name in TEXTS if name.startswith("docs/")])
def test_every_page_opens_with_its_purpose(name: str) -> None:
    title, opening, *_ = TEXTS[name].split("\n\n")
    assert title.startswith("# ")
    assert re.search(r"\b([Ff]or|[Rr]eference|readers|who)\b", opening)
    assert not opening.startswith(("|", "```", "#", "!"))


def test_the_readme_fits_its_purpose() -> None:
    lines = README.splitlines()
    assert len(lines) <= 160
    first_screen = "\n".join(lines[:45])
    assert all(word in first_screen for word in ("![", "make demo", "make test", "PFLlib", "Flower"))


def test_no_placeholder_is_left() -> None:
    for name, text in TEXTS.items():
        assert not re.search(r"@[A-Z0-9]+@|\bTODO\b|\bFIXME\b", text), name


def test_contributing_names_all_that_a_method_may_override() -> None:
    own = {name for name in vars(fedc2i.Method) if not name.startswith("_") and name != "registry"}
    site = {field.name for field in dataclasses.fields(fedc2i.Site)}
    missing = {name for name in own | site if not re.search(rf"`(site\.)?{name}\b", TEXTS["CONTRIBUTING.md"])}
    assert not missing
