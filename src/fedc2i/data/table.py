"""``table:FILE`` and ``table:DIR``: rows of a CSV or Parquet file, with a column to predict.

One file with a column that names each row's client; or a folder with one file per client; or a folder with a folder per
client that holds ``train``, ``test`` and perhaps ``validation`` files. Rows are divided 70/10/20 into training,
validation and test, stratified by class and seeded, unless files or a column ``split`` divide them. pandas reads the
files (``pip install 'fedc2i[table]'``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.seeding import key
from fedc2i.data.cell_text import label
from fedc2i.data.encoder import Encoder
from fedc2i.data.federation import Client, DataOptions, Federation, Split, stratified_order
from fedc2i.data.folder import entries, natural_key
from fedc2i.data.scaling import check_scale
from fedc2i.data.schema import MOST_COLUMNS, Schema, agree, describe
from fedc2i.data.table_checks import category_warnings, id_warnings, refuse_mixed, require_clients, spelling_warnings
from fedc2i.data.table_reader import SUFFIXES, read

if TYPE_CHECKING:
    import pandas

PARTS = ("train", "validation", "test")
TEST_SHARE, VALIDATION_SHARE = 0.2, 0.1
MOST_CLASSES, MOST_CLIENTS = 100, 10_000
MOST_NUMBERS, LEAST_ROWS = 20, 5  # values of a target of numbers, and beyond that rows of each
TO_PREDICT = " to predict"
LEAVE_OUT = "; to leave this client out, remove its rows (in a folder, its file)"
ENCODING, SPLIT = "encoding.json", "split.json"  # in the run folder

Tables = Mapping[str, Mapping[str, "pandas.DataFrame"]]  # by client, then by part
Parts = Mapping[str, tuple["pandas.DataFrame", Any]]  # inputs and labels by part


@dataclass(frozen=True)
class Rows:
    """The rows of clients, divided into training, validation and test, and not encoded yet.

    Attributes:
        name: of the federation.
        parts: by client.
        chosen: the rows of each part by client, as the table's index names them, where we chose them.
        classes: names of the labels.
        target: the column to predict.
        scale: as in `from_table`.
        notes: what a reader of a result must know.
        warnings: as in `Federation`.
    """

    name: str
    parts: Mapping[str, Parts]
    chosen: Mapping[str, Mapping[str, list[Any]]]
    classes: tuple[str, ...]
    target: str
    scale: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def describe(self) -> dict[str, Schema]:
        """What each client says about its training rows."""
        refuse_mixed(self.name, self._inputs(), [client for client in self.parts if not self.chosen[client]])
        return {
            client: describe(f"{self.name}: client '{client}'", own["train"]) for client, own in self._inputs().items()
        }

    def input_warnings(self, schema: Schema) -> list[str]:
        """A line for each column that may name rows, or has stray spellings of a category."""
        return [*id_warnings(schema, self._inputs()), *category_warnings(schema, self._inputs())]

    def _inputs(self) -> dict[str, dict[str, pandas.DataFrame]]:
        """By client and part."""
        return {client: {part: table for part, (table, _) in own.items()} for client, own in self.parts.items()}

    def encode(self, schema: Schema) -> Federation:
        """The clients with rows as numbers, and how that was done as attachments."""
        training = {client: own["train"][0] for client, own in self.parts.items()}
        together = Encoder.fit(schema, list(training.values())) if self.scale == "federated" else None
        encoders = {
            client: together or Encoder.fit(schema, [own], scaled=self.scale == "client")
            for client, own in training.items()
        }
        built = tuple(_client(self.name, client, own, encoders[client]) for client, own in self.parts.items())
        attachments = {
            ENCODING: json.dumps({"target": self.target, "clients": {c: own.to_json() for c, own in encoders.items()}}),
            SPLIT: json.dumps(self.chosen, default=str),
        }
        return Federation(
            self.name,
            built,
            self.classes,
            (*self.notes, *self.warnings),
            preset={"rounds": 20},
            attachments=attachments,
            warnings=self.warnings,
        )


def load(argument: str, options: DataOptions) -> Federation:
    """Clients from one file or a folder of files.

    Raises:
        UserError: for a file that cannot be read, a missing column, or a table that `from_table` refuses.
    """
    return build(f"table:{argument}", _read_tables(argument, options), options)


def at_site(argument: str, options: DataOptions, site: str, client: str | None) -> Rows:
    """The rows of a real site, under its name: a file without other clients, or one client of a file or folder.

    Raises:
        UserError: as `load`, or if it is not clear which client the site is.
    """
    name = f"table:{argument}"
    tables = _read_tables(argument, options, site if client is None else None)
    if client is None and len(tables) > 1:
        raise UserError(f"{name}: several clients, this site's must be named: {_some(list(tables))}")
    own = next(iter(tables)) if client is None else client
    if own not in tables:
        raise UserError(f"{name}: no client '{one_line(own, 80)}', allowed are {_some(list(tables))}")
    rows = divide(name, {own: tables[own]}, options, least_classes=1)
    return replace(rows, parts={site: rows.parts[own]}, chosen={site: rows.chosen[own]})


def _read_tables(argument: str, options: DataOptions, alone: str | None = None) -> Tables:
    """By client and part; one file without a column of clients is that of the client ``alone``."""
    if not argument:
        raise UserError("table: a file or folder is needed, as table:FILE.csv or table:DIR")
    if not options.target:
        raise UserError(f"table:{argument}: name the column to predict with --target COLUMN")
    path = Path(argument).expanduser()
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; a CSV or Parquet file, or a folder of them, is expected")
    if not path.is_dir():
        table = read({"": path}, options.target)[""]
        return {alone: {"": table}} if alone and not options.clients else _by_column(str(path), table, options)
    if options.clients:
        raise UserError(f"{path}: a folder has one file per client, so --clients is not for it")
    tables: dict[str, Any] = {}
    for entry in entries(path):
        if entry.is_dir():
            files = {file.stem: file for file in entries(entry) if file.suffix.lower() in SUFFIXES}
            if not {"train", "test"} <= files.keys() <= {*PARTS}:
                raise UserError(f"{entry}: a client's folder holds train.csv, test.csv and perhaps validation.csv")
            tables[entry.name] = read(files, options.target)
        elif entry.suffix.lower() in SUFFIXES:
            try:
                tables[entry.stem] = read({"": entry}, options.target)
            except UserError as error:
                raise UserError(f"{error}; each file of the folder is a client ({', '.join(SUFFIXES)})") from None
        else:
            raise UserError(f"{entry}: allowed are files ending in {', '.join(SUFFIXES)}; move it elsewhere")
    if not tables:
        raise UserError(f"{path}: no clients, expected one CSV or Parquet file per client")
    return tables


def from_table(
    table: pandas.DataFrame | Mapping[str, pandas.DataFrame],
    target: str,
    clients: str | None = None,
    *,
    split: str | None = None,
    name: str = "table",
    scale: str = "client",
    seed: int = 0,
) -> Federation:
    """A federation from a DataFrame, or from one for each client.

    Args:
        table: one DataFrame, whose column ``clients`` names each row's client, or DataFrames by client.
        target: the column to predict; rows without it are ignored.
        clients: the column with the clients' names, for one DataFrame.
        split: the column that says train, validation or test; else rows are divided 70/10/20.
        name: the federation's name.
        scale: numbers are standardised by the client's own training rows (``client``), by those of all clients
            (``federated``), or not (``none``).
        seed: of the split into training, validation and test, where no column says it.

    Raises:
        UserError: for columns that are missing or cannot be encoded, or a client with too few rows.

    Example:
        >>> import pandas
        >>> rows = {"age": [60, 55, 70, 42] * 5, "ill": [1, 0] * 10, "site": ["A", "A", "B", "B"] * 5}
        >>> from_table(pandas.DataFrame(rows), target="ill", clients="site").names
        ('A', 'B')
    """
    check_scale(scale)
    column, part = (None if own is None else str(own) for own in (clients, split))
    options = DataOptions(scale=scale, target=str(target), clients=column, split=part, seed=seed)  # type: ignore[arg-type]
    if isinstance(table, Mapping):
        return build(name, {str(client): {"": _named(name, own)} for client, own in table.items()}, options)
    return build(name, _by_column(name, _named(name, table), options), options)


def _named(where: str, table: pandas.DataFrame) -> pandas.DataFrame:
    """With texts as the names of columns."""
    names = [str(name) for name in table.columns]
    twice = [name for name in names if names.count(name) > 1] if len({*names}) < len(names) else []
    if twice:
        raise UserError(f"{where}: two columns are called '{one_line(twice[0], 80)}'")
    return table.set_axis(names, axis=1)


def build(name: str, tables: Tables, options: DataOptions) -> Federation:
    """A federation of tables by client and part; ``""`` is a part that is still to be divided."""
    rows = divide(name, tables, options)
    schema = agree(name, rows.describe())
    return replace(rows, warnings=(*rows.warnings, *rows.input_warnings(schema))).encode(schema)


def divide(name: str, tables: Tables, options: DataOptions, least_classes: int = 2) -> Rows:
    """The rows of tables by client and part; ``""`` is a part that is still to be divided."""
    target = options.target or ""
    if not 0 < len(tables) <= MOST_CLIENTS:
        raise UserError(f"{name}: {len(tables):,} clients, allowed are 1 to {MOST_CLIENTS:,}")
    cleaned, notes = _with_target(name, _by_split(name, tables, options), target)
    classes, warnings = _classes(name, cleaned, target, least_classes)
    labelled = {client: [own[target] for own in parts.values()] for client, parts in cleaned.items()}
    warnings += spelling_warnings(f"target '{one_line(target, 80)}': classes", classes, labelled)
    number = {title: index for index, title in enumerate(classes)}
    parts, rows = {}, {}
    for client, own in cleaned.items():
        where = f"{name}: client '{one_line(client, 80)}'"
        labels = {part: table[target].map(label).map(number).to_numpy() for part, table in own.items()}
        inputs = {part: table.drop(columns=[target]) for part, table in own.items()}
        hint = LEAVE_OUT * (len(tables) > 1)
        parts[client], rows[client] = _divided(where, inputs, labels, key(options.seed, client, "split"), hint)
    return Rows(name, parts, rows, classes, target, options.scale, tuple(notes), tuple(warnings))


def _require(where: str, table: pandas.DataFrame, column: str, purpose: str = "") -> None:
    if column not in table.columns:
        hint = nearest(column, table.columns)
        raise UserError(f"{where}: no column '{one_line(column, 80)}'{purpose}{hint}, there are {_some(table.columns)}")


def _by_column(where: str, table: pandas.DataFrame, options: DataOptions) -> dict[str, dict[str, pandas.DataFrame]]:
    column = options.clients
    if not column:
        raise UserError(f"{where}: name the column with each row's client with --clients COLUMN")
    _require(where, table, column)
    _require(where, table, options.target or "", TO_PREDICT)
    require_clients(where, column, table[column])
    owners = table[column].map(label)
    rest = table.drop(columns=[column])
    return {owner: {"": rest[owners == owner]} for owner in sorted({*owners}, key=natural_key)}


def _by_split(name: str, tables: Tables, options: DataOptions) -> Tables:
    """Without the columns to drop, and divided by the column that says which part a row belongs to, if there is one."""
    drop = [column.strip() for column in (options.drop or "").split(",") if column.strip()]
    divided: dict[str, dict[str, pandas.DataFrame]] = {}
    for client, parts in tables.items():
        where = f"{name}: client '{one_line(client, 80)}'"
        for table in parts.values():
            for column in (*drop, *filter(None, [options.split])):
                _require(where, table, column)
        divided[client] = {part: table.drop(columns=drop) for part, table in parts.items()}
        if options.split and "" in parts:
            divided[client] = _parts_of(where, divided[client][""], options.split)
    return divided


def _parts_of(where: str, table: pandas.DataFrame, column: str) -> dict[str, pandas.DataFrame]:
    named = table[column].map(lambda value: {"val": "validation"}.get(str(value).strip(), str(value).strip()))
    odd = sorted({*named} - {*PARTS})
    absent = [part for part in ("train", "test") if part not in {*named}]
    if odd or absent:
        what = f"'{one_line(odd[0], 40)}'" if odd else f"no '{absent[0]}'"
        raise UserError(f"{where}: column '{column}' has {what}; its values are train, test and perhaps validation")
    return {part: table[named == part].drop(columns=[column]) for part in PARTS if part in {*named}}


def _with_target(name: str, tables: Tables, target: str) -> tuple[dict[str, dict[str, pandas.DataFrame]], list[str]]:
    """The rows that have a target, and a note on how many have none."""
    cleaned: dict[str, dict[str, pandas.DataFrame]] = {}
    ignored = 0
    for client, parts in tables.items():
        cleaned[client] = {}
        for part, table in parts.items():
            where = f"{name}: client '{one_line(client, 80)}'"
            _require(where, table, target, TO_PREDICT)
            if len(table.columns) > MOST_COLUMNS:
                raise UserError(f"{where}: {len(table.columns):,} columns, allowed are {MOST_COLUMNS:,}")
            kept = table[table[target].notna()]
            ignored += len(table) - len(kept)
            if kept.empty:
                raise UserError(f"{where}: no row has a value in column '{target}'{LEAVE_OUT * (len(tables) > 1)}")
            cleaned[client][part] = kept
    return cleaned, [f"{ignored} rows without '{target}' are ignored."] if ignored else []


def _classes(name: str, tables: Tables, target: str, least: int) -> tuple[tuple[str, ...], list[str]]:
    """The names of the labels, and a warning where they are numbers that may be a quantity."""
    columns = [table[target] for parts in tables.values() for table in parts.values()]
    found = {label(value) for column in columns for value in column.unique()}
    what = f"{name}: column '{target}' has {len(found):,} different"
    remedy = "this package predicts classes: make classes of the numbers, e.g. low and high"
    if len(found) > MOST_CLASSES:
        raise UserError(f"{what} values, allowed are {MOST_CLASSES}; {remedy}")
    warnings = []
    if len(found) > MOST_NUMBERS and all(column.dtype.kind in "iuf" for column in columns):
        few = sum(map(len, columns)) < LEAST_ROWS * len(found)
        if few or any((column % 1 != 0).any() for column in columns):
            raise UserError(f"{what} numbers; {remedy}")
        warnings = [
            f"'{one_line(target, 80)}' has {len(found)} different numbers, and each becomes a class; regression is not "
            "supported: if it is a quantity, make some classes of it, e.g. low and high."
        ]
    if len(found) < least:
        raise UserError(f"{name}: column '{target}' has only the value '{next(iter(found))}', two are needed")
    return tuple(sorted(found, key=natural_key)), warnings


def _divided(
    where: str, tables: Mapping[str, pandas.DataFrame], labels: Mapping[str, Any], seed: int, hint: str
) -> tuple[dict[str, tuple[pandas.DataFrame, Any]], dict[str, list[Any]]]:
    """Rows and labels by part, and the rows of a part, as the table's index names them, where we chose them."""
    if "" not in tables:
        return {part: (table, labels[part]) for part, table in tables.items()}, {}
    (table,), (y,) = tables.values(), labels.values()
    count = len(table)
    test, validation = max(1, round(TEST_SHARE * count)), round(VALIDATION_SHARE * count)
    if count - test - validation < 1:
        raise UserError(f"{where}: {count} row, at least one for training and one for test are needed{hint}")
    order = stratified_order(y, np.random.default_rng(seed).permutation(count))
    ends = [count - test - validation, count - validation]
    train_rows, test_rows, validation_rows = (np.sort(part) for part in np.split(order, ends))
    rows = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    named = {part: table.index[own].tolist() for part, own in rows.items()}
    return {part: (table.iloc[own], y[own]) for part, own in rows.items()}, named


def _client(name: str, client: str, parts: Mapping[str, tuple[pandas.DataFrame, Any]], encoder: Encoder) -> Client:
    where = f"{name}: client '{one_line(client, 80)}'"
    splits = {
        part: Split.from_numpy(encoder.encode(f"{where}, {part}", table), y) for part, (table, y) in parts.items()
    }
    splits.setdefault("validation", splits["train"].take([]))
    return Client(client, **splits)


def _some(names: Sequence[Any]) -> str:
    shown = ", ".join(one_line(name, 40) for name in list(names)[:20])
    return shown + (", ..." if len(names) > 20 else "")
