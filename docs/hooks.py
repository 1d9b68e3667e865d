"""Pages of the site that are not files in ``docs/``: made from README, examples and the package itself.

Nothing is written twice: the home page is the README, the options come from the methods, and the API page lists what
``fedc2i`` exports. Links between files of the repository, which work on a code host, become links between pages.
"""

from __future__ import annotations

import inspect
import json
import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
EXAMPLES = ("own_data.py", "own_model.py", "own_method.py", "quickstart.ipynb")
# Pages that are files elsewhere in the repository, by page.
SOURCES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "speed.md": "benchmarks/README.md",
    **{f"examples/{Path(name).stem}.md": f"examples/{name}" for name in EXAMPLES},
}
MADE = ("options.md", "api.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    pages = {page: _read(ROOT / source) for page, source in SOURCES.items()}
    pages |= {"options.md": options_page(), "api.md": api_page()}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links to files of the repository into links to pages; without a page, only the text stays."""
    own = page.file.src_uri
    source = SOURCES.get(own, own if own in MADE else f"docs/{own}")
    pages = {source: name for name, source in SOURCES.items()}
    parts = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)

    def to_page(match: re.Match[str]) -> str:
        image, text, target, anchor = match.groups()
        if not target or "://" in target:
            return match.group(0)
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        found = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if found is None:
            return text
        there = posixpath.relpath(found, posixpath.dirname(own) or ".")
        return f"{image}[{text}]({there}{anchor or ''})"

    return "".join(part if part.startswith("```") else LINK.sub(to_page, part) for part in parts)


def options_page() -> str:
    """Every method with its options and defaults, then the settings of every run."""
    from fedc2i import Method
    from fedc2i.methods.base import get_method, method_names
    from fedc2i.runs.settings import RunSettings

    lines = [
        "# All options",
        "",
        "Reference of every option and setting, for users who look up a name. Set an option as `--set NAME=VALUE`,",
        "after the method as `fedc2i:gamma=2`, or in Python as a keyword. [Methods](docs/methods.md) explains them.",
    ]
    for name in method_names():
        kind = get_method(name)
        note = f" *{kind.reconstruction}*" if kind.reconstruction else ""
        lines += ["", f"## {name}", "", f"**{kind.title}**: {kind.about}.{note} Headline: {kind.headline}."]
        lines += _options_table(kind, Method)
    lines += [
        "",
        "## Every method",
        *_options_table(Method, None),
        "",
        "## Every run",
        *_options_table(RunSettings, None),
    ]
    return "\n".join(lines) + "\n"


def _options_table(kind: type, base: type | None) -> list[str]:
    """Its own options, and inherited ones that it has another default for."""
    from fedc2i.core.options import options_of

    shared = options_of(base) if base else {}
    own = [option for option in options_of(kind).values() if option != shared.get(option.name)]
    rows = [
        (f"`{option.name}`", f"`{option.default}`", option.allowed, option.about)
        for option in own
        if option.name not in ("method", "options")
    ]
    cells = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    table = [f"| {' | '.join(row)} |" for row in cells]
    return ["", "| option | default | allowed | meaning |", "|---|---|---|---|", *table] if rows else []


def api_page() -> str:
    """What ``fedc2i`` exports, functions first; the text comes from the docstrings."""
    import fedc2i

    exported = {name: getattr(fedc2i, name) for name in sorted(fedc2i.__all__) if not name.startswith("__")}
    parts = {
        "Functions": [name for name, what in exported.items() if inspect.isfunction(what)],
        "Classes": [name for name, what in exported.items() if inspect.isclass(what)],
    }
    lines = ["# API", "", inspect.getdoc(fedc2i) or ""]
    for title, names in parts.items():
        lines += ["", f"## {title}", *(f"\n::: {exported[name].__module__}.{name}" for name in names)]
    return "\n".join(lines) + "\n"


def _read(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return f"# {path.name}\n\n`examples/{path.name}`, executed in the tests.\n\n```python\n{text}```\n"
    return _notebook(json.loads(text)) if path.suffix == ".ipynb" else text


def _notebook(content: dict[str, Any]) -> str:
    """Its text, code and outputs."""
    parts = []
    for cell in content["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        parts += [_output(output) for output in cell.get("outputs", ())]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> str:
    """A picture, a table, or text, whichever a notebook would show."""
    data = {kind: "".join(text) for kind, text in output.get("data", {}).items()}
    if "image/png" in data:
        return f'<img alt="Output of the cell above" src="data:image/png;base64,{data["image/png"].strip()}">'
    if "text/html" in data:
        return f"<div>\n{data['text/html']}\n</div>"
    text = "".join(output.get("text", data.get("text/plain", "")))
    return f"```text\n{text.rstrip()}\n```"
