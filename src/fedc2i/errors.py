"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right.

    The message is one line that says what is wrong, where, and what is allowed. The command line prints it
    without a traceback and exits with code 2; from Python it is an ordinary exception.
    """


def one_line(text: object, most: int = 200) -> str:
    """What came from elsewhere, as part of a line: short, without line breaks or a terminal's control characters."""
    try:
        said = str(text)[: 2 * most]
    except (ValueError, RecursionError):  # Python writes out no number of more than 4,300 digits, and no deep nest
        said = f"a {type(text).__name__} too long to show"
    return " ".join("".join(letter if letter.isprintable() else " " for letter in said).split())[:most]
