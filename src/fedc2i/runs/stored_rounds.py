"""The rounds of a finished run, read from its folder.

The folder may come from a stranger. What its files declare is compared with its settings and its clients before memory
is taken for it, and nothing in it is executed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.data import npz
from fedc2i.engine.records import LARGE, POINTS, Metrics, Point, Round
from fedc2i.runs.folder import SUMMARY, check_diagnostics

MOST_BYTES = 2**28  # of summary.json and of a line of metrics.jsonl; ten thousand clients need some ten million
MOST_ROUNDS = 2**18  # of all seeds together; each takes half a kilobyte
MOST_SCORED = 2**24  # clients times scored rounds of all seeds
DAMAGED = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError),
    ArithmeticError,  # of JSON's Infinity
)
Scored = dict[int, dict[Point, Metrics]]  # by round


@dataclass(frozen=True)
class Extent:
    """What a run's settings and clients allow its files to hold."""

    clients: tuple[str, ...]
    classes: int
    rounds: int


def read_rounds(folder: Path, extent: Extent, seeds: Sequence[int], complete: bool = True) -> dict[int, list[Round]]:
    """The rounds of each seed from a run folder; times and bytes are means over the run.

    With ``complete`` every client must have answered in the last round, as in a simulation.

    Raises:
        UserError: if a file is missing or damaged, or declares more than the run has.
    """
    try:
        if len(seeds) * extent.rounds > MOST_ROUNDS:
            raise ValueError(f"{len(seeds)} seeds of {extent.rounds:,} rounds, allowed are {MOST_ROUNDS:,} in all")
        summary, metrics = read_summary(folder), _read_metrics(folder / "metrics.jsonl", extent, seeds)
        return {seed: _rounds(folder, summary, metrics[seed], extent, seed, complete) for seed in seeds}
    except (*DAMAGED, UserError) as error:
        raise UserError(f"{folder}: not a complete run ({flaw(error)}); remove it and run again") from None


def _rounds(
    folder: Path, summary: Mapping[str, Any], metrics: Scored, extent: Extent, seed: int, complete: bool
) -> list[Round]:
    influence = _read_influence(folder / "influence.npz", extent, seed)
    refused = _read_refused(summary["refused"], extent.clients, seed)
    if not metrics and _has_scores(summary):
        raise ValueError(f"metrics.jsonl lacks seed {seed}")
    if not complete and not metrics:  # real sites need not send scores
        metrics = {extent.rounds: {point: [{} for _ in extent.clients] for point in POINTS}}
    last = summary["rounds"] if complete else max(metrics)
    if complete and not all("accuracy" in own for point in POINTS for own in metrics[last][point]):
        raise ValueError("metrics.jsonl lacks clients of the last round")
    if any(len(array) < (1 if array[:1].nbytes > LARGE else last) for array in influence.values()):
        raise ValueError("influence.npz lacks rounds")
    means = {
        "seconds": float(summary["seconds_per_round"]),
        "bytes_up": int(summary["bytes_up_per_client_round"]),
        "bytes_down": int(summary["bytes_down_per_client_round"]),
    }
    rounds = []
    for number in range(1, last + 1):
        # Of a diagnostic too large to keep of every round, only the last rounds are there.
        later = {name: number - 1 - max(0, last - len(array)) for name, array in influence.items()}
        measured = {name: influence[name][k] for name, k in later.items() if k >= 0}
        own = {"participants": (), "refused": (), **refused.get(number, {}), **means}
        rounds.append(Round(seed, number, metrics=metrics.get(number, {}), influence=measured, **own))
    return rounds


def _has_scores(summary: Mapping[str, Any]) -> bool:
    """Whether any score is known of all seeds."""
    by_metric = (scores for point in POINTS for scores in summary["points"][point].values())
    return any(score["mean"] is not None for scores in by_metric for score in scores.values())


def _read_metrics(path: Path, extent: Extent, seeds: Sequence[int]) -> dict[int, Scored]:
    if path.exists() and not path.is_file():  # a pipe would never end
        raise ValueError(f"{path.name} is not a file")
    found: dict[int, Scored] = {seed: {} for seed in seeds}
    index = {name: k for k, name in enumerate(extent.clients)}
    none: dict[str, float] = {}  # of a client without scores
    scored = 0
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_BYTES), ""), 1):
            try:
                entry = json.loads(line)
                if (rounds := found.get(entry["seed"])) is None:
                    continue
                if type(entry["round"]) is not int or not 1 <= entry["round"] <= extent.rounds:
                    raise ValueError(f"a round {one_line(entry['round'])} of {extent.rounds}")
                if entry["client"] not in index or entry["point"] not in POINTS:
                    raise ValueError(f"no client or point '{one_line(entry['client'])}', '{one_line(entry['point'])}'")
                if entry["round"] not in rounds:
                    if (scored := scored + len(index)) > MOST_SCORED:
                        raise ValueError(f"more than {MOST_SCORED:,} scores of clients in rounds")
                    rounds[entry["round"]] = {point: [none] * len(index) for point in POINTS}
                own, k = rounds[entry["round"]][entry["point"]], index[entry["client"]]
                value = np.nan if entry["value"] is None else float(entry["value"])  # null: it was not finite
                own[k] = {**own[k], text_of(entry["metric"]): value}
            except DAMAGED as error:
                raise ValueError(f"{path.name}, line {number}: {flaw(error)}") from None
    return found


def _read_refused(entries: Any, names: tuple[str, ...], seed: int) -> dict[int, dict[str, Any]]:
    """By round: whose uploads were rejected, what was wrong, and who took part if nobody else did.

    An earlier version wrote neither how many took part nor reasons.
    """
    found = {}
    for entry in entries:
        clients = texts_of(entry["clients"])
        why = {text_of(name): text_of(reason) for name, reason in dict(entry.get("why", {})).items()}
        if not {*clients, *why} <= set(names):
            raise ValueError("uploads of clients that are not there")
        if entry["seed"] == seed:
            all_of_them = clients if entry.get("of") == len(clients) else ()
            found[int(entry["round"])] = {"refused": clients, "participants": all_of_them, "why": why}
    return found


def _read_influence(path: Path, extent: Extent, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        return {}
    with npz.opened(path, ratio=None) as archive:
        prefix = f"seed{seed}_"
        own = [name for name in archive.names if name.startswith(prefix)]
        for name in own:
            check_diagnostics(archive.declared(name), len(extent.clients), extent.classes, extent.rounds)
        return {name.removeprefix(prefix): array for name, array in archive.read(own).items()}


def read_summary(folder: Path) -> dict[str, Any]:
    """The content of ``summary.json``."""
    with (folder / SUMMARY).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"summary.json has more than {MOST_BYTES:,} bytes")
    summary = json.loads(content.decode("utf-8"))
    if not isinstance(summary, dict):
        raise ValueError("summary.json is not a table")
    return summary


def text_of(value: Any) -> str:
    """A value that must be text."""
    if not isinstance(value, str):
        raise ValueError(f"text is expected, got {one_line(value)}")
    return value


def texts_of(value: Any) -> tuple[str, ...]:
    """A value that must be a list of texts."""
    if not isinstance(value, list):
        raise ValueError(f"a list of texts is expected, got {one_line(value)}")
    return tuple(map(text_of, value))
