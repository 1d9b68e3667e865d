"""Runs that are computed once: a folder for each method, setting, seed and data, found again by what decided it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import shutil
import zipfile
import zlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

import fedc2i
from fedc2i.engine import Round
from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.methods.base import Method
from fedc2i.plans import Observer, Plan
from fedc2i.results import Result, versions
from fedc2i.runs import RunFolder, slug, writing

_DAMAGED = (OSError, EOFError, ValueError, KeyError, IndexError, TypeError, zipfile.BadZipFile, zlib.error)
_ABOVE = (
    "cli.py",
    "cli_data.py",
    "cli_paper.py",
    "cli_study.py",
    "paper.py",
    "progress.py",
    "recipes.py",
    "significance.py",
    "store.py",
    "study.py",
)
_NOT_NUMBERS = ("data_dir", "device", "seeds")  # settings that do not decide a single seed's numbers by themselves


class Store:
    """A folder of single-seed runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, plan: Plan, seed: int) -> Path:
        """Where a plan's run with this seed lies, or will."""
        return self.root / f"{slug(plan.config.data)}-{slug(plan.key)}-seed{seed}-{self._key(plan)}"

    def _key(self, plan: Plan) -> str:
        """Twelve digits that change with settings, data, device, versions and the code that decides numbers."""
        settings = {name: value for name, value in asdict(plan.config).items() if name not in _NOT_NUMBERS}
        decided = {
            "settings": settings,
            "data": plan.federation.checksums,
            "device": plan.config.torch_device().type,
            "versions": [versions()["fedc2i"], versions()["torch"]],
            "code": _code(type(plan.method)),
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def missing(self, plan: Plan) -> list[int]:
        """The seeds that are still to be computed."""
        return [seed for seed in plan.config.seeds if not (self.folder(plan, seed) / "summary.json").is_file()]

    def compute(self, plan: Plan, observer: Observer | None = None) -> Result:
        """The plan's result over all its seeds: what is there is read, what is missing is run first.

        A run that was cut off has no summary; it is run again from its start.
        """
        missing = tuple(self.missing(plan))
        if missing:
            self._run(replace(plan, config=replace(plan.config, seeds=missing)), observer)
        result = Result(plan.method, plan.config, plan.federation, plan.label, plan.key)
        for seed in plan.config.seeds:
            result.rounds += read_rounds(self.folder(plan, seed), plan, seed)
        return result

    def _run(self, plan: Plan, observer: Observer | None) -> None:
        """All seeds of the plan side by side, each into a folder of its own."""
        folders = {seed: RunFolder(self.folder(plan, seed), plan.federation.names) for seed in plan.config.seeds}
        for seed, files in folders.items():
            with writing(files.path):
                shutil.rmtree(files.path, ignore_errors=True)
                files.path.mkdir(parents=True)
            files.begin(replace(plan.config, seeds=(seed,)))
        result = plan.compute(observer, lambda report: folders[report.seed].record(report))
        for seed, files in folders.items():
            files.finish(result.only(seed))


def _code(kind: type[Method]) -> str:
    """A digest of the method's own files and of everything below them that decides numbers."""
    root = Path(fedc2i.__file__).parent
    shared = {*root.glob("*.py"), *root.glob("engine/*.py"), *root.glob("data/*.py")} - {root / name for name in _ABOVE}
    own = {Path(inspect.getfile(base)) for base in kind.__mro__ if issubclass(base, Method)}
    return _digest(tuple(sorted(shared | own)))


@functools.cache
def _digest(paths: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def read_rounds(folder: Path, plan: Plan, seed: int) -> list[Round]:
    """A seed's rounds from its run folder; times are means over the run, bytes those of its last round.

    Raises:
        UserError: if a file is missing or damaged.
    """
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        metrics = _read_metrics(folder / "metrics.jsonl", plan.federation.names)
        influence = _read_influence(folder / "influence.npz", seed)
        if not all("accuracy" in own for point in POINTS for own in metrics[summary["rounds"]][point]):
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
            for number in range(1, summary["rounds"] + 1)
        ]
    except _DAMAGED as error:
        raise UserError(f"{folder}: not a complete run ({error}); remove it and run again") from None


def _read_metrics(path: Path, names: tuple[str, ...]) -> dict[int, dict[Point, list[dict[str, float]]]]:
    rounds: dict[int, dict[Point, list[dict[str, float]]]] = {}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            entry = json.loads(line)
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
