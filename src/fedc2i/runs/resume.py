"""Going on with a run, or a comparison, that was cut off."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import locked, read_json, to_json, write_atomically, writing
from fedc2i.data.federation import Federation
from fedc2i.methods.base import Method
from fedc2i.models.model import Model
from fedc2i.report import comparison, figures
from fedc2i.runs.checkpoint import SUMMARY, Keeper
from fedc2i.runs.fingerprint import Begun
from fedc2i.runs.folder import slug
from fedc2i.runs.plan import Observer, Plan, prepare
from fedc2i.runs.read import read_run
from fedc2i.runs.results import Comparison, Result
from fedc2i.runs.settings import read_toml
from fedc2i.runs.specs import key_of

PLAN = "plan.json"  # what a comparison is made of, written at its start
COMPARED = "comparison.png"  # written last


@dataclass(frozen=True)
class _Given:
    """What the files of a run cannot name, and another device if one is asked for."""

    data: str | Federation | None = None
    model: str | Model | None = None
    method: Method | None = None
    device: str | None = None


def resume(
    folder: Path | str,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | Sequence[Method] | None = None,
    *,
    device: str | None = None,
    observer: Observer | None = None,
) -> Result | Comparison:
    """Goes on with a run that was cut off, to the result it would have had: bit for bit on the same device.

    Args:
        folder: of a run, or of a comparison, which gives a list of results, read from its folders. A finished run is
            read, too.
        data: the `Federation`, if the run was begun with one.
        model: the `Model`, if the run was begun with one.
        method: the `Method`, if the run was begun with one of your own; for a comparison, all that it had of them.
        device: another device to go on with; numbers are then not the same to the bit.
        observer: watches what is left to do.

    Raises:
        UserError: if this is not such a folder, if another process is at work on it, or if data, settings or versions
            are not those it was begun with.
    """
    folder = Path(folder)
    own = [] if method is None else [method] if isinstance(method, Method) else list(method)
    if not is_comparison(folder):
        if len(own) > 1:
            raise UserError(f"{folder}: one run has one method, got {len(own)}")
        return _resume_run(folder, _Given(data, model, own[0] if own else None, device), observer)
    with locked(folder):
        entries = _entries(folder)
        for entry in entries:
            fits = (one for one in own if slug(key_of(one)) == entry["folder"])
            _resume_entry(folder, entry, _Given(data, model, next(fits, None), device), observer)
        results = Comparison(read_run(folder / entry["folder"]) for entry in entries)  # rounded alike: ties stay ties
        if not (folder / COMPARED).is_file():
            finish_comparison(results, folder)
    return results


def is_comparison(folder: Path) -> bool:
    """Whether the folder is of a comparison."""
    return (folder / PLAN).is_file()


def unfinished(folder: Path) -> int:
    """How many runs are still to be done."""
    folders = [folder / str(entry["folder"]) for entry in _entries(folder)] if is_comparison(folder) else [folder]
    return sum(not (own / SUMMARY).is_file() for own in folders)


def write_plan(plans: Sequence[Plan], folder: Path) -> None:
    """Writes down what a comparison is made of, so that it can be gone on with."""
    runs = [{"folder": slug(plan.key), "config": plan.config.to_toml(), "begun": vars(plan.begun)} for plan in plans]
    write_atomically(folder / PLAN, to_json({"runs": runs}).encode(), durable=True)


def finish_comparison(results: Sequence[Result], folder: Path) -> None:
    """The table and the figure over all methods."""
    comparison.write_comparison(results, folder)
    figures.draw_comparison(results, folder)


def _entries(folder: Path) -> list[dict[str, Any]]:
    path = folder / PLAN
    try:
        entries = read_json(path)["runs"]
        for entry in entries:
            if slug(entry["folder"]) != entry["folder"]:  # it stays inside
                raise ValueError(f"no run '{entry['folder']}'")
            entry |= {"config": tomllib.loads(entry["config"]), "begun": Begun.of_values(entry["begun"])}
        if not entries:
            raise ValueError("it has no runs")
        return list(entries)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: not the plan of a comparison ({one_line(error)})") from None


def _resume_entry(folder: Path, entry: dict[str, Any], given: _Given, observer: Observer | None) -> None:
    """One run of a comparison, begun if it was not yet."""
    own = folder / entry["folder"]
    if (own / "config.toml").is_file():
        _resume_run(own, given, observer)
        return
    with writing(own):
        own.mkdir(exist_ok=True)
    with locked(own):
        _go_on(own, entry["config"], entry["begun"], given, observer)


def _resume_run(folder: Path, given: _Given, observer: Observer | None) -> Result:
    _require_run(folder)
    with locked(folder):
        if (folder / SUMMARY).is_file():
            Keeper(folder, 0).tidy()
            return read_run(folder)
        settings = read_toml(folder / "config.toml")
        return _go_on(folder, settings, Begun.read(folder), given, observer)


def _go_on(
    folder: Path, settings: dict[str, Any], begun: Begun | None, given: _Given, observer: Observer | None
) -> Result:
    """The rest of a run whose folder is locked."""
    _require_engine(folder, str(settings.get("engine", "inprocess")))
    for name in () if begun is None else begun.given:
        if getattr(given, name) is None:
            raise UserError(
                f"{folder}: its {name} was an object of Python; go on there with fedc2i.resume('{folder}', {name}=...)"
            )
    if given.device is not None:
        settings["device"] = given.device
    method = given.method or str(settings.get("method", ""))
    rest = {name: value for name, value in settings.items() if name != "method"}
    if isinstance(given.method, Method):
        rest.pop("options", None)
    (plan,) = prepare([method], rest, given.data, given.model)
    if begun is not None:
        now = plan.begun
        begun.refuse_others(now, folder)
        notes = begun.notes
        if now.device != begun.device:
            if given.device is None:
                raise UserError(
                    f"{folder}: begun on {begun.device}, and here it would go on on {now.device}, which gives other "
                    f"numbers; --device {now.device} goes on nonetheless"
                )
            notes = (*notes, f"Begun on {begun.device} and gone on with on {now.device} after an interruption.")
        plan = plan.noting(notes)
    return plan.execute(folder, observer, figures.draw_run)


def _require_run(folder: Path) -> None:
    """Refuses what is not a run of this engine.

    Raises:
        UserError: with what to do instead.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: {'a file' if folder.exists() else 'no such folder'}, expected is a run's folder")
    if not (folder / "config.toml").is_file():
        raise UserError(
            f"{folder}: has no config.toml, so it is not a run folder, or the run had not begun: "
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
            f"{folder}: a run over real sites; `fedc2i coordinator start` goes on with it when given once more as it "
            "was, and the command `fedc2i resume` with one of `fedc2i flower-local`"
        )
