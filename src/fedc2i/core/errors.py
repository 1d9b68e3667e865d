"""The one exception that is meant for the person at the keyboard, and text from strangers made safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

MOST_LISTED = 6  # names in a line
SYNONYMS = {  # what other programs call it
    "auc": "auroc",
    "batch": "batch_size",
    "batchsize": "batch_size",
    "learning_rate": "lr",
    "local_epochs": "epochs",
    "num_rounds": "rounds",
    "seed": "seeds",
}


class UserError(Exception):
    """Something the user can put right.

    The message is one line: what is wrong, where, and what is allowed. The command line prints it without a traceback
    and exits with code 2; from Python it is an ordinary exception.
    """

    def __init__(self, message: object) -> None:
        super().__init__(printable(str(message)))


def printable(text: str) -> str:
    """The text with a space in place of every line break and control character."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def one_line(text: object, most: int = 200) -> str:
    """Text from a stranger, safe to show within a line: printable, no repeated spaces, at most ``most`` letters."""
    try:
        shown = str(text)[: 2 * most]
    except (ValueError, RecursionError):  # Python refuses to write numbers above 4,300 digits and deep nests
        shown = f"a {type(text).__name__} too long to show"
    return " ".join(printable(shown).split())[:most]


def listed(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
    return ", ".join(names[:MOST_LISTED]) + more


def flaw(error: Exception) -> str:
    """What is wrong with a file's contents, from the exception that reading them raised."""
    if isinstance(error, KeyError):
        return f"no entry {one_line(error)}"
    if isinstance(error, (TypeError, AttributeError)):  # their messages are about Python objects
        return "an entry is of another type"
    return one_line(error) or type(error).__name__


def nearest(name: object, allowed: Iterable[str], likeness: float = 0.7) -> str:
    """`` (did you mean 'gamma'?)`` for a mistyped name or another word for it, else an empty string."""
    spelled, typed = {one.lower(): one for one in allowed}, one_line(name, 60).lower()
    meant = SYNONYMS.get(typed.lstrip("-").replace("-", "_"))
    for one in spelled.values():
        if meant and one.lstrip("-") == meant.replace("_", "-" if one.startswith("-") else "_"):
            return f" (did you mean '{one}'?)"
    close = difflib.get_close_matches(typed, [*spelled], n=10, cutoff=likeness)
    close.sort(key=lambda one: sorted(one) != sorted(typed))  # first the same letters in another order: esat is east
    return f" (did you mean '{one_line(spelled[close[0]], 80)}'?)" if close and spelled[close[0]] != name else ""


def how_to_install(extra: str) -> str:
    """The command that installs an extra of this package, for users and for those who work in a clone of it."""
    return f"pip install 'fedc2i[{extra}]', or in a clone pip install -c constraints.txt -e '.[{extra}]'"
