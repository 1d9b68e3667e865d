"""A run's state on disk: tensors as safetensors, plain values as JSON, with checksums of both in the JSON.

The JSON is written last and names the tensors' file, so a checkpoint is either complete or absent, even after a power
failure. The last two are kept: should the newest be damaged, the one before it still serves. Tensors of the same bits
are written once; the JSON has all names in their order, each with the name under which its tensor is stored. It knows
no method and no engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, contiguous_format, equal, uint8

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically, writing
from fedc2i.core.params import Params

KEPT = 2
_SAMPLE = 64  # bytes by which tensors are distinguished before all of them are compared


class Checkpoint(NamedTuple):
    """A run after a round."""

    round: int
    tensors: Params
    values: dict[str, Any]


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Writes the state after ``round``; all but this and the one before it are removed.

    A later one can only be there because it was damaged or of another run, and the run resumed from an earlier one.

    Raises:
        UserError: if it cannot be written; earlier ones are then untouched.
    """
    different, names = _without_twins(tensors)
    content = to_bytes(different)
    described = {"round": round, "sha256": _sha256(content), "names": names, "values": dict(values)}
    text = json.dumps({**described, "checksum": _sha256(json.dumps(described).encode())})
    write_atomically(_path(folder, round, "safetensors"), content, durable=True)
    write_atomically(_path(folder, round, "json"), text.encode(), durable=True)
    rounds = sorted(_rounds(folder))
    kept = [number for number in rounds if number <= round][-KEPT:]
    for number in (number for number in rounds if number not in kept):
        for kind in ("json", "safetensors"):
            with writing(folder):
                _path(folder, number, kind).unlink(missing_ok=True)


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """As safetensors, which takes no two tensors that share memory; so each is copied."""
    return save_tensors(
        {name: own.detach().cpu().clone(memory_format=contiguous_format) for name, own in tensors.items()}
    )


def _without_twins(tensors: Mapping[str, Tensor]) -> tuple[Params, dict[str, str]]:
    """The tensors without those that equal an earlier one, and for every name, in order, the name it is kept under."""
    different: Params = {}
    names: dict[str, str] = {}
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        bits = own.reshape(-1).view(uint8)  # by bits: 0 and -0 are not the same, and a nan is the same as itself
        others = alike.setdefault((own.dtype, own.shape, bytes(bits[:_SAMPLE].numpy())), [])
        same = (other for other in others if equal(different[other].reshape(-1).view(uint8), bits))
        names[name] = next(same, name)
        if names[name] == name:
            different[name] = own
            others.append(name)
    return different, names


def load(folder: Path) -> Checkpoint | None:
    """The latest sound checkpoint, or none if there never was one.

    Raises:
        UserError: if there are some, and all are damaged.
    """
    latest = next(sound(folder), None)
    found = sorted(_rounds(folder), reverse=True)
    if found and latest is None:
        raise UserError(f"{folder}: all checkpoints are damaged (rounds {', '.join(map(str, found))})")
    return latest


def sound(folder: Path) -> Iterator[Checkpoint]:
    """Every checkpoint that is whole, the latest first; names of the same bits are of one tensor.

    Raises:
        UserError: if one does not fit into memory.
    """
    for number in sorted(_rounds(folder), reverse=True):
        try:
            paths = _path(folder, number, "json"), _path(folder, number, "safetensors")
            for path in paths:
                memory.require(path, path.stat().st_size, "its contents", copies=2)
            described = json.loads(paths[0].read_text(encoding="utf-8"))
            content = paths[1].read_bytes()
            checksum = described.pop("checksum")
            if _sha256(content) != described["sha256"] or _sha256(json.dumps(described).encode()) != checksum:
                continue
            if described["round"] != number:
                continue
            kept = load_tensors(content)
            tensors = {name: kept[where] for name, where in described["names"].items()}
            values = dict(described["values"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError):
            continue
        yield Checkpoint(number, tensors, values)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _rounds(folder: Path) -> list[int]:
    found = [path.stem.removeprefix("round") for path in folder.glob("round[0-9]*.json")]
    return [int(number) for number in found if number.isdecimal()]


def _path(folder: Path, round: int, kind: str) -> Path:
    return folder / f"round{round:06d}.{kind}"
