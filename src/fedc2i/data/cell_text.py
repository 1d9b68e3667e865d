"""What the text of a cell says: a number, a truth value, a date, or nothing at all.

Rules are strict, since the kind of a column follows from all of its cells: ``01`` is a code and not a number.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from typing import Any

MISSING = ("", "?", "NA", "N/A", "n/a", "NaN", "nan", "null", "NULL", "None", "-")
CLASSES = ("None", "-")  # that are missing cells of inputs, and classes of a target
TRUE, FALSE = ("true", "True", "TRUE"), ("false", "False", "FALSE")
_WHOLE, _POWER = r"(0|[1-9]\d*)", r"([eE][+-]?\d+)?"
NUMBER = rf"^[+-]?(({_WHOLE}(\.\d*)?|\.\d+){_POWER}|(?i:inf|infinity))$"  # also read by RE2
COMMA = rf"^[+-]?({_WHOLE}(,\d*)?|,\d+){_POWER}$"
_DATE = re.compile(r"(\d{4}-\d{1,2}-\d{1,2}|\d{1,2}([./-])\d{1,2}\2\d{2,4})([ T].*)?", re.ASCII)
_NUMBER, _COMMA = re.compile(NUMBER, re.ASCII), re.compile(COMMA, re.ASCII)


def label(value: Any) -> str:
    """A class, client or category as text: 1.0 and 1 are the same."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value).strip()


def is_number(text: str) -> bool:
    """Whether it is a number with a decimal point, or a whole one."""
    return _NUMBER.match(text) is not None


def have_commas(texts: Iterable[str]) -> bool:
    """Whether they are all numbers with a decimal comma."""
    return all(_COMMA.match(text) and "," in text for text in texts)


def are_dates(texts: Iterable[str]) -> bool:
    """Whether they are all dates: 2021-02-03, 03.02.2021 or 2/3/2021, perhaps with a time."""
    return all(_DATE.fullmatch(text) for text in texts)


def how_to_drop(column: str) -> str:
    """The option that ignores a column."""
    return f"drop it with --set {shlex.quote(f'drop={column}')}"
