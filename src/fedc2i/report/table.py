"""A table without a medium, shown in a terminal or written as Markdown, CSV and LaTeX; and the words in tables.

Files and Python call the two evaluation points of a round ``received`` and ``trained``; tables, figures and pages say
before and after local training.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from fedc2i.core.errors import printable
from fedc2i.core.files import write_atomically
from fedc2i.engine.records import Point
from fedc2i.training.metrics import HIGHER_IS_BETTER, TITLES, digits

WHEN: Mapping[Point, str] = {"received": "before local training", "trained": "after local training"}
SHORT: Mapping[Point, str] = {"received": "before", "trained": "after"}
POINT_COLUMN = "Local training"  # the heading of a column of short names
POINT_NOTE = (
    "before: what the exchange of the last round makes of the models, from which a next round would start; "
    "after: a client's own model after its local training in the last round, before that exchange; "
    "*: the point that the method's authors report."
)
MOST_METHOD = 16  # letters of a method's name in a line, where room is scarce


@dataclass(frozen=True)
class Row:
    """Cells of a table; ``kind`` decides how they look."""

    cells: tuple[str, ...]
    kind: str = "plain"  # plain, published, or majority
    best: frozenset[int] = frozenset()  # cells that are the best of their column
    ends_section: bool = False


@dataclass
class Table:
    """A title, columns, rows, and notes below them."""

    title: str
    header: tuple[str, ...]
    averages: int = 1  # columns at the end that are shown however narrow the terminal
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bold: str = ""  # what it means that a cell is bold

    @property
    def all_notes(self) -> list[str]:
        """With the meaning of bold cells, for a medium that shows them."""
        return [*self.notes[:1], f"bold: {self.bold}.", *self.notes[1:]] if self.bold else list(self.notes)

    def __str__(self) -> str:
        return self.to_markdown()

    def to_rich(self, width: int, styled: bool = True) -> Group:
        """For a terminal of that width: if need be, deviations go below the means, then clients are omitted.

        Not ``styled`` is a file or a pipe, in which bold text does not show.
        """
        columns = list(range(len(self.header)))
        widths = [max(len(name), *(len(row.cells[k]) for row in self.rows)) for k, name in enumerate(self.header)]
        narrow = sum(widths) + 3 * len(widths) + 1 > width
        notes = self.all_notes if styled else list(self.notes)
        if narrow:
            parts = [[part for row in self.rows for part in _stacked(row.cells[k]).split("\n")] for k in columns]
            widths = [
                min(size, MOST_METHOD if k == 0 else 10 if k == 1 else max(6, *map(len, parts[k])))
                for k, size in enumerate(widths)
            ]
            clients = columns[2 : -self.averages]
            room = width - 1 - sum(widths[k] + 2 for k in columns if k not in clients)
            kept = [k for n, k in enumerate(clients) if sum(widths[j] + 2 for j in clients[: n + 1]) <= room]
            columns = [k for k in columns if k in kept or k not in clients]
            spare = width - 1 - sum(widths[k] + 2 for k in columns)
            missing = {k: max(map(len, self.header[k].split()), default=0) - widths[k] for k in columns}
            for k in sorted(columns, key=missing.__getitem__):  # whole words in as many headings as possible
                if 0 < missing[k] <= spare:
                    widths[k], spare = widths[k] + missing[k], spare - missing[k]
            if len(kept) < len(clients):
                notes.insert(0, f"{len(kept)} of {len(clients)} clients fit here; the run folder has them all.")
        table = RichTable(
            title=Text(printable(self.title), "table.title"),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            padding=(0, 1, 0, 0) if narrow else (0, 1),
        )
        for k in columns:
            table.add_column(
                Text(printable(self.header[k])), justify="left" if k < 2 else "right", width=widths[k], overflow="fold"
            )
        for row in self.rows:
            cells = [(k, printable(row.cells[k])) for k in columns]
            texts = [Text(_stacked(cell) if narrow else cell, "bold" if k in row.best else "") for k, cell in cells]
            table.add_row(*texts, style=None if row.kind == "plain" else "dim", end_section=row.ends_section)
        return Group(table, *(Text(printable(note), "table.caption") for note in notes))

    def to_markdown(self) -> str:
        """For documents."""
        lines = [
            f"| {' | '.join(map(_markdown, self.header))} |",
            f"|{'|'.join('---' if k < 2 else '---:' for k in range(len(self.header)))}|",
        ]
        for row in self.rows:
            cells = [f"**{cell}**" if k in row.best else cell for k, cell in enumerate(map(_markdown, row.cells))]
            if row.kind != "plain":
                cells = [f"*{cell}*" if cell else "" for cell in cells]
            lines.append(f"| {' | '.join(cells)} |")
        notes = "".join(f"- {note}\n" for note in self.all_notes)
        return f"**{self.title}**\n\n" + "\n".join(lines) + "\n" + (f"\n{notes}" if notes else "")

    def to_csv(self) -> str:
        """For other programs: one line a row, means and deviations in separate columns."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        split = [k for k in range(2, len(self.header)) if any(" ± " in row.cells[k] for row in self.rows)]
        writer.writerow(
            part for k, name in enumerate(self.header) for part in ((name, f"{name} sd") if k in split else (name,))
        )
        for row in self.rows:
            cells: list[str] = []
            for k, cell in enumerate(row.cells):
                mean, _, sd = cell.partition(" ± ")
                cells += [mean.strip("~ "), sd.strip("~ ")] if k in split else [cell]
            writer.writerow(cells)
        return buffer.getvalue()

    def to_latex(self) -> str:
        """For papers: a booktabs table."""
        lines = [
            r"% needs \usepackage{booktabs}",
            r"\begin{table}",
            rf"\caption{{{_latex(self.title)}}}",
            rf"\begin{{tabular}}{{ll{'r' * (len(self.header) - 2)}}}",
            r"\toprule",
            f"{' & '.join(map(_latex, self.header))} \\\\",
            r"\midrule",
        ]
        for row in self.rows:
            cells = [_latex(cell) for cell in row.cells]
            cells = [rf"\textbf{{{cell}}}" if k in row.best else cell for k, cell in enumerate(cells)]
            cells = [rf"\textit{{{cell}}}" if row.kind != "plain" and cell else cell for cell in cells]
            lines.append(f"{' & '.join(cells)} \\\\")
            if row.ends_section and row is not self.rows[-1]:
                lines.append(r"\midrule")
        lines += [r"\bottomrule", r"\end{tabular}", *(f"% {note}" for note in self.all_notes), r"\end{table}"]
        return "\n".join(lines) + "\n"

    def write(self, folder: Path, name: str) -> list[str]:
        """As ``name.md``, ``name.csv`` and ``name.tex`` into a folder; returns the files' names."""
        texts = {f"{name}.md": self.to_markdown(), f"{name}.csv": self.to_csv(), f"{name}.tex": self.to_latex()}
        for file, text in texts.items():
            write_atomically(folder / file, text.encode())
        return list(texts)


def _stacked(cell: str) -> str:
    """A cell with its deviation below the mean, and the mark of a tie beside it."""
    mean, plus, sd = cell.partition(" ± ")
    tie = "~" if sd.endswith("~") else ""
    return f"{mean}{tie}\n± {sd.removesuffix(' ~')}" if plus else cell


_LATEX = {
    **{sign: rf"\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{"±": r"$\pm$", "²": "$^2$", "⁺": "$^+$", "γ": r"$\gamma$", "λ": r"$\lambda$", "Λ": r"$\Lambda$", "−": "$-$"},
}


def _markdown(text: str) -> str:
    return text.replace("|", r"\|")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in text)


@dataclass(frozen=True)
class MetricWords:
    """How a metric is written: ``accuracy (%)``, ``accuracy``, and what stands after a value and a difference."""

    title: str
    name: str
    unit: str
    points: str
    digits: int
    sign: int  # 1 if higher is better, -1 if lower is


def metric_words(metric: str) -> MetricWords:
    """Of a metric that every run computes."""
    title, is_higher = TITLES[metric], HIGHER_IS_BETTER[metric]
    name = title.removesuffix(" (%)")
    unit, points = (" %", " points") if name != title else ("", "")
    return MetricWords(title, name, unit, points, digits(metric), 1 if is_higher else -1)


def starred(point: Point, headline: Point) -> str:
    """The short name, with a star at the point that a method's authors report."""
    return f"{SHORT[point]} *" if point == headline else SHORT[point]


def counted(number: int, thing: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {thing}{'s' * (number != 1)}"


def percent(share: float) -> str:
    """``25 %``, and small shares with a digit more: ``1.5 %``."""
    return f"{100 * share:.{0 if share >= 0.1 else 1}f} %"


def decimals(clients: int) -> int:
    """Decimal places of a share of λ: equal shares of many clients are small."""
    return 3 if clients > 50 else 2


def size(count: int) -> str:
    """Bytes: ``86.1 kB``, ``1.7 MB``."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def duration(seconds: float) -> str:
    """``40 s``, ``7 min 50 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
