"""Runs that are computed once: a folder for each method, setting, seed and data, found again by what decided it."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import fedc2i
from fedc2i.core.errors import UserError
from fedc2i.core.files import plugin_checksums, writing
from fedc2i.runs.driver import advance, checkpoints_of, latest
from fedc2i.runs.fingerprint import Fingerprint, neighbours, versions
from fedc2i.runs.folder import RunFolder, slug
from fedc2i.runs.plan import Observer, Plan
from fedc2i.runs.read import read_rounds
from fedc2i.runs.results import Result

try:
    import fcntl
except ModuleNotFoundError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

# The packages whose code decides numbers.
_DECIDING = ("core", "data", "models", "training", "methods", "engine")
SILENCE = 3.0  # seconds of waiting for another process before a line says so


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
        decided = {
            "settings": {**plan.config.decisive(), "topology": neighbours(plan.config.topology)},
            "data": plan.federation.checksums,
            "device": plan.config.torch_device().type,
            "versions": [versions()["fedc2i"], versions()["torch"]],
            "code": code_digest(),
            **({"files": files} if (files := plugin_checksums(plan.config.method, plan.config.model)) else {}),
        }
        return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def missing(self, plan: Plan) -> list[int]:
        """The seeds that are still to be computed."""
        return [seed for seed in plan.config.seeds if not (self.folder(plan, seed) / "summary.json").is_file()]

    def compute(self, plan: Plan, observer: Observer | None = None) -> Result:
        """The plan's result over all its seeds: cached seeds are read, missing ones are computed first.

        An interrupted computation resumes after its last checkpoint.
        """
        missing = tuple(self.missing(plan))
        if missing:
            self._run(_with_seeds(plan, missing), observer)
        result = Result(plan.method, plan.config, plan.federation, plan.label, plan.key)
        for seed in plan.config.seeds:
            result.rounds += read_rounds(self.folder(plan, seed), plan.federation.names, seed)
        return result

    def _run(self, plan: Plan, observer: Observer | None) -> None:
        """All seeds of the plan side by side; those of other processes are awaited.

        The folder of the smallest missing seed is the working folder. It has the checkpoints of all seeds and is
        finished last: as long as a seed is missing, the same folder is found again.
        """
        say = getattr(observer, "say", lambda line: None)
        with ExitStack() as held:
            for seed in sorted(plan.config.seeds):  # everyone in the same order: no two wait for each other
                held.enter_context(_alone(self.folder(plan, seed), say))
            missing = tuple(self.missing(plan))
            if not missing:  # another process computed them
                return
            working = self.folder(plan, min(missing))
            plan = self._interrupted(plan, working, missing) or _with_seeds(plan, missing)
            result = advance(plan, working, observer)
            for seed in sorted(missing, reverse=True):
                own, files = result.only(seed), RunFolder(self.folder(plan, seed), plan.federation.names)
                files.begin(own.config)
                files.restart(own.rounds)
                files.finish(own if self._models else replace(own, outcomes={}))
            checkpoints_of(plan, working).remove()

    def _interrupted(self, plan: Plan, working: Path, missing: tuple[int, ...]) -> Plan | None:
        """The plan whose checkpoints the working folder holds; all is removed there if it is another one."""
        try:
            was = Fingerprint.read(working)
            seeds = () if was is None else tuple(int(seed) for seed in json.loads(was.settings)["seeds"])
            found = _with_seeds(plan, seeds) if seeds else None
            if found and found.fingerprint == was and set(self.missing(found)) == set(missing):
                latest(found, working)  # damaged checkpoints are removed below, and the seeds start again
                return found
        except (UserError, ValueError, KeyError, TypeError):
            pass
        for seed in missing:
            with writing(self.folder(plan, seed)):
                _empty(self.folder(plan, seed))
        return None


def _with_seeds(plan: Plan, seeds: tuple[int, ...]) -> Plan:
    return replace(plan, config=replace(plan.config, seeds=seeds))


@contextmanager
def _alone(folder: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Makes a folder and keeps every other process out of this very function for it; a process that dies lets go.

    The folder itself is what is locked, so nothing but runs lies in a store. Systems without such locks go without. Who
    has to wait for long gets a line about it.
    """
    if fcntl is None:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield
        return
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network disk that knows no locks
            if not _locked_soon(handle):
                say(f"waiting for another process that computes {folder}")
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _locked_soon(handle: int) -> bool:
    """Whether the lock could be had within moments."""
    until = time.monotonic() + SILENCE
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


@functools.cache
def code_digest(root: Path = Path(fedc2i.__file__).parent) -> str:
    """A digest of the code that decides numbers; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    _drop_docstring(node)
            digest.update(f"{path.relative_to(root)} {ast.dump(tree)}".encode())
    return digest.hexdigest()


def _drop_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    if ast.get_docstring(node, clean=False) is not None:
        node.body = node.body[1:]
