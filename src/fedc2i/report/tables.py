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
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_rich(self, width: int) -> RichTable:
        """For a terminal of that width: where whole cells do not fit, the deviations go below the means."""
        needed = sum(3 + max(len(row.cells[k]) for row in self.rows) for k in range(len(self.header)))
        narrow = needed > width
        table = RichTable(title=self.title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD)
        for number, name in enumerate(self.header):
            table.add_column(name, justify="left" if number < 2 else "right", no_wrap=number >= 2)
        for row in self.rows:
            texts = [cell.replace(" ± ", "\n± ") if narrow else cell for cell in row.cells]
            cells = [Text(text, style="bold" if k in row.best else "") for k, text in enumerate(texts)]
            table.add_row(*cells, style="dim" if row.kind == "published" else None, end_section=row.ends_section)
        table.caption = "\n".join(self.notes)
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
    table = Table(_title(first), ("Method", "Point", *columns))
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
    row = published(result.config.data, result.key)
    for title, members in result.federation.averages.items():
        if all(member in row for member in members):
            row[title] = Score(float(np.mean([row[member].mean for member in members])), None)
    return row


def influence(result: Result) -> RichTable | None:
    """The influence vectors after the last round, shaded, mean over seeds; None if nothing was measured."""
    vectors = [result.influence("influence_vector", seed) for seed in result.config.seeds]
    if not all(vector.size for vector in vectors):
        return None
    mean = np.mean([vector[-1] for vector in vectors], axis=0)
    names = result.federation.names
    table = RichTable(
        title=f"Who helps whom: {result.label}, influence vector λ after the last round (row: who is helped)",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for m, name in enumerate(names):
        table.add_row(name, *(_shaded(value, len(names)) for value in mean[m]))
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
