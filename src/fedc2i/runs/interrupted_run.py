"""A run, or a comparison, that was interrupted: whether it is unfinished, and how it is resumed."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import (
    is_plugin,
    locked,
    plugin_file,
    read_json,
    refuse_code,
    refuse_links,
    to_json,
    write_atomically,
    writing,
)
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.runs import writer
from fedc2i.runs.driver import Draw, execute
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.finished_run import read_run
from fedc2i.runs.folder import SUMMARY, slug
from fedc2i.runs.plan import Observer, Plan, key_of, prepare
from fedc2i.runs.results import Result
from fedc2i.runs.settings import read_toml

PLAN = "plan.json"  # what a comparison is made of, written at its start
COMPARED = "comparison.png"  # written last
FILES = ("table", "signals", "folder", "arrays")  # data whose name holds a path


@dataclass(frozen=True)
class Resumption:
    """How runs are resumed.

    Attributes:
        observer: watches what is left to do.
        draw: adds figures to the folder of a finished run.
        data: the `Federation`, if there was one; like model and methods, files cannot name it.
        model: the `Model`, if there was one.
        methods: those that were objects of Python.
        device: another device than the run was started on, if one is asked for.
        trust: whether Python files that a folder names may be executed.
    """

    observer: Observer | None
    draw: Draw
    data: Federation | None = None
    model: Model | None = None
    methods: Sequence[Method] = ()
    device: str | None = None
    trust: bool = False

    def resume(self, folder: Path) -> Result:
        """Resumes a run, or reads it if it is finished."""
        if not folder.is_dir():
            is_there = "a file" if folder.exists() else "no such folder"
            raise UserError(f"{folder}: {is_there}, expected is a run's folder")
        if not (folder / "config.toml").is_file():
            raise UserError(
                f"{folder}: has no config.toml, so it is not a run folder, or the run had not started: "
                "then remove it and run again"
            )
        if len(self.methods) > 1:
            raise UserError(f"{folder}: one run has one method, got {len(self.methods)}")
        with locked(folder):
            refuse_links(folder)
            if (folder / SUMMARY).is_file():
                writer.remove(folder)
                return read_run(folder)
            return self._compute(folder, read_toml(folder / "config.toml"), Fingerprint.read(folder))

    def resume_all(self, folder: Path) -> list[Result]:
        """Resumes the runs of a comparison that are not finished, and starts those that were not yet."""
        entries = _entries(folder)
        for entry in entries:
            own = folder / entry["folder"]
            fit = replace(self, methods=[one for one in self.methods if slug(key_of(one)) == entry["folder"]][:1])
            if (own / "config.toml").is_file():
                fit.resume(own)
                continue
            with writing(own):
                own.mkdir(exist_ok=True)
            with locked(own):
                fit._compute(own, entry["config"], entry["fingerprint"])
        return [read_run(folder / entry["folder"]) for entry in entries]  # rounded alike: ties stay ties

    def _compute(self, folder: Path, settings: dict[str, Any], was: Fingerprint | None) -> Result:
        """The rest of a run whose folder is locked."""
        _require_engine(folder, str(settings.get("engine", "inprocess")))
        method = next(iter(self.methods), None)
        named = {"method": method, "model": self.model}
        refuse_code(folder, [settings.get(name) for name, own in named.items() if own is None], self.trust)
        given = {"data": self.data, "model": self.model, "method": method}
        for name in () if was is None else was.given:
            if given[name] is None:
                raise UserError(
                    f"{folder}: its {name} was an object of Python; "
                    f"resume it there with fedc2i.resume('{folder}', {name}=...)"
                )
        if self.device is not None:
            settings["device"] = self.device
        ignored = {"method"} if method is None else {"method", "options"}
        rest = {name: value for name, value in settings.items() if name not in ignored}
        with paths_from_start({} if self.data else settings):
            (plan,) = prepare([method or str(settings.get("method", ""))], rest, self.data, self.model)
        if was is not None:
            plan = self._checked(plan, was, folder)
        return execute(plan, folder, self.observer, self.draw)

    def _checked(self, plan: Plan, was: Fingerprint, folder: Path) -> Plan:
        """The plan with notes of its interruptions, if it is what the run was started with."""
        now, notes = plan.fingerprint, was.notes
        was.refuse_others(now, folder)
        if now.device != was.device:
            if self.device is None:
                raise UserError(
                    f"{folder}: started on {was.device}, and here it would resume on {now.device}, which gives other "
                    f"numbers; --device {now.device} resumes it nonetheless"
                )
            notes = (*notes, f"Started on {was.device} and resumed on {now.device} after an interruption.")
        if not notes:
            return plan
        federation = replace(plan.federation, notes=(*plan.federation.notes, *notes))
        return replace(plan, federation=federation, notes=notes)


def resume(folder: Path, how: Resumption, finish: Callable[[Sequence[Result], Path], None]) -> Result | list[Result]:
    """Resumes a run or a comparison, to whose folder ``finish`` adds what is over all runs; see `fedc2i.api.resume`."""
    if not is_comparison(folder):
        return how.resume(folder)
    with locked(folder):
        refuse_links(folder)
        results = how.resume_all(folder)
        if not (folder / COMPARED).is_file():
            finish(results, folder)
    return results


def is_comparison(folder: Path) -> bool:
    """Whether the folder is of a comparison."""
    return (folder / PLAN).is_file()


def unfinished(folder: Path) -> int:
    """How many runs are still to be done."""
    folders = [folder / str(entry["folder"]) for entry in _entries(folder)] if is_comparison(folder) else [folder]
    return sum(not (own / SUMMARY).is_file() for own in folders)


@contextmanager
def paths_from_start(settings: Mapping[str, Any]) -> Iterator[None]:
    """Around the reading of a stored run's data: an error says where a relative path that is missing starts."""
    try:
        yield
    except UserError as error:
        source, _, argument = str(settings.get("data", "")).partition(":")
        code = [plugin_file(name) for own in ("method", "model") if is_plugin(name := str(settings.get(own, "")))]
        for path in map(Path, (argument * (source in FILES), str(settings.get("data_dir", "")), *code)):
            is_named = re.search(rf"(?<![\w./-]){re.escape(str(path))}(?![\w/-])", str(error))
            if not path.is_absolute() and not path.exists() and is_named:
                hint = "the path is relative to the folder in which the run was started; repeat the command there"
                raise UserError(f"{error}; {hint}") from None
        raise


def write_plan(plans: Sequence[Plan], folder: Path) -> None:
    """Writes down what a comparison is made of, so that it can be resumed."""
    runs = [
        {"folder": slug(plan.key), "config": plan.config.to_toml(), "fingerprint": vars(plan.fingerprint)}
        for plan in plans
    ]
    write_atomically(folder / PLAN, to_json({"runs": runs}).encode(), durable=True)


def _entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / PLAN
    try:
        entries = read_json(path)["runs"]
        for entry in entries:
            if slug(entry["folder"]) != entry["folder"]:  # it stays inside
                raise ValueError(f"no run '{entry['folder']}'")
            entry["config"] = tomllib.loads(entry["config"])
            entry["fingerprint"] = Fingerprint.of_values(entry["fingerprint"])
        if not entries:
            raise ValueError("it has no runs")
        return list(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not the plan of a comparison ({one_line(error)})") from None


def _require_engine(folder: Path, engine: str) -> None:
    if engine == "flower-sim":
        raise UserError(
            f"{folder}: engine=flower-sim keeps no checkpoints; run it again with "
            f"`fedc2i run --config {folder / 'config.toml'}`"
        )
    if engine != "inprocess":
        raise UserError(
            f"{folder}: a run over real sites; the same command `fedc2i coordinator start` resumes it, "
            "and `fedc2i resume` one of `fedc2i flower-local`"
        )
