"""The intervals of λ that ``fedc2i influence show`` wrote into a run folder, as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedc2i.analysis.influence_intervals import FILE, VERSION
from fedc2i.core.errors import UserError, flaw
from fedc2i.report.table import decimals

MOST_ROWS = 16  # clients whose intervals are written out
ROUNDING = 1e-6  # of numbers in the file
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


class Cell(NamedTuple):
    """One weight with the ends of its interval, if it was measured, and whether that contains the equal share."""

    weight: str
    ends: str
    same: bool


@dataclass(frozen=True)
class IntervalTable:
    """Intervals of one run; no rows where there are too many clients to write them out."""

    rows: tuple[tuple[Cell, ...], ...]  # by the client that is helped
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
        return None if found["vector"] is None else _table(found, len(clients))
    except _DAMAGED as error:
        again = f"`fedc2i influence show {folder}` writes it again"
        raise UserError(f"{path}: cannot be read ({flaw(error)}); {again}") from None


def _table(found: dict[str, Any], clients: int) -> IntervalTable:
    ends = np.array([found["vector"][name] for name in ("estimate", "low", "high")], dtype=float)  # None becomes nan
    differs = np.array(found["vector"]["differs"], dtype=bool)
    share = np.array(found["share"], dtype=float)
    if ends.shape != (3, clients, clients) or differs.shape != ends.shape[1:] or share.shape != (clients,):
        raise ValueError("of other clients")
    measured = np.isfinite(ends).all(0)
    fixed = (np.abs(ends - share[:, None]) <= ROUNDING).all(0)  # the equal share whatever the samples
    level = f"{100 * float(found['level']):g} %"
    samples = sorted({int(own) for own in found["samples"].values()})
    over = f"{samples[0]} to {samples[-1]}" if len(samples) > 1 else f"{samples[0]}"
    summary = (
        f"{(differs & measured & ~fixed).sum()} of {(measured & ~fixed).sum()} weights differ from an equal share by "
        f"{level} intervals (bootstrap over {over} samples of each client, {found['draws']} draws, seed "
        f"{found['seed']}, after the last round)."
    )
    if fixed.any():
        summary += f" Not counted: {fixed.sum()} that are the equal share whatever the samples say."
    every = range(clients if clients <= MOST_ROWS else 0)
    rows = tuple(tuple(_cell(ends[:, m, i], bool(differs[m, i]), decimals(clients)) for i in every) for m in every)
    return IntervalTable(rows, summary, tuple(map(str, found["notes"])))


def _cell(ends: np.ndarray[Any, Any], differs: bool, places: int) -> Cell:
    """From estimate, low and high; a dash where nothing was measured."""
    if not np.isfinite(ends).all():
        return Cell("–", "", True)
    weight, low, high = (f"{value:.{places}f}" for value in ends)
    return Cell(weight, f"{low} to {high}", not differs)
