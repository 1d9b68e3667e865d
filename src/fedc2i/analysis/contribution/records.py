"""A contribution as data: one row for each giver, receiver, measure, metric and point; as JSON, CSV and pandas.

``contribution.json`` in a folder holds what `Contribution.to_json` gives:

    version        1
    method, key, data, clients, classes, seeds, rounds
    metric, point  what a report shows first; the point is ``received`` or ``trained``
    exact          whether all coalitions were run
    runs           how many coalitions were; all single clients are one
    orders         how many orders of givers were drawn for each receiver; 0 if exact
    truncated      how many of the coalitions in these orders were not run, as everyone's score was reached before
    samples        {client: test samples}
    rows           see `Row`
    agreement      see `Agreement`; which weights of the method's own rank givers as the values do
    notes          sentences for a reader
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, flaw
from fedc2i.core.files import read_json, to_json, write_atomically
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.results import frame
from fedc2i.training.metrics import HIGHER_IS_BETTER

JSON, CSV, VERSION = "contribution.json", "contribution.csv", 1
MEASURES = ("shapley", "leave-one-out", "pairwise")
GAIN = "gain"  # of all givers together: its rows have no giver
LEVEL_P = 0.05
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Row:
    """One number: what a giver adds to a receiver's score; positive is better, also of a loss.

    Attributes:
        measure: shapley, leave-one-out or pairwise; gain: of all givers together.
        giver: a client; empty for a gain.
        receiver: a client.
        metric: as in `fedc2i.training.metrics`.
        point: received or trained, before or after local training.
        label: the class whose test samples alone count; empty: all samples.
        value, low, high: with the ends of the 95 % interval of this number alone.
        p: two-sided, corrected by Holm's method for all pairs of the same measure, metric and point.
    """

    measure: str
    giver: str
    receiver: str
    metric: str
    point: Point
    label: str
    value: float
    low: float
    high: float
    p: float

    @property
    def verdict(self) -> str:
        """``helps``, ``costs`` or ``may be chance``."""
        if not self.p < LEVEL_P or self.value == 0:
            return "may be chance"
        return "helps" if self.value > 0 else "costs"


@dataclass(frozen=True)
class Score:
    """A receiver's score alone and with everyone; of a loss, lower is better."""

    receiver: str
    metric: str
    point: Point
    alone: float
    together: float


@dataclass(frozen=True)
class Agreement:
    """How a weight of the method's own agrees with the Shapley values of one metric and point.

    Attributes:
        weight: e.g. ``λ, last round``.
        rho: the mean over receivers of Spearman's rank correlation over givers.
        p: by exchanging clients, see `fedc2i.analysis.rank_agreement`.
        sign: the share of pairs with the same sign: the weight above the equal share, the value above zero.
    """

    weight: str
    metric: str
    point: Point
    rho: float
    p: float
    sign: float


@dataclass(frozen=True)
class Contribution:
    """Who helps whom, by how much, and how certain that is; see the module."""

    method: str
    key: str
    data: str
    clients: tuple[str, ...]
    classes: tuple[str, ...]
    seeds: tuple[int, ...]
    rounds: int
    metric: str
    point: Point
    exact: bool
    runs: int
    orders: int
    truncated: int
    samples: dict[str, int]
    scores: tuple[Score, ...]
    rows: tuple[Row, ...]
    agreement: tuple[Agreement, ...]
    notes: tuple[str, ...]

    def select(
        self, measure: str = "shapley", metric: str | None = None, point: Point | None = None, label: str = ""
    ) -> list[Row]:
        """Rows of one measure, by default of the metric and point that are shown first."""
        wanted = measure, metric or self.metric, point or self.point, label
        return [row for row in self.rows if (row.measure, row.metric, row.point, row.label) == wanted]

    def showing(self, metric: str) -> Contribution:
        """The same, with another metric shown first."""
        return replace(self, metric=metric)

    def score(self, receiver: str, metric: str | None = None, point: Point | None = None) -> Score:
        """A receiver's score alone and together."""
        wanted = receiver, metric or self.metric, point or self.point
        return {(own.receiver, own.metric, own.point): own for own in self.scores}[wanted]

    def to_pandas(self) -> Any:
        """All rows as a pandas table, with the verdict; a `UserError` if pandas is not installed."""
        return frame(_COLUMNS, self._table())

    def to_csv(self) -> str:
        """The same as text."""
        buffer = io.StringIO()
        writer = csv.writer(buffer, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows(["" if own != own else own for own in row] for row in self._table())
        return buffer.getvalue()

    def _table(self) -> Iterator[tuple[Any, ...]]:
        for row in self.rows:
            yield *(getattr(row, own.name) for own in fields(Row)), row.verdict

    def to_json(self) -> dict[str, Any]:
        """As the module's beginning says."""
        rows = [{**asdict(row), "verdict": row.verdict} for row in self.rows]
        parts = {"scores": list(map(asdict, self.scores)), "agreement": list(map(asdict, self.agreement))}
        return {"version": VERSION, **vars(self), **parts, "rows": rows}

    def write(self, folder: Path) -> None:
        """Writes both files."""
        write_atomically(folder / JSON, to_json(self.to_json()).encode())
        write_atomically(folder / CSV, self.to_csv().encode())


_COLUMNS = (*(own.name for own in fields(Row)), "verdict")


def read(folder: Path, clients: tuple[str, ...] | None = None) -> Contribution | None:
    """What `Contribution.write` wrote; None if there is nothing.

    Raises:
        UserError: if the file is damaged, or of other clients.
    """
    path = folder / JSON
    if not path.is_file():
        return None
    try:
        found = dict(read_json(path))
        if found.pop("version") != VERSION or (clients is not None and tuple(found["clients"]) != clients):
            raise ValueError("of another version or other clients")
        for name in ("clients", "classes", "seeds", "notes"):
            found[name] = tuple(found[name])
        found["scores"] = tuple(_record(Score, own) for own in found["scores"])
        found["rows"] = tuple(_record(Row, own) for own in found["rows"])
        found["agreement"] = tuple(_record(Agreement, own) for own in found["agreement"])
        own = Contribution(**found)
        _check(own)
        return own
    except _DAMAGED as error:
        again = f"`fedc2i contribution {folder}` writes it again"
        raise UserError(f"{path}: cannot be read ({flaw(error)}); {again}") from None


def _record(kind: Any, values: dict[str, Any]) -> Any:
    """Null is a number that is not finite."""
    plain = {name: value for name, value in values.items() if name != "verdict"}
    return kind(**{name: math.nan if value is None else value for name, value in plain.items()})


def _check(own: Contribution) -> None:
    names, known = {*own.clients}, HIGHER_IS_BETTER
    for row in own.rows:
        texts = {row.receiver, *([] if row.measure == GAIN else [row.giver])} <= names
        if not texts or row.metric not in known or row.point not in POINTS or row.label not in ("", *own.classes):
            raise ValueError("a row of other clients, classes or metrics")
        if not all(isinstance(value, float | int) for value in (row.value, row.low, row.high, row.p)):
            raise ValueError("a row without numbers")
    if own.metric not in known or own.point not in POINTS:
        raise ValueError("an unknown metric or point")
    for receiver in own.clients:
        own.score(receiver)
