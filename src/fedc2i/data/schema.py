"""The columns of tables: what each client says about its own, and what all have in common.

A client describes its training columns (`describe`): names, kinds, categories, and whether values are missing. `agree`
joins the descriptions of all clients; no row and no statistic is needed for that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch

from fedc2i.core.errors import UserError, one_line
from fedc2i.data.cell_text import are_dates, have_commas, how_to_drop, is_number, label
from fedc2i.data.federation import InputSpec

if TYPE_CHECKING:
    import pandas

Kind = Literal["number", "boolean", "category", "unknown"]  # unknown: a client has no value at all
MOST_CATEGORIES = 100
MOST_COLUMNS = 10_000
MOST_LETTERS = 1000  # of the name of a column or category
MOST_NAMED = 8


@dataclass(frozen=True)
class Column:
    """One column of a table as a client, or the whole federation, knows it."""

    name: str
    kind: Kind
    categories: tuple[str, ...] = ()
    missing: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that it becomes."""
        own = tuple(f"{self.name}={value}" for value in self.categories) if self.kind == "category" else (self.name,)
        return (*own, f"{self.name} is missing") if self.missing else own


@dataclass(frozen=True)
class Schema:
    """The columns that are inputs, in order."""

    columns: tuple[Column, ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of all inputs."""
        return tuple(name for column in self.columns for name in column.inputs)

    @property
    def input(self) -> InputSpec:
        """What a row becomes."""
        return InputSpec((len(self.inputs),), torch.float32)

    def to_json(self) -> list[dict[str, Any]]:
        """As plain values, which is all that a site tells about its table."""
        return [asdict(column) for column in self.columns]

    @classmethod
    def from_json(cls, values: Any) -> Schema:
        """Reads `to_json`; it may come from a stranger.

        Raises:
            UserError: if it is not a schema.
        """
        try:
            columns = tuple(_read_column(own) for own in values[: MOST_COLUMNS + 1])
            valid = 0 < len({own.name for own in columns}) == len(columns) <= MOST_COLUMNS
        except (TypeError, LookupError, ValueError):
            valid = False
        if not valid:
            raise UserError("not the schema of a table: it needs name, kind, categories and missing for each column")
        return cls(columns)


def _read_column(values: Any) -> Column:
    name, kind, categories, missing = (values[part] for part in ("name", "kind", "categories", "missing"))
    known = kind in get_args(Kind) and type(missing) is bool and isinstance(categories, list | tuple)
    if not known or len(categories) > (MOST_CATEGORIES if kind == "category" else 0):
        raise ValueError("not a column")
    for text in (name, *categories):
        if not isinstance(text, str) or len(text.encode()) > 4 * MOST_LETTERS:
            raise ValueError("not a name")
    return Column(name, kind, tuple(categories), missing)


def describe(where: str, table: pandas.DataFrame) -> Schema:
    """What a client says about its training rows.

    Raises:
        UserError: for a column that cannot be an input: dates, mixed types, infinities, or too many categories.
    """
    return Schema(tuple(_describe(where, str(name), table[name]) for name in table.columns))


def _describe(where: str, name: str, values: pandas.Series[Any]) -> Column:
    import pandas

    if len(name) > MOST_LETTERS:
        raise UserError(f"{where}: the name of column '{one_line(name, 40)}' has more than {MOST_LETTERS} letters")
    missing, found = bool(values.isna().any()), values.dropna()
    what = f"{where}: column '{one_line(name, 80)}'"
    if found.empty:
        return Column(name, "unknown", missing=True)
    if pandas.api.types.is_bool_dtype(found) or {*map(type, found.head(1000))} <= {bool, np.bool_}:
        return Column(name, "boolean", missing=missing)
    if pandas.api.types.is_numeric_dtype(found):
        if not np.isfinite(found.to_numpy(np.float64)).all():
            raise UserError(f"{what} holds infinite numbers; replace them or leave the cells empty")
        return Column(name, "number", missing=missing)
    counts = text_counts(found)
    example, drop = f"'{one_line(next(iter(counts)), 40)}'", how_to_drop(name)
    if pandas.api.types.is_datetime64_any_dtype(found) or are_dates(counts):
        raise UserError(f"{what} holds dates such as {example}; make numbers of them (days, years), or {drop}")
    if have_commas(counts):
        raise UserError(f"{what} holds numbers with a comma such as {example}; write them with a point, or {drop}")
    _refuse_mixed(what, counts)
    if len(counts) > MOST_CATEGORIES and all(map(is_number, counts)):
        raise UserError(
            f"{what} holds numbers, but as text: another cell of it, perhaps of another client or of a row without "
            f"target, is no number; correct that, or {drop}"
        )
    if len(counts) > MOST_CATEGORIES:
        raise UserError(
            f"{what} has {len(counts):,} different texts, allowed are {MOST_CATEGORIES}; if it names rows, {drop}"
        )
    if len(max(counts, key=len)) > MOST_LETTERS:
        raise UserError(f"{what} holds texts of more than {MOST_LETTERS} letters, which are no categories; {drop}")
    return Column(name, "category", tuple(sorted(counts)), missing)


def text_counts(values: pandas.Series[Any]) -> Counter[str]:
    """How many cells have each text."""
    found: Counter[str] = Counter()
    for value, count in values.value_counts(sort=False).items():
        found[label(value)] += int(count)
    return found


def _refuse_mixed(what: str, counts: Counter[str]) -> None:
    if are_mixed(counts):
        odd = next(text for text in counts if not is_number(text))
        raise UserError(f"{what} holds numbers and text such as '{one_line(odd, 40)}'; correct it, or leave it empty")


def are_mixed(counts: Counter[str]) -> bool:
    """Whether most of some cells are numbers, and others text."""
    numbers = sum(count for text, count in counts.items() if is_number(text))
    return counts.total() / 2 < numbers < counts.total()


def agree(where: str, clients: Mapping[str, Schema]) -> Schema:
    """The schema of all clients: the same columns, the union of categories.

    Raises:
        UserError: if columns or their kinds differ; the message says which.
    """
    first_name, first = next(iter(clients.items()))
    names = [column.name for column in first.columns]
    for client, schema in clients.items():
        check_columns(f"{where}: client '{client}'", schema, names, f"client '{first_name}'")
    return Schema(tuple(_join(where, name, clients) for name in names))


def most_common(where: str, clients: Mapping[str, Schema]) -> Schema:
    """The schema of those clients that have the most common columns and the most common kind in each of them."""
    columns = Counter(frozenset(own.name for own in schema.columns) for schema in clients.values()).most_common(1)[0][0]
    same = {client: own for client, own in clients.items() if {column.name for column in own.columns} == columns}
    kinds: dict[str, Counter[Kind]] = {name: Counter() for name in columns}
    for schema in same.values():
        for column in schema.columns:
            kinds[column.name].update([column.kind] * (column.kind != "unknown"))
    best = {name: found.most_common(1)[0][0] for name, found in kinds.items() if found}
    fitting = {
        client: schema
        for client, schema in same.items()
        if all(own.kind in ("unknown", best.get(own.name)) for own in schema.columns)
    }
    return agree(where, fitting or same)


def check_fit(where: str, schema: Schema, agreed: Schema) -> None:
    """Refuses other columns, or another kind or other categories in one, than the sites of a run have agreed on."""
    check_columns(where, schema, [column.name for column in agreed.columns], "the run")
    kinds = {column.name: column.kind for column in agreed.columns}
    known = {column.name: {*column.categories} for column in agreed.columns}
    for own in schema.columns:
        if new := [value for value in own.categories if value not in known[own.name]]:
            raise UserError(
                f"{where}: column '{one_line(own.name, 80)}' has categories that the run does not know, {listed(new)}; "
                "a site with new ones must be there when the run starts"
            )
        if own.kind not in ("unknown", kinds[own.name]):
            differs = f"is of the kind '{own.kind}', in the run '{kinds[own.name]}'"
            raise UserError(f"{where}: column '{one_line(own.name, 80)}' {differs}; correct the table")


def check_columns(where: str, schema: Schema, names: Sequence[str], other: str) -> None:
    """Refuses another set of columns than ``names``, which ``other`` has."""
    own = {column.name for column in schema.columns}
    lacks, adds = [name for name in names if name not in own], sorted(own - {*names})
    if lacks or adds:
        parts = [f"lacks {listed(lacks)}"] * bool(lacks) + [f"has also {listed(adds)}"] * bool(adds)
        raise UserError(f"{where} {' and '.join(parts)}, compared with {other}; all need the same columns")


def _join(where: str, name: str, clients: Mapping[str, Schema]) -> Column:
    found = {client: next(own for own in schema.columns if own.name == name) for client, schema in clients.items()}
    kinds = {own.kind: client for client, own in found.items() if own.kind != "unknown"}
    if len(kinds) > 1:
        differs = ", ".join(f"{kind} at '{client}'" for kind, client in kinds.items())
        raise UserError(f"{where}: column '{one_line(name, 80)}' is not of one kind: {differs}")
    if not kinds:
        raise UserError(f"{where}: column '{one_line(name, 80)}' has no value at any client; {how_to_drop(name)}")
    categories = sorted({value for own in found.values() for value in own.categories})
    if len(categories) > MOST_CATEGORIES:
        many = f"has {len(categories)} categories, allowed are {MOST_CATEGORIES}"
        raise UserError(f"{where}: column '{one_line(name, 80)}' {many}; {how_to_drop(name)}")
    return Column(name, next(iter(kinds)), tuple(categories), any(own.missing for own in found.values()))


def listed(names: Sequence[str]) -> str:
    """The first names of columns, and how many more there are."""
    shown = ", ".join(f"'{one_line(name, 40)}'" for name in names[:MOST_NAMED])
    return shown + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")
