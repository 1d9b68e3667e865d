"""A finished run as a `Result` again, from its folder alone."""

from __future__ import annotations

import json
import zipfile
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.config import make, read_toml
from fedc2i.data.remote import RemoteFederation, blank_clients
from fedc2i.engine import Round
from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.plans import parse
from fedc2i.results import Result

_DAMAGED = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    RuntimeError,  # of an archive: compressed in another way, or with a password
    zipfile.BadZipFile,
    zlib.error,
)


def read_run(folder: Path) -> Result:
    """The run that lies in a folder; its data and models stay where they are.

    Raises:
        UserError: if it is not the folder of a finished run.
    """
    path = folder / "summary.json"
    if not path.is_file():
        raise UserError(f"{folder}: not the folder of a finished run; it has no summary.json")
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = read_toml(folder / "config.toml")
        kind, name, _ = parse(str(values["method"]))
        config = make(kind, {**values, "method": name})
        federation = RemoteFederation(
            summary["data"],
            blank_clients(summary["clients"], (3, 1, 1)),
            tuple(summary["classes"]),
            tuple(summary["notes"]),
            averages={name: tuple(own) for name, own in summary.get("averages", {}).items()},
            sizes={name: dict(own) for name, own in summary["samples"].items()},
            digests=dict(summary["data_checksums"]),
        )
        method = kind(**config.options)
        config = replace(config, options=asdict(method))  # a file has no word for none
        result = Result(method, config, federation, summary["title"], summary.get("key", kind.name))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error})") from None
    for seed in config.seeds:
        result.rounds += read_rounds(folder, federation.names, seed, complete=False)
    return result


def read_rounds(folder: Path, names: tuple[str, ...], seed: int, complete: bool = True) -> list[Round]:
    """A seed's rounds from its run folder; times and bytes are means over the run.

    Args:
        folder: the run's.
        names: its clients.
        seed: one of its seeds.
        complete: whether every client must have answered in the last round, as in a simulation.

    Raises:
        UserError: if a file is missing or damaged.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        metrics = _read_metrics(folder / "metrics.jsonl", names, seed)
        influence = _read_influence(folder / "influence.npz", seed)
        last = summary["rounds"] if complete else max(metrics)
        if complete and not all("accuracy" in own for point in POINTS for own in metrics[last][point]):
            raise ValueError("metrics.jsonl lacks clients of the last round")
        return [
            Round(
                seed,
                number,
                float(summary["seconds_per_round"]),
                (),
                metrics.get(number, {}),
                {name: array[number - 1] for name, array in influence.items()},
                (),
                int(summary["bytes_up_per_client_round"]),
                int(summary["bytes_down_per_client_round"]),
            )
            for number in range(1, last + 1)
        ]
    except _DAMAGED as error:
        raise UserError(f"{folder}: not a complete run ({error}); remove it and run again") from None


def _read_metrics(path: Path, names: tuple[str, ...], seed: int) -> dict[int, dict[Point, list[dict[str, float]]]]:
    rounds: dict[int, dict[Point, list[dict[str, float]]]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["seed"] != seed:
                continue
            points = rounds.setdefault(entry["round"], {point: [{} for _ in names] for point in POINTS})
            value = np.nan if entry["value"] is None else float(entry["value"])  # null: it was not finite
            points[entry["point"]][names.index(entry["client"])][entry["metric"]] = value
    return rounds


def _read_influence(path: Path, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as archive:
        prefix = f"seed{seed}_"
        return {name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)}
