"""Results as tables: made once, printed by the terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich import box
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.engine.inprocess import POINTS, Point
from fedc2i.paper import published
from fedc2i.results import Result, Score
from fedc2i.runs import to_json, write_atomically

MOST_METHOD = 16  # letters of a method's name in a line, where room is scarce


@dataclass(frozen=True)
class Row:
    """Cells of a table; ``kind`` decides how they look."""

    cells: tuple[str, ...]
    kind: str = "plain"  # plain, published
    best: frozenset[int] = frozenset()  # cells that are the best of their column
    ends_section: bool = False


@dataclass
class Table:
    """A table without a medium."""

    title: str
    header: tuple[str, ...]
    averages: int = 1  # columns at the end that are shown however narrow the terminal
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_rich(self, width: int) -> RichTable:
        """For a terminal of that width: if need be deviations go below the means, then clients are left out."""
        columns = list(range(len(self.header)))
        widths = [max(len(name), *(len(row.cells[k]) for row in self.rows)) for k, name in enumerate(self.header)]
        narrow = sum(widths) + 3 * len(widths) + 1 > width
        notes = list(self.notes)
        if narrow:
            widths = [min(size, MOST_METHOD if k == 0 else 10 if k == 1 else 6) for k, size in enumerate(widths)]
            clients = columns[2 : -self.averages]
            room = width - 1 - sum(widths[k] + 2 for k in columns if k not in clients)
            kept = clients[: max(0, room // 8)]
            columns = [k for k in columns if k in kept or k not in clients]
            if len(kept) < len(clients):
                notes.insert(0, f"{len(kept)} of {len(clients)} clients fit here; the run folder has them all.")
        table = RichTable(
            title=Text(self.title, "table.title"),
            caption=Text("\n".join(notes), "table.caption"),
            title_justify="left",
            caption_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0) if narrow else (0, 1),
        )
        for k in columns:
            table.add_column(
                Text(self.header[k]), justify="left" if k < 2 else "right", width=widths[k], overflow="fold"
            )
        for row in self.rows:
            cells = [(k, row.cells[k].replace(" ± ", "\n± ") if narrow else row.cells[k]) for k in columns]
            texts = [Text(cell, "bold" if k in row.best else "") for k, cell in cells]
            table.add_row(*texts, style="dim" if row.kind == "published" else None, end_section=row.ends_section)
        return table

    def to_markdown(self) -> str:
        """For documents."""
        lines = [
            f"| {' | '.join(self.header)} |",
            f"|{'|'.join('---' if k < 2 else '---:' for k in range(len(self.header)))}|",
        ]
        for row in self.rows:
            cells = [f"**{cell}**" if k in row.best else cell for k, cell in enumerate(row.cells)]
            if row.kind == "published":
                cells = [f"*{cell}*" if cell else "" for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n" + (f"\n{notes}" if notes else "")


def comparison(results: Sequence[Result]) -> Table:
    """One row per method and evaluation point, one column per client, averages last; published rows below, if any."""
    first = results[0]
    columns = list(first.scores("trained"))
    scores = {(result.key, point): result.scores(point) for result in results for point in POINTS}
    best = {column: max(round(own[column].mean, 2) for own in scores.values()) for column in columns}
    table = Table(_title(first), ("Method", "Point", *columns), averages=len(columns) - len(first.federation.names))
    for result in results:
        printed = _published(result)
        for point in POINTS:
            own = scores[result.key, point]
            marks = frozenset(k + 2 for k, c in enumerate(columns) if round(own[c].mean, 2) == best[c])
            cells = (result.label, _point(result, point), *(str(own[column]) for column in columns))
            table.rows.append(Row(cells, best=marks, ends_section=point == "trained" and not printed))
        if printed:
            cells = (result.label, "published", *(str(printed[c]) if c in printed else "" for c in columns))
            table.rows.append(Row(cells, "published", ends_section=True))
    table.notes = [
        "received: the model a client starts a round from; trained: after its local run; *: the method's headline.",
        *first.federation.notes,
    ]
    return table


def _title(result: Result) -> str:
    config = result.config
    seeds = f"{len(config.seeds)} seeds, mean ± sample sd" if len(config.seeds) > 1 else f"seed {config.seeds[0]}"
    return f"Test accuracy (%) on {config.data}, {config.model}, {config.rounds} rounds, {seeds}"


def _point(result: Result, point: Point) -> str:
    return f"{point} *" if point == result.method.headline else point


def _published(result: Result) -> dict[str, Score]:
    """The paper's row, with the data set's further averages computed from its columns."""
    row = published(result.federation.name, result.key)  # a partition of it has another name, and no such row
    for title, members in result.federation.averages.items():
        if all(member in row for member in members):
            row[title] = Score(float(np.mean([row[member].mean for member in members])), None)
    return row


def influence(result: Result, width: int) -> RichTable | Text | None:
    """The influence vectors after the last round, shaded, mean over seeds; None if nothing was measured.

    Where they do not fit into ``width``, a line that says where to look.
    """
    vectors = [result.influence("influence_vector", seed) for seed in result.config.seeds]
    if not all(vector.size for vector in vectors):
        return None
    mean = np.mean([vector[-1] for vector in vectors], axis=0)
    names = result.federation.names
    if max(map(len, names)) + sum(max(len(name), 5) + 3 for name in names) + 4 > width:
        return Text(f"Who helps whom: {result.label}, {len(names)} clients, see influence.png in the run folder\n")
    table = RichTable(
        title=Text(
            f"Who helps whom: {result.label}, influence vector λ after the last round (row: who is helped)",
            "table.title",
        ),
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
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


def write_comparison(results: Sequence[Result], folder: Path) -> None:
    """``comparison.md`` and ``comparison.json`` beside the methods' run folders."""
    write_atomically(folder / "comparison.md", comparison(results).to_markdown().encode())
    write_atomically(folder / "comparison.json", to_json({result.key: result.summary() for result in results}).encode())
