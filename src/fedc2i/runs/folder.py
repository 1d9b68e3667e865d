"""The run folder: everything a run leaves behind, written so that a file is either whole or absent.

config.toml        the settings, complete; ``fedc2i run --config`` repeats the run
metrics.jsonl      one line per seed, round, client, point and metric, appended within moments after every round
predictions.npz    log-probabilities of every test sample by the last models at both points, and labels
influence.npz      λ and Λ (and their losses) of every round and seed
models/            every client's last model at both points, safetensors
encoding.json, split.json   of a table: how each client's rows were encoded and split
scaling.json       of other inputs but images: means and deviations by which each client's were standardised
*.png              figures
summary.json       scores, cost, versions, data checksums; written last, so its presence means the run is complete

Until then there is also what an interrupted run needs to resume:

checkpoints/fingerprint.json      what it was started with: settings, data, versions, device
checkpoints/round*                the last two checkpoints: the state of all seeds after a round
rounds/seed*/round*.npz           the reports of finished rounds
rounds/seed*/asked*               in a run with noise over real sites, the rounds whose uploads were asked for

A round's reports are written before its checkpoint (`fedc2i.runs.writer`). So a checkpoint's reports are always there,
and what was written after it is computed again.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_locked, locked, sync, to_json, write_atomically, writing
from fedc2i.data import scaling
from fedc2i.engine.checkpoint import pieces
from fedc2i.engine.records import LARGE, POINTS, Round
from fedc2i.runs.results import Result, summary
from fedc2i.runs.settings import RunSettings

if TYPE_CHECKING:
    from fedc2i.data import npz

SUMMARY = "summary.json"
PREDICTIONS = "predictions.npz"
MOST_LETTERS = 100  # of a folder's name that is made from a data set's path
MOST_PLAIN = 2**26  # bytes of a report without its arrays
_PLAIN = ("seed", "round", "seconds", "participants", "metrics", "refused", "bytes_up", "bytes_down", "why")
_DIGITS = 32  # of a course's digest
_MARK = re.compile(r"asked[0-9]{6}-[0-9a-f]{0,32}")


def slug(text: str) -> str:
    """A name that is safe as a folder everywhere."""
    return re.sub(r"[^a-z0-9.=]+", "-", text.lower()).strip("-.") or "run"


def new_folder(out: Path | None, stem: str = "run") -> Path:
    """Makes the folder of a run: ``out``, or the first free ``runs/<stem>-<number>``.

    Raises:
        UserError: if ``out`` exists and is not an empty folder, or cannot be made.
    """
    if out is not None:
        with writing(out):
            if out.exists() and (not out.is_dir() or any(out.iterdir())):
                hint = f"; `fedc2i resume {out}` resumes the run in it" if (out / "checkpoints").is_dir() else ""
                raise UserError(f"{out}: exists already; choose another --out or remove it{hint}")
            out.mkdir(parents=True, exist_ok=True)  # taken by another run this very moment: the lock decides
            if not os.access(out, os.W_OK | os.X_OK):
                raise UserError(f"{out}: no permission to write there")
        return out
    parent, number, stem = Path("runs"), 1, stem[:MOST_LETTERS]
    with writing(parent):
        parent.mkdir(exist_ok=True)
        while True:
            try:
                folder = parent / f"{stem}-{number:03d}"
                folder.mkdir()
                return folder
            except FileExistsError:  # taken, perhaps this very moment by a run beside this one
                number += 1


@contextmanager
def started(folder: Path | None) -> Iterator[None]:
    """Around a new run or comparison: removes its folder after an error before any round was finished."""
    try:
        yield
    except Exception:
        if folder is not None and not is_taken(folder) and not _has_rounds(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _has_rounds(folder: Path) -> bool:
    """Whether any run in it has finished a round."""
    return any(file.stat().st_size for file in folder.rglob("metrics.jsonl"))


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Around a new run or comparison: locks its folder, unless another one took it since `new_folder`."""
    with locked(folder):
        if any(folder.iterdir()):
            raise UserError(f"{folder}: exists already; choose another --out or remove it")
        yield


def is_taken(folder: Path) -> bool:
    """Whether another process works in a folder, where that can be found out."""
    return os.name == "posix" and folder.exists() and is_locked(folder)


class RunFolder:
    """Writes one run's files into its folder."""

    def __init__(self, path: Path, clients: tuple[str, ...]) -> None:
        self.path = path
        self._clients = clients
        self._names = [_quoted(name) for name in clients]

    def begin(self, config: RunSettings) -> None:
        """Writes the configuration."""
        write_atomically(self.path / "config.toml", config.to_toml().encode(), durable=True)

    def restart(self, reports: Sequence[Round]) -> None:
        """Rewrites the metrics with reports of rounds that were finished before the run was interrupted."""
        write_atomically(self.path / "metrics.jsonl", "".join(self._lines(report) for report in reports).encode())

    def record(self, report: Round) -> None:
        """Appends a round's metrics."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(self._lines(report))

    def _lines(self, report: Round) -> str:
        """Objects of JSON, put together by hand: of a thousand clients they would take a tenth of a round."""
        start = f'{{"seed": {report.seed}, "round": {report.round}, "client": '
        return "".join(
            f'{start}{client}, "point": "{point}", "metric": {_quoted(metric)}, '
            f'"value": {round(value, 6) if isfinite(value) else "null"}}}\n'
            for point, metrics in report.metrics.items()
            for client, own in zip(self._names, metrics, strict=True)
            for metric, value in own.items()
        )

    def finish(self, result: Result) -> None:
        """Writes every client's last model at both points, influence and, last of all, the summary.

        All of it is on the disk when this returns: what a run could resume from may then be removed.
        """
        attached = {**result.federation.attachments, **scaling.attachment(result.federation.clients)}
        for name, text in attached.items():
            write_atomically(self.path / name, text.encode(), durable=True)
        for seed, outcome in result.outcomes.items():
            for point in POINTS:
                models = outcome.trained if point == "trained" else outcome.received
                tensors = {
                    f"{client}/{name}": own
                    for name, rows in models.items()
                    for client, own in zip(self._clients, rows, strict=True)
                }
                path = self.path / "models" / f"seed{seed}-{point}.safetensors"
                write_atomically(path, pieces(tensors), durable=True)  # each comes from the device when it is written
        measured: dict[str, Any] = {
            f"seed{seed}_{name}": array
            for seed in result.config.seeds
            for name in sorted({name for report in result.rounds for name in report.influence})
            if (array := result.influence(name, seed)).size
        }
        if measured:
            content = _packed(clients=np.array(self._clients), **measured)
            write_atomically(self.path / "influence.npz", content, durable=True)
        if result.predictions is not None:
            own = result.predictions
            logs: dict[str, Any] = {f"seed{seed}_{point}": array for (seed, point), array in own.logs.items()}
            buffer = io.BytesIO()  # not compressed: that takes longer than the models to save a tenth of the bytes
            np.savez(buffer, labels=own.labels, samples=np.array(own.samples), **logs)
            write_atomically(self.path / PREDICTIONS, buffer.getvalue(), durable=True)
        metrics = self.path / "metrics.jsonl"
        with writing(metrics):
            if metrics.exists():
                sync(metrics)
        write_atomically(self.path / SUMMARY, to_json(summary(result)).encode(), durable=True)


def reports_folder(folder: Path, seed: int) -> Path:
    """Where an unfinished run has the reports of a seed's rounds."""
    return folder / "rounds" / f"seed{seed}"


def write_report(folder: Path, report: Round, durable: bool = True) -> Path:
    """Writes a round's report, in place of an earlier one of the same round; returns its file."""
    plain = json.dumps({**{name: getattr(report, name) for name in _PLAIN}, "influence": list(report.influence)})
    arrays: dict[str, Any] = {f"influence/{name}": array for name, array in report.influence.items()}
    content = _packed(plain=np.frombuffer(plain.encode(), dtype=np.uint8), **arrays)
    path = folder / f"round{report.round:06d}.npz"
    write_atomically(path, content, durable)
    return path


def read_reports(folder: Path, before: int) -> list[Round]:
    """The reports of all rounds before ``before``; a `UserError` if one is missing or damaged."""
    return [read_report(folder / f"round{number:06d}.npz") for number in range(1, before)]


def read_report(path: Path) -> Round:
    """What `write_report` wrote; a `UserError` if the file is missing or damaged."""

    from fedc2i.data import npz

    try:
        with npz.opened(path, ratio=None) as archive:
            if archive.declared("plain").nbytes > MOST_PLAIN:
                raise ValueError("a report without its arrays is far smaller")
            plain = json.loads(archive.read(["plain"])["plain"].tobytes())
            plain |= {name: tuple(plain[name]) for name in ("participants", "refused")}
            plain["why"] = dict(plain.get("why", {}))  # an earlier version wrote none
            names = {name: f"influence/{name}" for name in plain["influence"]}
            clients = max(map(len, plain["metrics"].values()), default=0)
            for where in names.values():
                check_diagnostics(archive.declared(where), clients)
            arrays = archive.read(names.values())
        return Round(**plain | {"influence": {name: arrays[where] for name, where in names.items()}})
    except (ValueError, KeyError, TypeError, RecursionError, UserError) as error:
        raise UserError(f"{path}: not a round's report ({one_line(error)})") from None


def check_diagnostics(array: npz.Declared, clients: int, classes: int = 1, rounds: int | None = None) -> None:
    """Raises a `ValueError` if an array cannot be a diagnostic of a given number of clients.

    ``rounds`` is how many the run may have, if the first axis is over rounds; ``clients`` is 0 if it is not known. A
    user's own method may measure anything, so the other axes are free: up to 16 MB, up to a value for each pair of
    clients and class, or as far as the array does not unpack to far more than the file has.
    """
    shape = array.shape if rounds is None else array.shape[1:]
    count = 1 if rounds is None else (array.shape or (0,))[0]
    if (rounds is not None and count > rounds) or (clients and shape[:1] != (clients,)):
        raise ValueError(f"diagnostics of shape {array.shape}, in a run of {clients} clients")
    is_kept = count <= 1 or array.nbytes <= count * LARGE  # a larger one is kept of the last round only
    usual = max(LARGE, 8 * count * clients * clients * classes)
    if not is_kept or (array.nbytes > usual and array.is_packed_tight):
        raise ValueError(f"diagnostics of shape {array.shape}, {array.nbytes:,} bytes")


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


@cache
def _quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _packed(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()
