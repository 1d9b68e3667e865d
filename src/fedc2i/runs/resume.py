"""Resuming a run, or a comparison, that was interrupted."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import locked, read_json, to_json, write_atomically, writing
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.runs.checkpoint import SUMMARY, Checkpoints
from fedc2i.runs.driver import Draw, execute
from fedc2i.runs.fingerprint import Fingerprint
from fedc2i.runs.folder import slug
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.read import read_run
from fedc2i.runs.results import Result
from fedc2i.runs.settings import read_toml
from fedc2i.runs.specs import key_of

PLAN = "plan.json"  # what a comparison is made of, written at its start
COMPARED = "comparison.png"  # written last


@dataclass(frozen=True)
class Given:
    """What the files of a run cannot name, and another device if one is asked for."""

    data: str | Federation | None = None
    model: str | Model | None = None
    method: Method | None = None
    device: str | None = None


def resume(
    folder: Path,
    given: Given,
    own: Sequence[Method],
    observer: Observer | None,
    draw: Draw,
    finish: Callable[[Sequence[Result], Path], None],
) -> Result | list[Result]:
    """Resumes a run or all runs of a comparison; see `fedc2i.api.resume`.

    Args:
        folder: of a run or a comparison.
        given: what the files of a run cannot name.
        own: methods that were objects of Python.
        observer: watches what is left to do.
        draw: adds figures to the folder of a finished run.
        finish: adds what is over all runs to the folder of a comparison.
    """
    if not is_comparison(folder):
        if len(own) > 1:
            raise UserError(f"{folder}: one run has one method, got {len(own)}")
        return _resume_run(folder, replace(given, method=own[0] if own else None), observer, draw)
    with locked(folder):
        entries = _entries(folder)
        for entry in entries:
            fits = (one for one in own if slug(key_of(one)) == entry["folder"])
            _resume_entry(folder, entry, replace(given, method=next(fits, None)), observer, draw)
        results = [read_run(folder / entry["folder"]) for entry in entries]  # rounded alike: ties stay ties
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
            entry |= {
                "config": tomllib.loads(entry["config"]),
                "fingerprint": Fingerprint.of_values(entry["fingerprint"]),
            }
        if not entries:
            raise ValueError("it has no runs")
        return list(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not the plan of a comparison ({one_line(error)})") from None


def _resume_entry(folder: Path, entry: dict[str, Any], given: Given, observer: Observer | None, draw: Draw) -> None:
    """One run of a comparison, started if it was not yet."""
    own = folder / entry["folder"]
    if (own / "config.toml").is_file():
        _resume_run(own, given, observer, draw)
        return
    with writing(own):
        own.mkdir(exist_ok=True)
    with locked(own):
        _resume(own, entry["config"], entry["fingerprint"], given, observer, draw)


def _resume_run(folder: Path, given: Given, observer: Observer | None, draw: Draw) -> Result:
    _require_run(folder)
    with locked(folder):
        if (folder / SUMMARY).is_file():
            Checkpoints(folder, 0).remove()
            return read_run(folder)
        settings = read_toml(folder / "config.toml")
        return _resume(folder, settings, Fingerprint.read(folder), given, observer, draw)


def _resume(
    folder: Path, settings: dict[str, Any], was: Fingerprint | None, given: Given, observer: Observer | None, draw: Draw
) -> Result:
    """The rest of a run whose folder is locked."""
    _require_engine(folder, str(settings.get("engine", "inprocess")))
    for name in () if was is None else was.given:
        if getattr(given, name) is None:
            raise UserError(
                f"{folder}: its {name} was an object of Python; "
                f"resume it there with fedc2i.resume('{folder}', {name}=...)"
            )
    if given.device is not None:
        settings["device"] = given.device
    method = given.method or str(settings.get("method", ""))
    rest = {name: value for name, value in settings.items() if name != "method"}
    if isinstance(given.method, Method):
        rest.pop("options", None)
    (plan,) = prepare([method], rest, given.data, given.model)
    if was is not None:
        now = plan.fingerprint
        was.refuse_others(now, folder)
        notes = was.notes
        if now.device != was.device:
            if given.device is None:
                raise UserError(
                    f"{folder}: started on {was.device}, and here it would resume on {now.device}, which gives other "
                    f"numbers; --device {now.device} resumes it nonetheless"
                )
            notes = (*notes, f"Started on {was.device} and resumed on {now.device} after an interruption.")
        plan = plan.noting(notes)
    return execute(plan, folder, observer, draw)


def _require_run(folder: Path) -> None:
    """Refuses what is not a run of this engine.

    Raises:
        UserError: with what to do instead.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'a file' if folder.exists() else 'no such folder'}, expected is a run's folder")
    if not (folder / "config.toml").is_file():
        raise UserError(
            f"{folder}: has no config.toml, so it is not a run folder, or the run had not started: "
            "then remove it and run again"
        )


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
