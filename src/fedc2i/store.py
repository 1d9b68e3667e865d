"""Runs that are computed once: a folder for each method, setting, seed and data, found again by what decided it."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedc2i.engine import Round
from fedc2i.engine.inprocess import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.plans import Observer, Plan
from fedc2i.results import Result, versions
from fedc2i.runs import slug, writing

_NOT_NUMBERS = ("data_dir", "device", "seeds")  # settings that do not decide a single seed's numbers by themselves


class Store:
    """A folder of single-seed runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, plan: Plan, seed: int) -> Path:
        """Where a plan's run with this seed lies, or will."""
        return self.root / f"{slug(plan.config.data)}-{slug(plan.key)}-seed{seed}-{self._key(plan)}"

    def _key(self, plan: Plan) -> str:
        """Twelve digits that change with settings, data, device and version."""
        settings = {name: value for name, value in asdict(plan.config).items() if name not in _NOT_NUMBERS}
        decided = {
            "settings": settings,
            "data": plan.federation.checksums(),
            "device": plan.config.torch_device().type,
            "version": versions()["fedc2i"],
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def missing(self, plan: Plan) -> list[int]:
        """The seeds that are still to be computed."""
        return [seed for seed in plan.config.seeds if not (self.folder(plan, seed) / "summary.json").is_file()]

    def compute(self, plan: Plan, observer: Observer | None = None) -> Result:
        """The plan's result over all its seeds: what is there is read, what is missing is run first.

        A run that was cut off has no summary; it is run again from its start.
        """
        for seed in self.missing(plan):
            folder = self.folder(plan, seed)
            with writing(folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            replace(plan, config=replace(plan.config, seeds=(seed,))).execute(folder, observer)
        result = Result(plan.method, plan.config, plan.federation, plan.label, plan.key)
        for seed in plan.config.seeds:
            result.rounds += read_rounds(self.folder(plan, seed), plan, seed)
        return result


def read_rounds(folder: Path, plan: Plan, seed: int) -> list[Round]:
    """A seed's rounds from its run folder; times are means over the run.

    Raises:
        UserError: if a file is missing or damaged.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        metrics = _read_metrics(folder / "metrics.jsonl", plan.federation.names)
        influence = _read_influence(folder / "influence.npz", seed)
        return [
            Round(
                seed,
                number,
                summary["seconds_per_round"],
                (),
                metrics.get(number, {}),
                {name: array[number - 1] for name, array in influence.items()},
                (),
                summary["bytes_up_per_client_round"],
                summary["bytes_down_per_client_round"],
            )
            for number in range(1, summary["rounds"] + 1)
        ]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise UserError(f"{folder}: not a complete run ({error}); remove it and run again") from None


def _read_metrics(path: Path, names: tuple[str, ...]) -> dict[int, dict[Point, list[dict[str, float]]]]:
    rounds: dict[int, dict[Point, list[dict[str, float]]]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
            points = rounds.setdefault(entry["round"], {point: [{} for _ in names] for point in POINTS})
            points[entry["point"]][names.index(entry["client"])][entry["metric"]] = entry["value"]
    return rounds


def _read_influence(path: Path, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        return {}
    with np.load(path, allow_pickle=False) as archive:
        prefix = f"seed{seed}_"
        return {name.removeprefix(prefix): archive[name] for name in archive.files if name.startswith(prefix)}
