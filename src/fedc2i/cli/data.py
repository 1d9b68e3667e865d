"""``fedc2i data``: which benchmark data is there, whether it is sound, and its conversion into the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedc2i.core.errors import UserError
from fedc2i.data import catalog, converted_files, digit5, office10
from fedc2i.data.catalog import Convert, DomainStatus
from fedc2i.data.formats import Labels

app = typer.Typer(help="Look at, check and convert the benchmark data.", no_args_is_help=True)

CONVERTERS: Mapping[str, Convert] = {"digit5": digit5.convert, "office10": office10.convert}
STATES: Mapping[catalog.State, str] = {
    "ready": "ready",
    "cached": "ready (converted)",
    "raw": "not converted yet",
    "missing": "missing",
}

DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="The data folder; else FEDC2I_DATA, else ./data.", show_default=False)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
_NAMES = "digit5, office10 or one domain of theirs"


@app.command("ls")
def list_data(data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """What is there, what is missing, and where its authors publish it."""
    found = catalog.locate(catalog.DOMAINS, data_dir)
    folder = catalog.data_root(data_dir)
    if as_json:
        _print_json(
            {"data_dir": str(folder), "cache": str(converted_files.root()), "domains": [_entry(one) for one in found]}
        )
        return
    table = Table("set", "domain", "state", "published by", title=escape(f"data in '{folder}'"))
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
    name: Annotated[str | None, typer.Argument(help=f"{_NAMES}; all if left out.", show_default=False)] = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Verify checksums, shapes, label ranges and class counts of the data that is there."""
    found = catalog.locate(catalog.select(name), data_dir)
    if all(one.state == "missing" for one in found):
        catalog.require(found, data_dir)
    reports = [_report(one) for one in found]
    problems = [f"{report['domain']}: {report['problem']}" for report in reports if report["problem"]]
    if as_json:
        _print_json({"domains": reports, "problems": problems})
    else:
        _print_reports(reports)
    if problems:
        raise UserError(" | ".join(problems))


@app.command()
def prepare(
    name: Annotated[str, typer.Argument(help=f"{_NAMES}.", show_default=False)], data_dir: DataDir = None
) -> None:
    """Convert published files into the cache, replacing what lies there."""
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


def _report(one: DomainStatus) -> dict[str, Any]:
    """One domain's checks; ``problem`` is empty where there is none."""
    report: dict[str, Any] = {"set": one.domain.source, "domain": one.domain.key, "state": one.state, "problem": ""}
    if one.state not in ("ready", "cached"):
        return report
    (path,) = one.paths
    report["path"] = str(path)
    try:
        prepared = catalog.obtain(one, CONVERTERS[one.domain.source])
        report |= {"sha256": converted_files.sha256(path), "verified": converted_files.manifest(path) is not None}
        report["shape"] = list(prepared.train[0].shape[1:])
        for part, (_, labels) in (("train", prepared.train), ("test", prepared.test)):
            report[part] = _counts(one, part, labels)
        if one.domain.source == "digit5":
            digit5.require_train(one.domain, prepared.train[1])
    except UserError as error:
        report["problem"] = str(error)
    return report


def _counts(one: DomainStatus, part: str, labels: Labels) -> list[int]:
    classes = catalog.CLASSES[one.domain.source]
    counts: list[int] = np.bincount(labels, minlength=len(classes)).tolist()
    if 0 in counts:
        raise UserError(f"{one.paths[0]}: no {part} image of class '{classes[counts.index(0)]}'")
    return counts


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


def _print_json(content: Mapping[str, Any]) -> None:
    typer.echo(json.dumps(content, indent=2))
