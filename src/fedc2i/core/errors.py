"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can put right.

    The message is one line that says what is wrong, where, and what is allowed. The command line prints it
    without a traceback and exits with code 2; from Python it is an ordinary exception. As messages show what
    files hold, line breaks and a terminal's control characters in them become spaces.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


def printable(text: str) -> str:
    """With spaces for line breaks and a terminal's control characters."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def one_line(text: object, most: int = 200) -> str:
    """What came from elsewhere, as part of a line: short, without line breaks or a terminal's control characters."""
    try:
        said = str(text)[: 2 * most]
    except (ValueError, RecursionError):  # Python writes out no number of more than 4,300 digits, and no deep nest
        said = f"a {type(text).__name__} too long to show"
    return " ".join(printable(said).split())[:most]


def flaw(error: Exception) -> str:
    """What is wrong with a file's contents, from the exception that reading them ended in."""
    if isinstance(error, KeyError):
        return f"no entry {one_line(error)}"
    if isinstance(error, (TypeError, AttributeError)):  # their words are about Python's objects
        return "an entry is of another type"
    return one_line(error) or type(error).__name__


def nearest(name: object, allowed: Iterable[str]) -> str:
    """`` (did you mean 'gamma'?)`` for a name that looks like a mistyped one, else nothing."""
    found = difflib.get_close_matches(one_line(name, 60).lower(), [*allowed], n=1, cutoff=0.7)
    return f" (did you mean '{found[0]}'?)" if found and found[0] != name else ""
