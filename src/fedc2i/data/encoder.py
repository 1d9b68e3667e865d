"""Turns the rows of a client's table into numbers.

A numeric column becomes one input, standardised; a boolean one 0 or 1; a categorical one an indicator of each category.
A column that lacks values anywhere gets one more indicator, "is missing". A category that is not in the agreed schema
sets no indicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.data.cell_text import label
from fedc2i.data.schema import Column, Schema, listed

if TYPE_CHECKING:
    import pandas

Array = np.ndarray[Any, np.dtype[np.float64]]
FAR, VERY_FAR = 6, 50  # standard deviations: of most values, and of a single one; a rare 0 or 1 may be 20 away


class Distant(NamedTuple):
    """A column with numbers unlike those of the training rows."""

    column: str
    far: int
    known: int  # values that are not missing
    limit: int  # all the far ones are more standard deviations away
    mean: float
    sd: float


@dataclass(frozen=True)
class Encoder:
    """Turns a client's rows into numbers; fitted on its training rows, saved with the run."""

    schema: Schema
    mean: tuple[float, ...]  # of each column; 0 if it is not a number
    sd: tuple[float, ...]  # of each column; 1 if it is not a number, 0 if it is constant or has no value

    @classmethod
    def fit(cls, schema: Schema, tables: Sequence[pandas.DataFrame], scaled: bool = True) -> Encoder:
        """Means and deviations over the training rows of one client, or of several by their sums."""
        means, sds = [], []
        for column in schema.columns:
            mean, sd = 0.0, 1.0
            if column.kind == "number" and scaled:
                parts = [_numbers("training rows", column, table[column.name]) for table in tables]
                mean, sd = _moments([part[~np.isnan(part)] for part in parts])
            means.append(mean)
            sds.append(sd)
        return cls(schema, tuple(means), tuple(sds))

    def encode(self, where: str, table: pandas.DataFrame) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Rows ``(N, inputs)``; a missing number becomes the training mean.

        Raises:
            UserError: for a missing column, or a value that is not a number where one is needed.
        """
        absent = [column.name for column in self.schema.columns if column.name not in table.columns]
        if absent:
            raise UserError(f"{where}: no column {listed(absent)}; needed are {listed(self._names())}")
        found = np.zeros((len(table), len(self.schema.inputs)), dtype=np.float32)
        place = 0
        for column, mean, sd in zip(self.schema.columns, self.mean, self.sd, strict=True):
            values, width = table[column.name], len(column.inputs)
            self._encode(where, column, values, mean, sd, found[:, place : place + width])
            place += width
        return found

    def _encode(
        self, where: str, column: Column, values: pandas.Series[Any], mean: float, sd: float, into: Any
    ) -> None:
        """Fills the inputs of a column, which are 0."""
        if column.missing:
            into[:, -1] = values.isna().to_numpy()
        if column.kind == "category":
            number = {category: k for k, category in enumerate(column.categories)}
            codes = values.map({value: number.get(label(value), -1) for value in values.dropna().unique()})
            chosen = codes.fillna(-1).to_numpy(np.int64)
            rows = np.flatnonzero(chosen >= 0)
            into[rows, chosen[rows]] = 1
        elif sd:  # a number that is constant in the training rows says nothing: 0
            numbers = _numbers(where, column, values)
            into[:, 0] = np.where(np.isnan(numbers), 0.0, (numbers - mean) / sd)

    def unseen(self, table: pandas.DataFrame) -> dict[str, dict[str, int]]:
        """Categories of these rows that are not in the schema, by column, each with the number of its rows."""
        found: dict[str, dict[str, int]] = {}
        for column in self.schema.columns:
            if column.kind == "category":
                counts = ((label(value), int(rows)) for value, rows in table[column.name].value_counts().items())
                found[column.name] = {value: rows for value, rows in counts if value not in column.categories}
        return {name: own for name, own in found.items() if own}

    def distant(self, table: pandas.DataFrame) -> list[Distant]:
        """Columns where most of these rows, or some by very much, are far from the training mean.

        Columns that were not standardised are skipped: their means are not known.
        """
        found = []
        for column, mean, sd in zip(self.schema.columns, self.mean, self.sd, strict=True):
            if column.kind != "number" or not sd or (mean, sd) == (0, 1):
                continue
            numbers = _numbers("rows", column, table[column.name])
            distances = np.abs(numbers[~np.isnan(numbers)] - mean) / sd
            limit = FAR if (distances > FAR).sum() > len(distances) / 2 else VERY_FAR
            if far := int((distances > limit).sum()):
                found.append(Distant(column.name, far, len(distances), limit, mean, sd))
        return found

    def _names(self) -> list[str]:
        return [column.name for column in self.schema.columns]

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"columns": self.schema.to_json(), "mean": list(self.mean), "sd": list(self.sd)}

    @classmethod
    def from_json(cls, values: Any) -> Encoder:
        """Reads `to_json`.

        Raises:
            UserError: if it is something else.
        """
        try:
            schema = Schema.from_json(values["columns"])
            mean, sd = (tuple(float(own) for own in values[name]) for name in ("mean", "sd"))
            if not len(mean) == len(sd) == len(schema.columns):
                raise UserError("not an encoder of a table: its means, deviations and columns differ in number")
        except (TypeError, LookupError, ValueError):
            raise UserError("not an encoder of a table: it needs columns, mean and sd") from None
        return cls(schema, mean, sd)


def _moments(parts: Sequence[Array]) -> tuple[float, float]:
    """Mean and sample deviation over clients, each of which adds sums only; deviation 0 of a constant or of nothing."""
    count = sum(map(len, parts))
    if not count:
        return 0.0, 0.0
    mean = sum(float(part.sum()) for part in parts) / count
    variance = sum(float(np.square(part - mean).sum()) for part in parts) / max(1, count - 1)
    return mean, variance**0.5 if variance**0.5 > 1e-12 * abs(mean) else 0.0


def _numbers(where: str, column: Column, values: pandas.Series[Any]) -> Array:
    """As floats with nan for missing ones."""
    import pandas

    try:
        numbers = pandas.to_numeric(values.replace({True: 1, False: 0}) if values.dtype == object else values)
        found: Array = numbers.to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{where}: column '{one_line(column.name, 80)}' must hold numbers ({one_line(error)})"
        ) from None
    if np.isinf(found).any():
        raise UserError(f"{where}: column '{one_line(column.name, 80)}' holds infinite numbers")
    return found
