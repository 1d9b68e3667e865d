"""Reports of finished rounds, a file each: what a resumed run knows of the rounds before its checkpoint."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.data import npz
from fedc2i.engine.rounds import Round
from fedc2i.errors import UserError, one_line
from fedc2i.runs import write_atomically

_DAMAGED = (ValueError, KeyError, TypeError, RecursionError, UserError)
_PLAIN = ("seed", "round", "seconds", "participants", "metrics", "refused", "bytes_up", "bytes_down")


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
            names = {name: f"influence/{name}" for name in plain["influence"]}
            arrays = archive.read(names.values())
        return Round(**plain | {"influence": {name: arrays[where] for name, where in names.items()}})
    except _DAMAGED as error:
        raise UserError(f"{path}: not a round's report ({one_line(error)})") from None


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
