"""What in the rows of a table is probably a mistake: numbers mixed with text, names of rows, stray spellings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.data.cell_text import how_to_drop, is_number, label
from fedc2i.data.schema import MOST_CATEGORIES, Schema, are_mixed, text_counts

if TYPE_CHECKING:
    import pandas

LEAST_IDS = 20  # rows of a client in which different whole numbers are no chance
ID_SHARE = 0.95  # of the numbers of a column that names rows are different
MOST_NAMED = 3  # rows, clients or groups of names in a line

Inputs = Mapping[str, Mapping[str, "pandas.DataFrame"]]  # by client, then by part


def require_clients(where: str, column: str, owners: pandas.Series[Any]) -> None:
    """Refuses rows without a client; the message counts rows from 1, below the header."""
    rows = (np.flatnonzero(owners.isna().to_numpy()) + 1).tolist()
    if rows:
        one = len(rows) == 1
        which, them = (f"row {rows[0]} has", "it") if one else (f"rows {_first(rows)} have", "them")
        what = f"{which} no client in column '{one_line(column, 80)}'"
        raise UserError(f"{where}: {what}; fill {them} in or remove {them}")


def refuse_mixed(name: str, clients: Inputs, own_parts: Collection[str]) -> None:
    """Refuses numbers mixed with text.

    All parts of a client count: without its test rows, they could pass for categories. One text in a file makes texts
    of all numbers in its column, so a client with too many texts may have none that is wrong: then all clients count.

    Args:
        name: of the table.
        clients: their inputs.
        own_parts: clients that have divided their rows themselves.
    """
    for column in dict.fromkeys(own for parts in clients.values() for own in parts["train"]):
        texts = {
            client: {
                part: table[column] for part, table in parts.items() if column in table and _is_text(table[column])
            }
            for client, parts in clients.items()
        }
        counts: dict[str, Counter[str]] = {client: Counter() for client in texts}
        together: Counter[str] = Counter()
        training: set[str] = set()
        for client, parts in texts.items():
            for part, values in parts.items():
                own = text_counts(values)
                counts[client].update(own)
                together.update(own)
                training.update(own if part == "train" else ())
        if any(map(are_mixed, counts.values())) or (len(training) > MOST_CATEGORIES and are_mixed(together)):
            found = [_odd(client, parts, name, client in own_parts) for client, parts in texts.items()]
            shown = [line for line in found if line]
            raise UserError(
                f"{name}: column '{one_line(str(column), 80)}' holds numbers and text such as {_first(shown)}; "
                "correct it, or leave it empty"
            )


def _is_text(values: pandas.Series[Any]) -> bool:
    return bool(values.dtype == object or values.dtype == "string")


def _odd(client: str, parts: Mapping[str, pandas.Series[Any]], name: str, own_parts: bool) -> str:
    """A client's first text among numbers, where it is, and how many more there are; nothing if there is none."""
    import pandas

    texts = {part: values.dropna().map(label) for part, values in parts.items()}
    texts = {part: values[[not is_number(text) for text in values]] for part, values in texts.items()}
    texts = {part: values for part, values in texts.items() if len(values)}
    if not texts:
        return ""
    first = next(iter(texts.values())) if own_parts else pandas.concat([*texts.values()])
    first = first.sort_index() if first.index.dtype.kind in "iu" else first
    index, count = first.index[0], sum(map(len, texts.values())) - 1
    is_file = name.startswith("table:") and isinstance(index, int | np.integer)
    row = f"row {index + 1}" if is_file else f"the row with index {one_line(index, 40)}"
    part = f", {next(iter(texts))}" * own_parts
    more = f" and {count:,} more" * (count > 0)
    return f"'{one_line(first.iloc[0], 40)}' in {row}{more} (client '{one_line(client, 80)}'{part})"


def id_warnings(schema: Schema, clients: Inputs) -> list[str]:
    """A line for each column of whole numbers that differ in almost all rows of every client: it may name rows."""
    lines = []
    for column in schema.columns:
        if column.kind == "number" and all(shares := [_id_share(parts, column.name) for parts in clients.values()]):
            rows = "every row" if min(shares) == 1 and not column.missing else "almost every row"
            lines.append(
                f"'{one_line(column.name, 80)}' has a different whole number in {rows}; if it names rows, "
                f"{how_to_drop(column.name)}."
            )
    return lines


def _id_share(parts: Mapping[str, pandas.DataFrame], column: str) -> float:
    """The share of different numbers among those of a client, or 0 if they do not look like names of rows."""
    own = [table[column].to_numpy(np.float64, na_value=np.nan) for table in parts.values() if column in table]
    values = np.concatenate(own)
    values = values[~np.isnan(values)]
    if len(values) < LEAST_IDS or not (values == np.round(values)).all():
        return 0
    share = len(np.unique(values)) / len(values)
    return share if share >= ID_SHARE else 0


def category_warnings(schema: Schema, clients: Inputs) -> list[str]:
    """A line for each column with categories that differ only in case."""
    lines = []
    for column in schema.columns:
        if column.kind == "category" and _alike(column.categories):
            cells = {
                client: [own[column.name] for own in parts.values() if column.name in own]
                for client, parts in clients.items()
            }
            what = f"column '{one_line(column.name, 80)}': categories"
            lines += spelling_warnings(what, column.categories, cells)
    return lines


def spelling_warnings(
    what: str, names: Collection[str], cells: Mapping[str, Iterable[pandas.Series[Any]]]
) -> list[str]:
    """One line on the names that differ only in case, or none; the rarer ones with their rows and clients.

    Args:
        what: the line begins with it.
        names: classes, or categories.
        cells: where they are, by client.
    """
    groups = _alike(names)
    if not groups:
        return []
    rows: dict[str, Counter[str]] = defaultdict(Counter)  # by name, then by client
    for client, columns in cells.items():
        for values in columns:
            for text, count in text_counts(values).items():
                rows[text][client] += count
    shown = []
    for group in groups[:MOST_NAMED]:
        *rare, common = sorted(group, key=lambda text: rows[text].total())
        first = [f"'{one_line(text, 40)}' ({_where(rows[text])})" for text in rare]
        shown.append(f"{', '.join(first)} and '{one_line(common, 40)}'")
    more = f" (and {len(groups) - MOST_NAMED} more)" * (len(groups) > MOST_NAMED)
    return [f"{what} {', '.join(shown)} differ only in case{more}; write them alike if they mean the same."]


def _alike(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ only in case."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[name.casefold()].append(name)
    return [group for group in groups.values() if len(group) > 1]


def _where(rows: Counter[str]) -> str:
    """How many rows, and at which clients."""
    return f"{rows.total():,} row{'s' * (rows.total() != 1)}, at {_first([one_line(own, 40) for own in rows])}"


def _first(things: Sequence[Any]) -> str:
    """The first ones, and how many more there are."""
    shown = [*map(str, things[:MOST_NAMED])]
    if len(things) > MOST_NAMED:
        shown.append(f"{len(things) - MOST_NAMED:,} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
