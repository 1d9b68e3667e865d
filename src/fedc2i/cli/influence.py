"""The commands ``fedc2i influence show`` and ``fedc2i influence check``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedc2i.analysis.influence_intervals import FILE, Influence, intervals
from fedc2i.analysis.retraining import Agreement, Check
from fedc2i.analysis.retraining import check as retrain
from fedc2i.cli.common import DataDir, Json
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import to_json, write_atomically
from fedc2i.engine.records import POINTS
from fedc2i.runs.read import read_run
from fedc2i.runs.reopen import reopen
from fedc2i.runs.settings import parse_seeds

CHECKED = "influence-check.json"
MOST_ROUNDS = 10  # of a retraining if nothing is said
MOST_HELPERS = 12  # listed of one client

app = typer.Typer(help="How sure the influence of a finished run is.", no_args_is_help=True)
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")]


@app.command()
def show(
    folder: Run,
    seed: Annotated[int | None, typer.Option(help="One of the run's seeds; the first by default.")] = None,
    client: Annotated[str | None, typer.Option(help="Only what helps this client.")] = None,
    samples: Annotated[int, typer.Option(help="Samples of every client, or as many as it has.")] = 256,
    draws: Annotated[int, typer.Option(help="Draws of the bootstrap.")] = 200,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Who helps whom after the last round, with intervals from a bootstrap over samples.

    Helpers whose interval holds the equal share are marked: the samples do not tell them from anybody. All numbers are
    written into the run folder, as influence-intervals.json.
    """
    names = read_run(folder).federation.names
    if client is not None and client not in names:
        raise UserError(f"no client '{client}', allowed are {one_line(', '.join(names), most=1000)}")
    found = intervals(folder, seed=seed, samples=samples, draws=draws, level=level, data_dir=data_dir)
    if json:
        print(to_json(found.to_json()), end="")
        return
    console = _console()
    for m in range(len(found.clients)) if client is None else [found.clients.index(client)]:
        console.print(_title(found, m), style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(_helpers(found, m))
    lines = [
        *_count(found),
        *found.notes,
        f"Written to {folder / FILE}",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _count(found: Influence) -> list[str]:
    """How many influences differ, of those that could."""
    if found.vector is None:
        return []
    fixed = found.fixed()
    told = int((found.differs() & ~fixed).sum())
    of = int((found.vector.estimate.isfinite() & ~fixed).sum())
    lines = [
        f"{told} of {of} influences differ from the equal share at {100 * found.level:g} %; by chance about "
        f"{(1 - found.level) * of:.0f} of {of} would, if all were equal."
    ]
    if fixed.any():
        lines.append(f"Not counted: {int(fixed.sum())} that are the equal share whatever the samples say (fixed).")
    return lines


def _title(found: Influence, m: int) -> str:
    name, share = found.clients[m], float(found.share[m])
    measured = f"{found.samples[name]} {_split(found.split[name])} samples, seed {found.seed}"
    return f"What helps {one_line(name)}: influence λ on {measured}, equal share {share:.3f}"


def _helpers(found: Influence, m: int) -> Table:
    """One client's helpers, the largest influence first."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("client")
    for column in ("λ", f"{100 * found.level:g} % interval"):
        table.add_column(column, justify="right")
    table.add_column("")
    if found.vector is None:
        return table
    differs, fixed = found.differs()[m].tolist(), found.fixed()[m].tolist()
    columns = [getattr(found.vector, end)[m].tolist() for end in ("estimate", "low", "high")]
    order = sorted(range(len(found.clients)), key=lambda i: -columns[0][i] if math.isfinite(columns[0][i]) else 1)
    for i in order[:MOST_HELPERS]:
        estimate, low, high = (column[i] for column in columns)
        mark = "fixed" if fixed[i] else "not received" if math.isnan(estimate) else "" if differs[i] else "≈ equal"
        more = "more" if estimate > float(found.share[m]) else "less"
        style = "dim" if mark else "green" if more == "more" else ""
        cells = (
            one_line(found.clients[i]) + (" (own)" if i == m else ""),
            f"{estimate:.3f}",
            f"{low:.3f} .. {high:.3f}",
        )
        table.add_row(*map(Text, cells), Text(mark or more), style=style)
    if len(order) > MOST_HELPERS:
        table.caption = f"and {len(order) - MOST_HELPERS} more, see {FILE}"
    return table


def _split(name: str) -> str:
    return {"train": "training"}.get(name, name)


@app.command()
def check(
    folder: Run,
    rounds: Annotated[
        int | None, typer.Option(help=f"Of every retraining; the run's by default, but at most {MOST_ROUNDS}.")
    ] = None,
    seeds: Annotated[str | None, typer.Option(help="For example 0,1,2; the run's first by default.")] = None,
    data_dir: DataDir = None,
    json: Json = False,
) -> None:
    """Compare influence with what it stands for: train again without each client, and see who fares worse.

    Takes as long as one run for each client and one more. Prints the rank correlation of λ and the rise of the loss on
    data that nobody trained on, for every client and over all.
    """
    run = read_run(folder)
    if not run.influence("influence_vector").size:
        raise UserError(f"{folder}: {run.label} measures no influence vector to compare with retraining")
    plan = reopen(folder, data_dir=data_dir)
    wanted = rounds if rounds is not None else min(int(plan.config.rounds or 1), MOST_ROUNDS)
    console = Console(stderr=True)
    found = retrain(
        plan,
        wanted,
        plan.config.seeds[:1] if seeds is None else parse_seeds(seeds),
        lambda line: console.print(one_line(line), highlight=False, markup=False, soft_wrap=True),
    )
    write_atomically(folder / CHECKED, to_json(found.to_json()).encode())
    if json:
        print(to_json(found.to_json()), end="")
        return
    show_check(_console(), found, int(plan.config.rounds or 1), folder)


def show_check(console: Console, found: Check, of_run: int, folder: Path) -> None:
    """Prints the correlations of every client and over all, and what they mean."""
    seeds = ", ".join(map(str, found.seeds))
    title = f"Influence against retraining without each client: {found.rounds} rounds, seed {seeds}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for point in POINTS:
        table.add_column(f"ρ {point}", justify="right")
        table.add_column("p", justify="right")
    by_point = {point: found.agreement(point) for point in POINTS}
    for m, name in enumerate(found.clients):
        table.add_row(Text(one_line(name)), *(cell for point in POINTS for cell in _cells(by_point[point][m])))
    overall = {point: found.overall(point) for point in POINTS}
    table.add_section()
    table.add_row("all", *(cell for point in POINTS for cell in _cells(overall[point])), style="bold")
    console.print(table)
    others = len(found.clients) - 1
    lines = [
        f"ρ: Spearman's, of λ (mean over rounds) and the rise of the loss on {found.split} data when a client is left "
        "out from the start; received: before local training, trained: after it.",
        f"p: share of all orders of the {others} others with a ρ as far from 0; the smallest possible is "
        f"{2 / math.factorial(others):.2g} for one client{'.' if others > 3 else ', so only the last row can tell.'} "
        "Last row: of all ways to exchange the clients of one ranking, as clients that help everybody are in all rows.",
        *(f"{point}: {verdict(own)}" for point, own in overall.items()),
    ]
    if found.rounds != of_run:
        lines.append(f"The run itself had {of_run} rounds; λ here is of {found.rounds}.")
    lines.append(f"Written to {folder / CHECKED}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _cells(own: Agreement) -> tuple[str, str]:
    return ("-", "-") if math.isnan(own.rho) else (f"{own.rho:+.2f}", _p(own.p).removeprefix("= "))


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def verdict(own: Agreement) -> str:
    """In words, whatever it is."""
    if math.isnan(own.rho):
        return "no ranking to compare"
    if own.p > 0.05:
        return f"mean ρ {own.rho:+.2f}; chance alone is as far from 0 in {100 * own.p:.0f} % of cases: no firm evidence"
    if own.rho < 0:
        return f"mean ρ {own.rho:+.2f} (p {_p(own.p)}): λ ranks clients against what retraining finds"
    return f"mean ρ {own.rho:+.2f} (p {_p(own.p)}): λ ranks clients as retraining does, more than by chance"


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 120)  # a file or a pipe has no width of its own
    return console
