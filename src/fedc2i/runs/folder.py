"""The run folder: everything a run leaves behind, written so that a file is either whole or absent.

config.toml        the settings, complete; ``fedc2i run --config`` repeats the run
metrics.jsonl      one line per seed, round, client, point and metric, appended after every round
influence.npz      λ and Λ (and their losses) of every round and seed
models/            every client's last model at both points, safetensors
*.png              figures
summary.json       scores, cost, versions, data checksums; written last, so its presence means the run is complete
checkpoints/, rounds/   until then: what an interrupted run needs to resume, see `fedc2i.runs.checkpoint`
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from fedc2i.core.errors import UserError
from fedc2i.core.files import sync, to_json, write_atomically, writing
from fedc2i.core.params import Params, Stacked
from fedc2i.engine.records import POINTS, Outcome, Point, Round
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings
from fedc2i.runs.summary import summary

MOST_LETTERS = 100  # of a folder's name that is made from a data set's path


class RunFolder:
    """Writes one run's files into its folder."""

    def __init__(self, path: Path, clients: tuple[str, ...]) -> None:
        self.path = path
        self._clients = clients

    def begin(self, config: RunSettings) -> None:
        """Writes the configuration."""
        self.write("config.toml", config.to_toml().encode(), durable=True)

    def restart(self, reports: Sequence[Round]) -> None:
        """Rewrites the metrics with reports of rounds that were finished before the run was interrupted."""
        self.write("metrics.jsonl", "".join(self._lines(report) for report in reports).encode())

    def record(self, report: Round) -> None:
        """Appends a round's metrics."""
        path = self.path / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(self._lines(report))

    def _lines(self, report: Round) -> str:
        return "".join(
            json.dumps(
                {
                    "seed": report.seed,
                    "round": report.round,
                    "client": client,
                    "point": point,
                    "metric": metric,
                    "value": round(value, 6) if np.isfinite(value) else None,
                },
                ensure_ascii=False,
            )
            + "\n"
            for point, metrics in report.metrics.items()
            for client, own in zip(self._clients, metrics, strict=True)
            for metric, value in own.items()
        )

    def _save_models(self, seed: int, outcome: Outcome) -> None:
        for point in POINTS:
            tensors = {
                f"{client}/{name}": rows[k].detach().cpu().contiguous()
                for name, rows in _models(outcome, point).items()
                for k, client in enumerate(self._clients)
            }
            self.write(f"models/seed{seed}-{point}.safetensors", save(tensors), durable=True)

    def finish(self, result: Result) -> None:
        """Writes every client's last model at both points, influence and, last of all, the summary.

        All of it is on the disk when this returns: what a run could resume from may then be removed.
        """
        for seed, outcome in result.outcomes.items():
            self._save_models(seed, outcome)
        names = sorted({name for report in result.rounds for name in report.influence})
        measured = {
            f"seed{seed}_{name}": array
            for seed in result.config.seeds
            for name in names
            if (array := result.influence(name, seed)).size
        }
        if measured:
            buffer = io.BytesIO()
            np.savez_compressed(buffer, clients=np.array(self._clients), **measured)  # type: ignore[arg-type]
            self.write("influence.npz", buffer.getvalue(), durable=True)
        metrics = self.path / "metrics.jsonl"
        with writing(metrics):
            if metrics.exists():
                sync(metrics)
        self.write("summary.json", to_json(summary(result)).encode(), durable=True)

    def write(self, name: str, content: bytes, durable: bool = False) -> None:
        """Writes a file beside its place, then moves it there."""
        write_atomically(self.path / name, content, durable)


def _models(outcome: Outcome, point: Point) -> Stacked:
    return outcome.trained if point == "trained" else outcome.received


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
            if not out.exists():
                try:
                    out.mkdir(parents=True)
                except FileExistsError:
                    raise UserError(f"{out}: another run has just taken it; choose another --out") from None
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


def slug(text: str) -> str:
    """A name that is safe as a folder everywhere."""
    return re.sub(r"[^a-z0-9.=]+", "-", text.lower()).strip("-.") or "run"


def read_model(folder: Path | str, client: str, seed: int = 0, point: Point = "trained") -> Params:
    """A client's last model from a run folder, ready for ``module.load_state_dict``.

    Raises:
        UserError: if there is no such run, seed or client.
    """
    path = Path(folder) / "models" / f"seed{seed}-{point}.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: no such file; is this a complete run folder, and was seed {seed} part of the run?")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    by_client: dict[str, Params] = {}
    for name, tensor in tensors.items():
        owner, _, own_name = name.rpartition("/")
        by_client.setdefault(owner, {})[own_name] = tensor
    if client not in by_client:
        raise UserError(f"{path}: no client '{client}', allowed are {', '.join(sorted(by_client))}")
    return by_client[client]
