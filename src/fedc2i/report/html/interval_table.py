"""The intervals of λ that ``fedc2i influence show`` wrote into a run folder, as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedc2i.analysis.influence_intervals import FILE, VERSION
from fedc2i.core.errors import UserError, flaw
from fedc2i.report.table import decimals

MOST_ROWS = 16  # clients whose intervals are written out
ROUNDING = 1e-6  # of numbers in the file
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Cell:
    """One weight with its interval.

    Attributes:
        weight: the estimate.
        ends: of the interval; empty where nothing was measured.
        same: whether the interval contains the equal share.
        fixed: whether it is the equal share whatever the samples.
    """

    weight: str
    ends: str
    same: bool
    fixed: bool = False


@dataclass(frozen=True)
class IntervalTable:
    """Intervals of one run.

    Attributes:
        clients: the rows and columns.
        rows: cells by the client that is helped; none where there are too many clients to write them out.
        summary: how many weights differ from an equal share.
        notes: for the reader.
    """

    clients: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    summary: str
    notes: tuple[str, ...]


def read_intervals(folder: Path, clients: Sequence[str]) -> IntervalTable | None:
    """From a run folder; None if it has no intervals of λ.

    Raises:
        UserError: if the file is damaged, or of another run.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION or found["clients"] != list(clients):
            raise ValueError("of another version or other clients")
        return None if found["vector"] is None else _table(found)
    except _DAMAGED as error:
        again = f"`fedc2i influence show {folder}` writes it again"
        raise UserError(f"{path}: cannot be read ({flaw(error)}); {again}") from None


def _table(found: dict[str, Any]) -> IntervalTable:
    vector, clients = found["vector"], found["clients"]
    places = decimals(len(clients))
    ends = [vector[name] for name in ("estimate", "low", "high")]
    rows = tuple(
        tuple(
            _cell([end[m][i] for end in ends], vector["differs"][m][i], found["share"][m], places)
            for i in range(len(clients))
        )
        for m in range(len(clients))
    )
    measured = [cell for row in rows for cell in row if cell.ends and not cell.fixed]
    fixed = sum(cell.fixed for row in rows for cell in row)
    differ = sum(not cell.same for cell in measured)
    level = f"{100 * float(found['level']):g} %"
    samples = sorted({int(own) for own in found["samples"].values()})
    over = f"{samples[0]} to {samples[-1]}" if len(samples) > 1 else f"{samples[0]}"
    summary = (
        f"{differ} of {len(measured)} weights differ from an equal share by {level} intervals (bootstrap over {over} "
        f"samples of each client, {found['draws']} draws, seed {found['seed']}, after the last round)."
    )
    if fixed:
        summary += f" Not counted: {fixed} that are the equal share whatever the samples say."
    return IntervalTable(
        tuple(clients), rows if len(clients) <= MOST_ROWS else (), summary, tuple(map(str, found["notes"]))
    )


def _cell(ends: Sequence[float | None], differs: bool, share: float | None, places: int) -> Cell:
    """From estimate, low and high; a dash where nothing was measured."""
    values = [end for end in ends if end is not None and math.isfinite(end)]
    if len(values) < len(ends):
        return Cell("–", "", True)
    weight, low, high = (f"{value:.{places}f}" for value in values)
    fixed = share is not None and all(abs(value - share) <= ROUNDING for value in values)
    return Cell(weight, f"{low} to {high}", not differs, fixed)
