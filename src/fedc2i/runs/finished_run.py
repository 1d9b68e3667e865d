"""A finished run, from its folder alone: as a `Result`, and as a `Plan` to compute on once more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.core.files import is_plugin, refuse_code
from fedc2i.core.options import names
from fedc2i.data import npz
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.data.remote import PIXEL, SITES, RemoteFederation, blank_clients
from fedc2i.engine.records import POINTS, Predictions
from fedc2i.methods.base import Method, find_method
from fedc2i.models.model import Model
from fedc2i.runs.folder import PREDICTIONS, SUMMARY
from fedc2i.runs.plan import Plan, parse_method, prepare
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, make, read_toml
from fedc2i.runs.stored_models import is_between_sites, models_of
from fedc2i.runs.stored_rounds import DAMAGED, MOST_ROUNDS, Extent, read_rounds, read_summary, text_of, texts_of

MOST_PREDICTIONS = 2**25  # probabilities in a run folder; an earlier version wrote twice as many as `driver` does


def read_run(folder: Path | str) -> Result:
    """The run that lies in a folder; its data and models stay where they are.

    Raises:
        UserError: if it is not the folder of a finished run.
    """
    folder = Path(folder)
    path = folder / SUMMARY
    if not folder.exists():
        raise UserError(f"{folder}: no such folder")
    if not path.is_file():
        raise UserError(f"{folder}: not the folder of a finished run; it has no summary.json")
    try:
        summary = read_summary(folder)
        if is_of_site(summary):
            raise UserError(
                f"{folder}: what a site keeps, its model without scores; `fedc2i predict` and `export` read it"
            )
        values = read_toml(folder / "config.toml")
        kind, name = _method(str(values["method"]), values.get("options", {}), summary)
        config = make(kind, {**values, "method": name})
        sample = InputSpec.from_json(summary["input"]) if "input" in summary else PIXEL  # an earlier version wrote none
        federation = RemoteFederation(
            text_of(summary["data"]),
            blank_clients(texts_of(summary["clients"]), sample),
            texts_of(summary["classes"]),
            texts_of(summary["notes"]),
            averages={name: texts_of(own) for name, own in summary.get("averages", {}).items()},
            sizes={name: dict(own) for name, own in summary["samples"].items()},
            digests=dict(summary["data_checksums"]),
            counts=_class_counts(summary),
        )
        method = kind(**config.options)
        config = replace(config, options=asdict(method))  # a file has no word for none
        title, key = text_of(summary["title"]), text_of(summary.get("key", kind.name))
        model = text_of(summary.get("model", ""))
        given = texts_of(summary.get("given", []))
        result = Result(method, config, federation, title, key, written=summary, model_name=model, given=given)
        for name, share in summary.get("majority", {}).items():
            if name not in federation.names or not 0 <= float(share) <= 100:
                raise ValueError(f"a majority of {one_line(share)} % at '{one_line(name)}'")
        for entry in summary.get("asked_again", ()):
            seed, number, times = (int(entry[name]) for name in ("seed", "round", "times"))
            if not (1 <= number <= MOST_ROUNDS and 1 <= times <= MOST_ROUNDS):
                raise ValueError("a round that was asked for again is none")
            result.asked[seed] = {**result.asked.get(seed, {}), number: times}
        if not all(set(members) <= set(federation.names) for members in federation.averages.values()):
            raise ValueError("averages over clients that are not there")
    except DAMAGED as error:
        raise UserError(f"{path}: cannot be read ({flaw(error)})") from None
    extent = Extent(federation.names, len(federation.classes), config.rounds)
    for own in read_rounds(folder, extent, config.seeds, complete=False).values():
        result.rounds += own
    if (folder / PREDICTIONS).is_file():
        result.predictions = _read_predictions(folder / PREDICTIONS, result)
    return result


def _class_counts(summary: Mapping[str, Any]) -> dict[str, list[int]]:
    """Training samples of each class by client; none in folders of an earlier version and of real sites."""
    counts: Mapping[str, Any] = summary.get("class_counts", {})
    for name, own in counts.items():
        numbers = isinstance(own, list) and all(type(count) is int and count >= 0 for count in own)
        if name not in summary["clients"] or not numbers or len(own) != len(summary["classes"]):
            raise ValueError(f"samples of each class, {one_line(own)}, at '{one_line(name)}'")
    if counts and len(counts) < len(summary["clients"]):
        raise ValueError("samples of each class of some clients only")
    return dict(counts)


def is_of_site(summary: Mapping[str, Any]) -> bool:
    """Whether it is of the folder in which a site keeps its own models of a run (`fedc2i.flower.site_models`)."""
    return "classes" in summary and "data" not in summary


def read_site_run(folder: Path) -> Result:
    """What a site knows of a run: settings, classes and its own sizes, but no scores.

    Raises:
        UserError: if it is not such a folder.
    """
    try:
        summary, values = read_summary(folder), read_toml(folder / "config.toml")
        seed, sample = summary["seeds"][0], InputSpec.from_json(summary["input"])
        _, by_client = models_of(folder, seed, "trained")
        wanted = str(values["method"])
        about = {"method": wanted, "title": wanted, "headline": "trained"}  # of a user's own, which is not exported
        kind, name = _method(wanted, values.get("options", {}), about)
        config = replace(make(kind, {**values, "method": name, "seeds": [seed]}), data=SITES)
        counts = {part: int(count) for part, count in summary.get("samples", {}).items()}  # the first version: none
        clients, classes = blank_clients(tuple(by_client), sample), texts_of(summary["classes"])
        federation = RemoteFederation(SITES, clients, classes, sizes=dict.fromkeys(by_client, counts))
        method = kind(**config.options)
    except DAMAGED as error:
        raise UserError(f"{folder / SUMMARY}: cannot be read ({flaw(error)})") from None
    return Result(method, replace(config, options=asdict(method)), federation, kind.title, kind.name)


def reopen(
    folder: Path | str,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | None = None,
    data_dir: Path | None = None,
    trust: bool = False,
) -> Plan:
    """The plan of a finished run, on the data it was run on.

    Data, model and method are those that the run was started with, if they were objects of Python; ``data_dir`` is
    where the data lies now, if it was moved. Python files that the folder names are executed only with ``trust``.

    Raises:
        UserError: if it is not the folder of a finished run, the data is not what it was, or it names code.
    """
    folder = Path(folder)
    was = read_run(folder).written["data_checksums"]
    settings = read_toml(folder / "config.toml")
    if data is None and is_between_sites(settings):
        raise UserError(
            f"{folder}: ran between sites, whose data is not here; `fedc2i report` shows what the run measured, "
            "`fedc2i coordinator contribution` measures who helps whom"
        )
    wanted = method or str(settings["method"])
    named = {"method": method, "model": model}
    refuse_code(folder, [settings.get(name) for name, given in named.items() if given is None], trust)
    if isinstance(wanted, str) and not is_plugin(wanted) and find_method(wanted) is None:
        raise UserError(f"{folder}: its method '{wanted}' was an object of Python; give it there as method=...")
    ignored = {"method", "engine", *names(RunSettings, engine="flower")}  # it is computed in this process
    ignored |= set() if data is None else {*names(RunSettings, scope="data")}
    ignored |= set() if method is None else {"options"}
    rest = {name: value for name, value in settings.items() if name not in ignored}
    rest["device"] = "auto"  # what was trained on a GPU can be looked at without one
    if data_dir is not None:
        rest["data_dir"] = str(data_dir)
    (plan,) = prepare([wanted], rest, data, model)
    now = plan.federation.checksums
    if was != now:
        other = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        raise UserError(f"{folder}: the data is not what it was run on (clients {', '.join(other)})")
    return plan


def _read_predictions(path: Path, result: Result) -> Predictions:
    """Every seed's at both points, checked.

    Raises:
        UserError: if they are damaged, or not of this run.
    """
    keys = {(seed, point): f"seed{seed}_{point}" for seed in result.config.seeds for point in POINTS}
    classes = len(result.federation.classes)
    try:
        with npz.opened(path, ratio=None) as archive:
            count = archive.declared("labels").shape
            if archive.declared("samples").shape != (len(result.federation.names),) or len(count) != 1:
                raise ValueError("labels of other clients")
            if len(keys) * count[0] * classes > MOST_PREDICTIONS:
                raise ValueError(f"{count[0]:,} samples, which are more than a run writes down")
            if any(archive.declared(name).shape != (*count, classes) for name in keys.values()):
                raise ValueError("probabilities of other samples or classes")
            arrays = archive.read(["labels", "samples", *keys.values()])
        labels, samples = arrays["labels"], tuple(int(size) for size in arrays["samples"])
        sized = len(samples) == len(result.federation.names) and min(samples) > 0 and sum(samples) == len(labels)
        if not sized or labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError("labels of other clients")
        if labels.min() < 0 or labels.max() >= classes:
            raise ValueError("labels out of range")
        logs = {key: arrays[name] for key, name in keys.items()}
        if not all(own.shape == (len(labels), classes) and own.dtype.kind == "f" for own in logs.values()):
            raise ValueError("probabilities of other samples or classes")
        return Predictions(labels, samples, logs)
    except (*DAMAGED, UserError) as error:
        raise UserError(f"{path}: cannot be read ({flaw(error)}); without this file, the run can be") from None


def _method(wanted: str, options: Mapping[str, Any], summary: Mapping[str, Any]) -> tuple[type[Method], str]:
    """The method's class and name.

    That of a Python file, or one made as an object in another process, is only described: reading a folder executes
    nothing in it.
    """
    if not is_plugin(wanted) and (find_method(wanted) or wanted != summary["method"]):
        return parse_method(wanted)[:2]
    shared = {own.name for own in fields(Method)}
    own = [(name, type(value), field(default=value)) for name, value in options.items() if name not in shared]
    kind: type[Method] = make_dataclass("Stored", own, bases=(Method,), frozen=True)
    title, headline = text_of(summary["title"]), summary["headline"]
    if headline not in POINTS:
        raise ValueError(f"headline is {one_line(headline)}")
    kind.name, kind.title, kind.headline = text_of(summary.get("key", title)), title, headline
    return kind, wanted
