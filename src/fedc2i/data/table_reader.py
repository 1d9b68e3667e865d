"""Reads CSV and Parquet files into columns of numbers, truth values and texts.

A CSV file is read as text. What kind a column has is decided once, over all files of a client: training and test rows
are then read alike. Where the kinds are known, as for rows to predict, they are given. Parquet files have kinds.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedc2i.core import memory
from fedc2i.core.errors import UserError, flaw, how_to_install, one_line
from fedc2i.data.cell_text import CLASSES, COMMA, FALSE, MISSING, NUMBER, TRUE

if TYPE_CHECKING:
    import pandas

SUFFIXES = (".csv", ".tsv", ".txt", ".parquet")
NAMELESS = "\0"  # a column without a name, which is ignored
GROWTH = 4  # a file in memory, compared with its size on disk


class _Texts(NamedTuple):
    """A CSV file: columns of text by name, without missing cells, and the mark between whole and decimal places."""

    path: Path
    columns: dict[str, Any]
    decimal: str


def read(
    files: Mapping[str, Path], target: str | None = None, kinds: Mapping[str, str] | None = None
) -> dict[str, pandas.DataFrame]:
    """The tables in the files of one client, which have the same kind in each column.

    Args:
        files: CSV (comma, semicolon or tab; UTF-8 or Latin-1) or Parquet files by part.
        target: the column in which the texts ``None`` and ``-`` are classes.
        kinds: what the columns hold, where that is known; others are not read.

    Raises:
        UserError: for a file that cannot be read or is empty, or a cell that is not of a known kind.
    """
    try:
        import pandas
        import pyarrow  # noqa: F401, needed by both formats
    except ImportError:
        raise UserError(f"tables need pandas and pyarrow: {how_to_install('table')}") from None
    tables, texts = {}, {}
    for part, path in files.items():
        if not path.is_file():
            raise UserError(f"{path}: no such file, a CSV or Parquet file is expected")
        memory.require(path, GROWTH * path.stat().st_size, "its rows")
        try:
            if path.suffix.lower() == ".parquet":
                tables[part] = pandas.read_parquet(path)
            else:
                texts[part] = _read_csv(path, target)
        except UserError:
            raise
        except Exception as error:  # parsers fail in too many ways to list
            raise UserError(f"{path}: cannot be read as a table ({flaw(error)})") from None
    tables |= _typed(texts, kinds)
    for part, path in files.items():
        nothing_known = kinds is not None and tables[part].columns.empty  # then the encoder names what is missing
        if tables[part].empty and not nothing_known:
            raise UserError(f"{path}: no rows below the header")
    return {part: tables[part] for part in files}


def _read_csv(path: Path, target: str | None) -> _Texts:
    import pyarrow
    from pyarrow import csv as arrow

    encoding = _encoding(path)
    with path.open(encoding=encoding, newline="") as stream:
        blank = 0
        while (first := stream.readline()) and not first.strip():
            blank += 1
        if not first:
            raise UserError(f"{path}: the file is empty")
        separator = max(",;\t", key=first.count)
        rows = csv.reader(itertools.chain([first], stream), delimiter=separator)
        names = [name.strip() for name in next(rows)]
        header = blank + rows.line_num
        second = next((row for row in rows if len(row) > 1 or (row and (len(names) == 1 or row[0].strip()))), [])
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise UserError(f"{path}: two columns are called '{one_line(twice[0], 80)}'")
    if not second:  # pyarrow may end the process at its exit, after it has refused such a file
        raise UserError(f"{path}: no rows below the header")
    trailing = len(second) == len(names) + 1 and not second[-1].strip()  # a separator after the last cell
    unique = [*(name or f"{NAMELESS}{k}" for k, name in enumerate(names)), *[NAMELESS] * trailing]
    longer: list[str] = []

    def refuse(row: Any) -> str:
        longer.append(f"{row.actual_columns} cells instead of {len(names)}: {one_line(row.text, 60)}")
        return "error"

    try:
        table = arrow.read_csv(
            path,
            arrow.ReadOptions(column_names=unique, skip_rows=header, encoding=encoding.removesuffix("-sig")),
            arrow.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=refuse),
            arrow.ConvertOptions(column_types=dict.fromkeys(unique, pyarrow.string())),
        )
    except pyarrow.ArrowInvalid:
        if longer:
            raise UserError(f"{path}: a row has {longer[0]}") from None
        raise
    columns = {name: _without_missing(table[name], name == target) for name in unique}
    if trailing and columns[NAMELESS].null_count < table.num_rows:
        raise UserError(f"{path}: a row has {len(names) + 1} cells instead of {len(names)}")
    named = {name: column for name, column in columns.items() if not name.startswith(NAMELESS)}
    return _Texts(path, named, "." if separator == "," else ",")


def _encoding(path: Path) -> str:
    with path.open("rb") as stream:
        if b"\0" in stream.read(2**16):
            raise UserError(f"{path}: not a text file (UTF-16?); save it as CSV in UTF-8")
    try:
        with path.open(encoding="utf-8-sig") as text:
            for _ in iter(lambda: text.read(2**20), ""):
                pass
    except UnicodeDecodeError:
        return "latin-1"
    return "utf-8-sig"


def _without_missing(column: Any, is_target: bool) -> Any:
    """Cells without spaces around them, null for missing ones."""
    import pyarrow
    from pyarrow import compute

    column = compute.utf8_trim_whitespace(column)
    absent = pyarrow.array([text for text in MISSING if not (is_target and text in CLASSES)])
    return compute.if_else(compute.is_in(column, value_set=absent), pyarrow.scalar(None, pyarrow.string()), column)


def _typed(files: Mapping[str, _Texts], kinds: Mapping[str, str] | None) -> dict[str, pandas.DataFrame]:
    """Columns of texts as those of the kinds that they have in all files together."""
    import pandas

    converted: dict[str, dict[str, Any]] = {part: {} for part in files}
    for name in dict.fromkeys(name for own in files.values() for name in own.columns):
        parts = {part: own for part, own in files.items() if name in own.columns}
        if kinds is not None and name not in kinds:
            continue
        kind = kinds[name] if kinds is not None else _kind([(own.columns[name], own.decimal) for own in parts.values()])
        for part, own in parts.items():
            where = f"{own.path}: column '{one_line(name, 80)}'"
            converted[part][name] = _converted(where, own.columns.pop(name), own.decimal, kind)
    return {part: pandas.DataFrame(own) for part, own in converted.items()}


def _kind(columns: list[tuple[Any, str]]) -> str:
    from pyarrow import compute

    def all_match(pattern: str, commas: str = "") -> bool:
        return all(
            compute.all(compute.match_substring_regex(own, commas if commas and decimal == "," else pattern)).as_py()
            is not False
            for own, decimal in columns
        )

    if all(own.null_count == len(own) for own, _ in columns):
        return "number"
    if all_match(rf"^({'|'.join((*TRUE, *FALSE))})$"):
        return "boolean"
    return "number" if all_match(NUMBER) or all_match(NUMBER, COMMA) else "category"


def _converted(where: str, column: Any, decimal: str, kind: str) -> Any:
    """A column of texts as one of numbers, truth values or texts."""
    import pyarrow
    from pyarrow import compute

    if kind == "number":
        is_number = compute.match_substring_regex(column, NUMBER)
        if decimal == "," and not compute.all(is_number).as_py():
            column = compute.replace_substring(column, ",", ".")
            is_number = compute.match_substring_regex(column, NUMBER)
        if compute.all(is_number).as_py() is False:
            odd = column.filter(compute.invert(is_number))[0].as_py()
            raise UserError(f"{where} must hold numbers, got '{one_line(odd, 40)}'")
        return compute.cast(column, pyarrow.float64()).to_pandas()
    if kind == "boolean":
        is_true = compute.is_in(column, value_set=pyarrow.array([*TRUE, "1"]))
        known = compute.is_in(column, value_set=pyarrow.array([*TRUE, *FALSE, "0", "1"]))
        if compute.all(compute.or_kleene(known, compute.is_null(column))).as_py() is False:
            odd = column.filter(compute.invert(compute.or_kleene(known, compute.is_null(column))))[0].as_py()
            raise UserError(f"{where} must hold True or False, got '{one_line(odd, 40)}'")
        return compute.if_else(compute.is_null(column), pyarrow.scalar(None, pyarrow.bool_()), is_true).to_pandas()
    return column.to_pandas()
