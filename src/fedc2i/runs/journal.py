"""Reports of finished rounds, a file each: what a resumed run knows of the rounds before its checkpoint.

Beside them, in a run with noise over real sites, a mark for every round whose uploads were asked for.
"""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import write_atomically
from fedc2i.data import npz
from fedc2i.engine.records import Round

_DAMAGED = (ValueError, KeyError, TypeError, RecursionError, UserError)
_DIGITS = 32  # of a course's digest
_MARK = re.compile(r"asked[0-9]{6}-[0-9a-f]{0,32}")
_PLAIN = ("seed", "round", "seconds", "participants", "metrics", "refused", "bytes_up", "bytes_down", "why")


def write(folder: Path, report: Round) -> None:
    """Writes a round's report, in place of an earlier one of the same round."""
    plain = json.dumps({**{name: getattr(report, name) for name in _PLAIN}, "influence": list(report.influence)})
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {f"influence/{name}": array for name, array in report.influence.items()}
    np.savez_compressed(buffer, plain=np.frombuffer(plain.encode(), dtype=np.uint8), **arrays)
    write_atomically(_path(folder, report.round), buffer.getvalue(), durable=True)


def read(folder: Path, before: int) -> list[Round]:
    """The reports of all rounds before ``before``.

    Raises:
        UserError: if one is missing or damaged.
    """
    return [_read(_path(folder, number)) for number in range(1, before)]


def _read(path: Path) -> Round:
    try:
        with npz.opened(path, ratio=None) as archive:
            plain = json.loads(archive.read(["plain"])["plain"].tobytes())
            plain |= {name: tuple(plain[name]) for name in ("participants", "refused")}
            plain["why"] = dict(plain.get("why", {}))  # an earlier version wrote none
            names = {name: f"influence/{name}" for name in plain["influence"]}
            arrays = archive.read(names.values())
        return Round(**plain | {"influence": {name: arrays[where] for name, where in names.items()}})
    except _DAMAGED as error:
        raise UserError(f"{path}: not a round's report ({one_line(error)})") from None


def ask(folder: Path, round: int, course: str) -> bool:
    """Notes, before they are asked for, that a round's uploads are released on this course of the run.

    Returns:
        Whether they were released on another course before: then this is one release more.
    """
    mark = folder / f"asked{round:06d}-{course[:_DIGITS]}"
    if mark.is_file():
        return False
    write_atomically(mark, b"", durable=True)
    return asked(folder)[round] > 1


def asked(folder: Path) -> Counter[int]:
    """By round, on how many courses its uploads were asked for."""
    return Counter(int(name[5:11]) for path in folder.glob("asked*") if _MARK.fullmatch(name := path.name))


def _path(folder: Path, round: int) -> Path:
    return folder / f"round{round:06d}.npz"


def read_report(path: Path) -> Round:
    """One file that `write` made.

    Raises:
        UserError: if it is gone or damaged.
    """
    try:
        return _read(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None
