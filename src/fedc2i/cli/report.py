"""``fedc2i report``: run folders as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedc2i.cli.shared import Json, how_to_resume, runs_below
from fedc2i.core.errors import one_line
from fedc2i.core.files import to_json

app = typer.Typer(add_completion=False)
MOST_LETTERS = 4000  # of a line in the terminal


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Run folders, or folders of `fedc2i compare`.")
    ],
    out: Annotated[Path, typer.Option(help="The page; an older one is replaced.")] = Path("report.html"),
    samples: Annotated[
        bool | None,
        typer.Option(
            "--samples/--no-samples",
            help="Show a few images of each client; by default only of the public benchmarks.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Another score than that of the runs' settings, e.g. auroc.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Write one self-contained HTML page: verdict, scores, whose models weigh most, cost, and how to run it again.

    Several runs over the same clients stand side by side. The page asks no server for anything.
    """
    from fedc2i.report.html.influence_text import client_influences, influence_text
    from fedc2i.report.html.page import write
    from fedc2i.report.html.side_by_side import distinct
    from fedc2i.report.html.verdict import verdict_text
    from fedc2i.runs.finished_run import read_run

    found = list({run.absolute(): run for folder in folders for run in runs_below(folder)}.values())
    for line in filter(None, map(_left, folders)):
        Console(stderr=True, soft_wrap=True).print(line, style="yellow", highlight=False, markup=False)
    results = distinct([read_run(run) for run in found], found)
    results = [one.showing(metric or results[0].config.metric) for one in results]
    page = write(results, out, folders=found, with_samples=samples)
    said = verdict_text(results)
    words = [said.headline, *said.warnings, *said.sentences]
    if json:
        lines = [influence_text(one, client_influences(one)).headline for one in results]
        answer = {"page": str(page), "bytes": page.stat().st_size, "runs": list(map(str, found))}
        print(to_json({**answer, "verdict": words, "influence": lines}), end="")
        return
    console = Console(soft_wrap=True)
    shown = [one_line(line, most=MOST_LETTERS) for line in words]
    for line in (*shown, f"Page: {page}   ({page.stat().st_size / 1e6:.1f} MB)"):
        console.print(line, highlight=False, markup=False)


def _left(folder: Path) -> str:
    """What a page of this folder would lack, in words."""
    from fedc2i.runs.interrupted_run import is_comparison, unfinished

    left = unfinished(folder) if is_comparison(folder) else 0
    what = f"{left} of its runs {'is' if left == 1 else 'are'} not finished, and not in the page"
    return f"{folder}: {what}; {how_to_resume(folder)}" if left else ""
