"""Checkpoints: a run between two rounds as one flat mapping of tensors and plain values, in memory and on disk.

Every random draw is keyed by its purpose, so there are no generators to save. On disk tensors are safetensors, plain
values are JSON, with checksums of both in the JSON.

The JSON is written last and names the tensors' file, so a checkpoint is either complete or absent, even after a power
failure. The last two are kept: should the newest be damaged, the one before it still serves. Tensors of the same bits
are written once; the JSON has all names in their order, each with the name under which its tensor is stored.
`fedc2i.engine.checkpoint_check` checks that a checkpoint belongs to a run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, equal, uint8

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically, writing
from fedc2i.core.params import Params, prefixed, size_in_bytes
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.seed_run import SeedRun
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

State = tuple[Params, dict[str, Any]]
OnState = Callable[[int, Callable[[], State]], None]  # the round, and what returns the state after it
Layout = dict[str, list[Any]]  # by name the type of its numbers, then its shape

KEPT = 2
MOST_PINNED = 2**32  # bytes of a snapshot in pinned memory, which the system cannot use for anything else
_ALIGNED = 8  # bytes of the largest numbers
_KINDS = {
    getattr(torch, name): kind
    for kind, name in (
        *(("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16"), ("BOOL", "bool")),
        *(("I64", "int64"), ("I32", "int32"), ("I16", "int16"), ("I8", "int8"), ("U8", "uint8"), ("C64", "complex64")),
    )
}
_SAMPLE = 64  # bytes by which tensors are distinguished before all of them are compared


class Checkpoint(NamedTuple):
    """A run after a round."""

    round: int
    tensors: Params
    values: dict[str, Any]


class ResumePoint(NamedTuple):
    """Where an interrupted run continues: the state after ``round``, and every seed's last report so far."""

    round: int
    tensors: Params
    values: Mapping[str, Any]
    last: Mapping[int, Round]


def state_of(runs: Sequence[SeedRun], outcomes: Mapping[int, Outcome]) -> State:
    """The state of the seeds that continue, and of those that have ended."""
    tensors: Params = {}
    values: dict[str, Any] = {}
    for run in runs:
        own, own_values = run.state()
        tensors |= prefixed(f"seed{run.context.seed}/", own)
        values[str(run.context.seed)] = {**own_values, "layout": layout(own)}
    for seed, outcome in outcomes.items():
        tensors |= prefixed(f"seed{seed}/own/", outcome.trained) | prefixed(f"seed{seed}/received/", outcome.received)
        tensors |= {f"seed{seed}/logits/{point}": logits for point, logits in outcome.logits.items()}
        values[str(seed)] = {"ended": outcome.last.round}
    return tensors, values


def snapshot(state: State) -> tuple[State, Callable[[], None]]:
    """A copy in host memory that later rounds do not change, and a function that waits until the copy is complete.

    From a GPU it is copied into pinned memory behind what was launched so far, so the next round need not wait.
    """
    tensors, values = state
    copies: dict[tuple[Any, ...], Tensor] = {}
    for own in tensors.values():
        if (place := _place(own)) not in copies:
            copies[place] = _host_copy(own, size_in_bytes(tensors) < MOST_PINNED)
    wait = lambda: None  # noqa: E731
    if any(own.is_cuda for own in tensors.values()):
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        wait = copied.synchronize
    return ({name: copies[_place(own)] for name, own in tensors.items()}, values), wait


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same memory seen alike."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _host_copy(tensor: Tensor, pinned: bool) -> Tensor:
    own = tensor.detach()
    if not (own.is_cuda and pinned):
        return own.to("cpu", copy=True, memory_format=torch.contiguous_format)
    copy = torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
    return copy.copy_(own, non_blocking=True)


def last_rounds(values: Mapping[str, Any], round: int) -> dict[int, int]:
    """By seed the last round it finished, from the values of a state after ``round``."""
    return {int(seed): int(own.get("ended", round)) for seed, own in values.items()}


def state_size(
    method: Method, model: Model, federation: Federation, settings: EngineSettings, seeds: Sequence[int]
) -> int:
    """About how many bytes of tensors a state has.

    Every client's own model and what it received; where uploads are kept, its upload, taken for a model as well, unless
    all take part and send their own, which is written once. What only the server has is not counted, mostly one model,
    nor are the logits of seeds that have ended.
    """
    context, clients = RunContext(method, model, settings, settings.rounds, 0), len(federation.clients)
    some = settings.participants(clients)
    received = clients if settings.evaluate_every == 1 else some
    differ = settings.clip or settings.attack or some < clients
    uploads = clients if method.keeps_uploads and differ else 0
    own = context.first_model(federation.names[0], settings.init)  # with private parts, which are not sent
    sent = {name: own[name] for name in (*model.body_names, *model.head_names) if name in own}
    return len(seeds) * ((clients + received) * size_in_bytes(own) + uploads * size_in_bytes(sent))


def layout(tensors: Mapping[str, Tensor]) -> Layout:
    """Types and shapes in plain values."""
    return {name: [str(own.dtype).removeprefix("torch."), *own.shape] for name, own in tensors.items()}


# On disk; of no method and no engine.


def save(folder: Path, round: int, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
    """Writes the state after ``round``; all but this and the one before it are removed.

    A later one can only be there because it was damaged or of another run, and the run resumed from an earlier one.

    Raises:
        UserError: if it cannot be written; earlier ones are then untouched.
    """
    different, names = _without_twins(tensors)
    digest = hashlib.sha256()
    write_atomically(_path(folder, round, "safetensors"), _noted(pieces(different), digest.update), durable=True)
    described = {"round": round, "sha256": digest.hexdigest(), "names": names, "values": dict(values)}
    text = json.dumps({**described, "checksum": _sha256(json.dumps(described).encode())})
    write_atomically(_path(folder, round, "json"), text.encode(), durable=True)
    rounds = sorted(_rounds(folder))
    kept = [number for number in rounds if number <= round][-KEPT:]
    for number in (number for number in rounds if number not in kept):
        for kind in ("json", "safetensors"):
            with writing(folder):
                _path(folder, number, kind).unlink(missing_ok=True)


def pieces(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A file of safetensors piece by piece, without a copy of tensors that are contiguous on a CPU.

    Its header states each tensor's type, shape and place; large numbers come first, so that all are aligned.
    """
    order = sorted(tensors.items(), key=lambda own: (-own[1].element_size(), own[0]))
    header, end = dict[str, Any](), 0
    for name, own in order:
        header[name] = {"dtype": _KINDS[own.dtype], "shape": [*own.shape], "data_offsets": [end, end + own.nbytes]}
        end += own.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNED)
    yield len(text).to_bytes(_ALIGNED, "little") + text
    for _, own in order:
        yield _bits(own).numpy().data


def to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """As safetensors."""
    return b"".join(pieces(tensors))


def _noted(pieces: Iterator[bytes | memoryview], note: Callable[[bytes | memoryview], object]) -> Iterator[Any]:
    """The pieces, each noted before it is passed on."""
    for piece in pieces:
        note(piece)
        yield piece


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(uint8)


def _without_twins(tensors: Mapping[str, Tensor]) -> tuple[Params, dict[str, str]]:
    """The tensors without those that equal an earlier one, and for every name, in order, the name it is kept under."""
    different: Params = {}
    names: dict[str, str] = {}
    alike: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        own = tensor.detach().cpu().contiguous()
        bits = _bits(own)  # 0 and -0 are not the same, and a nan is the same as itself
        others = alike.setdefault((own.dtype, own.shape, bytes(bits[:_SAMPLE].numpy())), [])
        same = (other for other in others if equal(_bits(different[other]), bits))
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
