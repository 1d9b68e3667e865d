"""Who helps whom, as a shaded table in a terminal."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.runs.results import Result


def influence_table(result: Result, width: int) -> RichTable | Text | None:
    """The influence vectors after the last round, mean over seeds; None if nothing was measured.

    Where they need more than ``width`` columns, a line that says where to look.
    """
    vectors = [result.influence("influence_vector", seed) for seed in result.config.seeds]
    if not all(vector.size for vector in vectors):
        return None
    mean = np.mean([vector[-1] for vector in vectors], axis=0)
    names = result.federation.names
    if max(map(len, names)) + sum(max(len(name), 5) + 3 for name in names) + 4 > width:
        return Text(f"Who helps whom: {result.label}, {len(names)} clients, see influence.png in the run folder\n")
    title = f"Who helps whom: {result.label}, influence vector λ after the last round (row: who is helped)"
    table = RichTable(title=Text(title, "table.title"), title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("")
    for name in names:
        table.add_column(Text(name), justify="right")
    for m, name in enumerate(names):
        table.add_row(Text(name), *(_shaded(value, len(names)) for value in mean[m]))
    return table


def _shaded(value: float, clients: int) -> Text:
    if np.isnan(value):
        return Text("-", style="dim")
    uniform = 1 / clients
    style = "bold green" if value > 1.2 * uniform else "dim" if value < 0.8 * uniform else ""
    return Text(f"{value:.3f}", style=style)
