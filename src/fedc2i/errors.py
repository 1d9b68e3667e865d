"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can put right.

    The message is one line that says what is wrong, where, and what is allowed. The command line prints it
    without a traceback and exits with code 2; from Python it is an ordinary exception.
    """
