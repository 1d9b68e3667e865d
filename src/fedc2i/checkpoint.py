"""A run's state on disk: tensors as safetensors, plain values as JSON with the checksum of the tensors beside them.

The JSON is written last and names what it belongs to, so a checkpoint is either whole or not there. The last two are
kept: should the newest be damaged, the one before it still serves. It knows no method and no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, contiguous_format

from fedc2i.errors import UserError
from fedc2i.params import Params
from fedc2i.runs import write_atomically

KEPT = 2


class Checkpoint(NamedTuple):
    """A run after a round."""

    round: int
    tensors: Params
    values: dict[str, Any]


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Writes the state after ``round``; older ones than the last two are removed.

    Raises:
        UserError: if it cannot be written; earlier ones are then untouched.
    """
    content = to_bytes(tensors)
    described = {"round": round, "sha256": hashlib.sha256(content).hexdigest(), "values": dict(values)}
    write_atomically(_path(folder, round, "safetensors"), content)
    write_atomically(_path(folder, round, "json"), json.dumps(described).encode())
    for number in sorted(_rounds(folder))[:-KEPT]:
        for kind in ("json", "safetensors"):
            _path(folder, number, kind).unlink(missing_ok=True)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """As safetensors, which takes no tensor twice; so each is copied."""
    return save_tensors(
        {name: own.detach().cpu().clone(memory_format=contiguous_format) for name, own in tensors.items()}
    )


def load(folder: Path) -> Checkpoint | None:
    """The latest sound checkpoint, or none if there never was one.

    Raises:
        UserError: if there are some, and all are damaged.
    """
    found = sorted(_rounds(folder), reverse=True)
    for number in found:
        try:
            described = json.loads(_path(folder, number, "json").read_text(encoding="utf-8"))
            content = _path(folder, number, "safetensors").read_bytes()
            if hashlib.sha256(content).hexdigest() == described["sha256"] and described["round"] == number:
                return Checkpoint(number, load_tensors(content), dict(described["values"]))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError):
            continue
    if found:
        raise UserError(f"{folder}: all checkpoints are damaged (rounds {', '.join(map(str, found))})")
    return None


def _rounds(folder: Path) -> list[int]:
    found = [path.stem.removeprefix("round") for path in folder.glob("round[0-9]*.json")]
    return [int(number) for number in found if number.isdecimal()]


def _path(folder: Path, round: int, kind: str) -> Path:
    return folder / f"round{round:06d}.{kind}"
