"""Where in a user's own Python file an error came up."""

from __future__ import annotations

import re
import traceback
from collections.abc import Sequence
from pathlib import Path

from fedc2i.core.errors import UserError, one_line

_FRAME = re.compile(r'^ +File "(.+)", line ([0-9]+)(?:, in (.+))?\n(?: {4,}(.+))?', re.MULTILINE)
_NOT_FROZEN = "cannot inherit non-frozen dataclass"  # what dataclasses say


def located(error: BaseException, files: Sequence[str]) -> str:
    """Line, function and error, e.g. ``own.py:44, loss: KeyError: 'proto'``; without a line in the files, ours.

    The whole text is searched, as an exception of a worker process has its traceback in a note.
    """
    what = one_line(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}"
    if _NOT_FROZEN in what:
        what += "; write @dataclass(frozen=True)"
    frames = _FRAME.findall("".join(traceback.format_exception(error)))
    paths = {Path(file).resolve(): file for file in files}
    own = [(paths[path], *rest) for name, *rest in frames if (path := Path(name).resolve()) in paths]
    if own:
        file, line, function, _ = own[-1]
        return f"{file}:{line}{f', {function}' if function.isidentifier() else ''}: {what}"
    calls = [f" (at `{one_line(code)}`)" for *_, code in frames if code]
    return f"{files[0]}: {what}{''.join(calls[-1:])}"
