"""One self-contained page: words and tables in HTML, data as JSON, styles, scripts and the plotting library inside."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fedc2i import __version__
from fedc2i.analysis.weights import of_last_round
from fedc2i.core.errors import UserError, how_to_install
from fedc2i.core.files import write_atomically
from fedc2i.report.html.chart_data import chart_data, to_script
from fedc2i.report.html.contribution import contribution_view, read_contribution
from fedc2i.report.html.influence_text import client_influences, influence_text
from fedc2i.report.html.intervals import read_intervals
from fedc2i.report.html.members import members
from fedc2i.report.html.rerun_command import rerun_command
from fedc2i.report.html.sample_images import sample_images
from fedc2i.report.html.side_by_side import cost_table, difference_table, distinct, score_table, settings_that_differ
from fedc2i.report.html.verdict import key_numbers, verdict_text
from fedc2i.report.table import WHEN, decimals, metric_words
from fedc2i.runs.results import Result

EARLY = (  # before anything is drawn, or a dark page would begin with a white flash
    'document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";'
)
SCRIPTS = ("data", "theme", "curves", "heat", "graph", "client", "main")
MOST_TEXTS = 4  # runs whose influence is described in words
MOST_COUNTS = 20_000  # clients times classes in a table


def write(
    results: Sequence[Result],
    path: Path | str,
    *,
    folders: Sequence[Path] | None = None,
    with_samples: bool | None = None,
) -> Path:
    """Writes the page of one run, or of several side by side; an older file is replaced.

    Args:
        results: of runs over the same clients and classes, as `run`, `compare` or `read_run` return them.
        path: of the page.
        folders: of the runs, for names that tell the same method apart and for intervals of λ, if they lie there.
        with_samples: whether to show images of each client; by default only those of public benchmarks.

    Raises:
        UserError: if plotly is not installed, the runs cannot stand side by side, or the file cannot be written.
    """
    path = Path(path)
    if path.is_dir():
        raise UserError(f"{path}: is a folder; --out names the page, e.g. {path / 'report.html'}")
    write_atomically(path, make(results, folders=folders, with_samples=with_samples).encode())
    return path


def make(results: Sequence[Result], *, folders: Sequence[Path] | None = None, with_samples: bool | None = None) -> str:
    """The page as text; arguments as for `write`."""
    if not results:
        raise UserError("a report needs at least one run")
    try:
        from jinja2 import Environment, StrictUndefined
        from markupsafe import Markup
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UserError(f"a report needs plotly and jinja2: {how_to_install('report')}") from None
    found = distinct(results, folders or [Path(str(k + 1)) for k in range(len(results))])
    intervals = [
        read_intervals(own, one.federation.names) for own, one in zip(folders or (), found, strict=bool(folders))
    ]
    shared = [read_contribution(own, one) for own, one in zip(folders or (), found, strict=bool(folders))]
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined, keep_trailing_newline=True
    )
    scripts = "\n".join(_file(f"js/{name}.js") for name in SCRIPTS)
    code = {"early": EARLY, "plotly": get_plotlyjs(), "script": f'(() => {{\n"use strict";\n{scripts}}})();\n'}
    return environment.from_string(_file("page.html")).render(
        css=Markup(_file("page.css")),
        data=Markup(to_script(chart_data(found))),
        allowed=Markup(" ".join(map(_digest, code.values()))),
        **{name: Markup(text) for name, text in code.items()},
        **_words(found, with_samples),
        intervals=[(one.label, own) for one, own in zip(found, intervals, strict=False) if own],
        contributions=[(one.label, contribution_view(own)) for one, own in zip(found, shared, strict=False) if own],
        members=members(found, shared),
    )


def _words(results: Sequence[Result], with_samples: bool | None) -> dict[str, Any]:
    first, several = results[0], len(results) > 1
    known = [(one, client_influences(one)) for one in results]
    counts = first.federation.class_counts()
    crowded = len(counts) * len(first.federation.classes) > MOST_COUNTS
    described = [pair for pair in known if pair[1]][:MOST_TEXTS]
    described = described or [pair for pair in known if of_last_round(pair[0], "influence_matrix").size][:1]
    return {
        "title": f"{f'{len(results)} runs' if several else first.label} on {first.config.data}",
        "several": several,
        "verdict": verdict_text(results),
        "influence_texts": [(one.label, influence_text(one, own)) for one, own in described],
        "key_numbers": key_numbers(results),
        "scores": score_table(results),
        "differences": difference_table(results) if several else None,
        "settings": settings_that_differ(results) if several else [],
        "labels": [one.label for one in results],
        "glances": [(one.label, own) for one, own in known],
        "classes": first.federation.classes,
        "samples": sample_images(first, with_samples),
        "costs": cost_table(results),
        "commands": [(one.label, rerun_command(one), one.config.to_toml()) for one in results],
        "checksums": first.federation.checksums,
        "sizes": first.federation.samples(),
        "counts": {} if crowded else counts,
        "crowded": crowded,
        "same_data": len({str(one.federation.checksums) for one in results}) == 1,
        "points": WHEN,
        "metric": metric_words(first.config.metric),
        "version": __version__,
        "clients": first.federation.names,
        "measures": any(own and one.config.engine != "flower" for one, own in known),
        "places": f"%.{decimals(len(first.federation.names))}f",
    }


def _digest(script: str) -> str:
    """As the page's policy names a script that may run; anything else that got into the page may not."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _file(name: str) -> str:
    return files("fedc2i.report.html").joinpath(name).read_text(encoding="utf-8")
