"""Influence of a finished run in a terminal, with its intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedc2i.analysis.influence_intervals import FILE, InfluenceIntervals
from fedc2i.core.errors import one_line

MOST_HELPERS = 12  # listed for one client


def print_intervals(console: Console, found: InfluenceIntervals, clients: Iterable[int]) -> None:
    """What weighs for each of the clients, and how many influences differ from the equal share."""
    for m in clients:
        name, share = found.clients[m], float(found.share[m])
        split = {"train": "training"}.get(found.split[name], found.split[name])
        measured = f"{found.samples[name]} {split} samples, seed {found.seed}"
        title = f"Whose model weighs for {one_line(name)}: influence λ on {measured}, equal share {share:.3f}"
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


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Lines as they are, which the terminal wraps."""
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
