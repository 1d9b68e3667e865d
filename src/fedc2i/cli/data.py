"""``fedc2i data``: which benchmark data is there, whether it is sound, and its conversion into the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedc2i.cli.shared import DataDir, Json
from fedc2i.core.errors import UserError
from fedc2i.core.files import to_json

if TYPE_CHECKING:
    from fedc2i.data.catalog import DomainStatus

app = typer.Typer(help="List, check and convert the benchmark data.", no_args_is_help=True, add_completion=False)

STATES = {"ready": "ready", "cached": "ready (converted)", "raw": "not converted yet", "missing": "missing"}
BUILT_IN = (
    ("heart", "4 hospitals", "built in", "Janosi et al. 1988, UCI repository"),
    ("digits", "5 digit domains", "built in", "made of what scikit-learn and Matplotlib ship"),
)
NAMES = "a benchmark, one of its domains, or benchmark/domain, as `fedc2i data ls` lists them"


@app.command("ls")
def list_data(data_dir: DataDir = None, json: Json = False) -> None:
    """What is there, what is missing, and where its authors publish it."""
    from fedc2i.data import catalog, converted_files

    found = catalog.locate(catalog.DOMAINS, data_dir)
    folder = catalog.data_root(data_dir)
    if json:
        entries = [_entry(one) for one in found]
        print(to_json({"data_dir": str(folder), "cache": str(converted_files.root()), "domains": entries}), end="")
        return
    table = Table("set", "domain", "state", "published by", title=escape(f"data in '{folder}'"))
    for row in BUILT_IN:
        table.add_row(*row)
    for one in found:
        state = "ready, a stand-in" if one.stand_in else STATES[one.state]
        table.add_row(one.domain.source, one.domain.client, state, one.domain.publisher)
    console = Console()
    console.print(table)
    for one in found:
        domain = one.domain
        if one.state == "missing":
            console.print(escape(f"{domain.client}: on the page '{domain.page}'; {domain.accepts}."))
        elif one.state == "raw":
            console.print(f"{domain.client}: `fedc2i data prepare {domain.key}` converts it.")


@app.command()
def check(
    name: Annotated[str | None, typer.Argument(help=f"{NAMES}; by default all.", show_default=False)] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Verify checksums, shapes, label ranges and class counts of the data that is there."""
    from fedc2i.data import catalog
    from fedc2i.data.benchmark_check import check_domain

    found = catalog.locate(catalog.select(name), data_dir)
    if all(one.state == "missing" for one in found):
        catalog.require(found, data_dir)
    reports = [check_domain(one) for one in found]
    problems = [f"{report['domain']}: {report['problem']}" for report in reports if report["problem"]]
    if json:
        print(to_json({"domains": reports, "problems": problems}), end="")
    else:
        _print_reports(reports)
    if problems:
        raise UserError(" | ".join(problems))


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"{NAMES}.", show_default=False)], data_dir: DataDir = None
) -> None:
    """Convert published files into the cache, replacing older ones there."""
    from fedc2i.data import catalog, converted_files
    from fedc2i.data.benchmark_check import CONVERTERS

    found = catalog.locate(catalog.select(name), data_dir, raw_only=True)
    missing = ", ".join(one.domain.client for one in found if one.state == "missing")
    if all(one.state == "missing" for one in found):
        folder = catalog.data_root(data_dir)
        raise UserError(f"{name}: no published files of {missing} in '{folder}', `fedc2i data ls` names them")
    console = Console(stderr=True)
    for one in found:
        if one.state == "raw":
            with console.status(f"converting {one.domain.client}"):
                prepared = catalog.prepare(one, CONVERTERS[one.domain.source])
            target = converted_files.file_of(one.domain.source, one.domain.key)
            counts = f"{len(prepared.train[1])} training and {len(prepared.test[1])} test images"
            typer.echo(f"{one.domain.client}: {counts} in {target}")
    if missing:
        typer.echo(f"No published files found of {missing}.", err=True)


def _entry(one: DomainStatus) -> dict[str, Any]:
    domain = one.domain
    return {
        "set": domain.source,
        "domain": domain.key,
        "client": domain.client,
        "state": one.state,
        "stand_in": one.stand_in,
        "paths": [str(path) for path in one.paths],
        "what": domain.what,
        "publisher": domain.publisher,
        "page": domain.page,
        "accepts": domain.accepts,
    }


def _print_reports(reports: Sequence[Mapping[str, Any]]) -> None:
    table = Table("set", "domain", "result", "image", "train", "test", "per class", "sha256")
    for report in reports:
        row = [report["set"], report["domain"]]
        if not report["problem"] and "test" in report:
            counts, result = report["train"], "ok, verified" if report["verified"] else "ok"
            spread = f"{min(counts)}-{max(counts)}"
            shape = "x".join(map(str, report["shape"]))
            row += [result, shape, str(sum(counts)), str(sum(report["test"])), spread, report["sha256"][:12]]
        else:
            row.append("PROBLEM" if report["problem"] else STATES[report["state"]])
        table.add_row(*row)
    Console().print(table)
