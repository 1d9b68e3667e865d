"""Runs that are computed once: a folder for each method, setting, seed and data, found again by what decided it."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import fedc2i
from fedc2i.methods.base import Method
from fedc2i.plans import Observer, Plan
from fedc2i.readback import read_rounds
from fedc2i.results import Result, versions
from fedc2i.runs import RunFolder, slug, writing

_ABOVE = (
    "checkpoint.py",
    "cli.py",
    "cli_coordinator.py",
    "cli_data.py",
    "cli_flower.py",
    "cli_paper.py",
    "cli_site.py",
    "cli_study.py",
    "journal.py",
    "many.py",
    "mass.py",
    "paper.py",
    "progress.py",
    "readback.py",
    "recipes.py",
    "significance.py",
    "store.py",
    "study.py",
)
_NOT_NUMBERS = ("data_dir", "device", "seeds")  # settings that do not decide a single seed's numbers by themselves


class Store:
    """A folder of single-seed runs, with every client's last models or, to spare the disk, without."""

    def __init__(self, root: Path, models: bool = True) -> None:
        self.root = root
        self._models = models

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
            result.rounds += read_rounds(self.folder(plan, seed), plan.federation.names, seed)
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
            own = result.only(seed)
            files.finish(own if self._models else replace(own, outcomes={}))


def _code(kind: type[Method]) -> str:
    """A digest of the method's own files and of everything below them that decides numbers."""
    root = Path(fedc2i.__file__).parent
    shared = {*root.glob("*.py"), *root.glob("engine/*.py"), *root.glob("data/*.py")} - {root / name for name in _ABOVE}
    own = {Path(inspect.getfile(base)) for base in kind.__mro__ if issubclass(base, Method)}
    return _digest(tuple(sorted(shared | own)))


@functools.cache
def _digest(paths: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
