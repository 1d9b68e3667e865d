"""Influence of a finished run in a terminal: with its intervals, and against retraining."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedc2i.analysis.influence_intervals import FILE, InfluenceIntervals
from fedc2i.analysis.retraining import Agreement, Check
from fedc2i.core.errors import one_line
from fedc2i.engine.records import POINTS
from fedc2i.report.table import SHORT, WHEN

MOST_HELPERS = 12  # listed for one client


def print_intervals(console: Console, found: InfluenceIntervals, clients: Iterable[int]) -> None:
    """What helps each of the clients, and how many influences differ from the equal share."""
    for m in clients:
        name, share = found.clients[m], float(found.share[m])
        split = {"train": "training"}.get(found.split[name], found.split[name])
        measured = f"{found.samples[name]} {split} samples, seed {found.seed}"
        title = f"What helps {one_line(name)}: influence λ on {measured}, equal share {share:.3f}"
        console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
        console.print(_helpers(found, m))
    print_lines(console, [*_count(found), *found.notes])


def _helpers(found: InfluenceIntervals, m: int) -> Table:
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
        name = one_line(found.clients[i]) + (" (own)" if i == m else "")
        cells = (name, f"{estimate:.3f}", f"{low:.3f} .. {high:.3f}", mark or more)
        table.add_row(*map(Text, cells), style=style)
    if len(order) > MOST_HELPERS:
        table.caption = f"and {len(order) - MOST_HELPERS} more, see {FILE}"
    return table


def _count(found: InfluenceIntervals) -> list[str]:
    """How many influences differ, of those that could."""
    if found.vector is None:
        return []
    fixed = found.fixed()
    different = int((found.differs() & ~fixed).sum())
    of = int((found.vector.estimate.isfinite() & ~fixed).sum())
    lines = [
        f"{different} of {of} influences differ from the equal share at {100 * found.level:g} %; by chance about "
        f"{(1 - found.level) * of:.0f} of {of} would, if all were equal."
    ]
    if fixed.any():
        lines.append(f"Not counted: {int(fixed.sum())} that are the equal share for any samples (fixed).")
    return lines


def print_check(console: Console, found: Check, of_run: int) -> None:
    """The correlations of every client and over all, and what they mean."""
    seeds = ", ".join(map(str, found.seeds))
    title = f"Influence against retraining without each client: {found.rounds} rounds, seed {seeds}"
    console.print(title, style="bold", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for point in POINTS:
        table.add_column(f"ρ {SHORT[point]}", justify="right")
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
        "out from the start; before and after local training.",
        f"p: share of all orders of the {others} others with a ρ as far from 0; the smallest possible is "
        f"{2 / math.factorial(others):.2g} for one client{'.' if others > 3 else ', so only the last row can tell.'} "
        "Last row: of all ways to exchange the clients of one ranking, as clients that help everybody are in all rows.",
        *(f"{WHEN[point].capitalize()}: {verdict(own)}" for point, own in overall.items()),
    ]
    if found.rounds != of_run:
        lines.append(f"The run itself had {of_run} rounds; λ here is of {found.rounds}.")
    print_lines(console, lines)


def _cells(own: Agreement) -> tuple[str, str]:
    return ("-", "-") if math.isnan(own.rho) else (f"{own.rho:+.2f}", _p(own.p).removeprefix("= "))


def _p(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.3f}"


def verdict(own: Agreement) -> str:
    """The correlation in words."""
    if math.isnan(own.rho):
        return "no ranking to compare"
    if own.p > 0.05:
        return f"mean ρ {own.rho:+.2f}; chance alone is as far from 0 in {100 * own.p:.0f} % of cases: no firm evidence"
    if own.rho < 0:
        return f"mean ρ {own.rho:+.2f} (p {_p(own.p)}): λ ranks clients against what retraining finds"
    return f"mean ρ {own.rho:+.2f} (p {_p(own.p)}): λ ranks clients as retraining does, more than by chance"


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Lines as they are, which the terminal wraps."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
