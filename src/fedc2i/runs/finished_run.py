"""A finished run, from its folder alone: as a `Result`, its models, and as a `Plan` to compute on once more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.core.files import is_plugin
from fedc2i.core.options import names
from fedc2i.core.params import Params, Stacked
from fedc2i.data import npz
from fedc2i.data.federation import Federation, InputSpec
from fedc2i.data.remote import PIXEL, RemoteFederation, blank_clients
from fedc2i.engine.records import LARGE, POINTS, Point, Predictions, Round
from fedc2i.methods.base import Method, find_method
from fedc2i.models.model import Model
from fedc2i.runs.folder import PREDICTIONS, SUMMARY
from fedc2i.runs.plan import Plan, parse_method, prepare
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, make, read_toml

MOST_BYTES = 2**28  # of summary.json and of a line of metrics.jsonl; ten thousand clients need some ten million
MOST_ROUNDS = 10**7
_DAMAGED = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, MemoryError),
    ArithmeticError,  # of JSON's Infinity
)


def read_run(folder: Path | str) -> Result:
    """The run that lies in a folder; its data and models stay where they are.

    Raises:
        UserError: if it is not the folder of a finished run.
    """
    folder = Path(folder)
    path = folder / SUMMARY
    if not path.is_file():
        raise UserError(f"{folder}: not the folder of a finished run; it has no summary.json")
    try:
        summary = _read_summary(folder)
        values = read_toml(folder / "config.toml")
        kind, name = _method(str(values["method"]), values.get("options", {}), summary)
        config = make(kind, {**values, "method": name})
        sample = InputSpec.from_json(summary["input"]) if "input" in summary else PIXEL  # an earlier version wrote none
        federation = RemoteFederation(
            _text(summary["data"]),
            blank_clients(_texts(summary["clients"]), sample),
            _texts(summary["classes"]),
            _texts(summary["notes"]),
            averages={name: _texts(own) for name, own in summary.get("averages", {}).items()},
            sizes={name: dict(own) for name, own in summary["samples"].items()},
            digests=dict(summary["data_checksums"]),
        )
        method = kind(**config.options)
        config = replace(config, options=asdict(method))  # a file has no word for none
        title, key = _text(summary["title"]), _text(summary.get("key", kind.name))
        model = _text(summary.get("model", ""))
        result = Result(method, config, federation, title, key, written=summary, model_name=model)
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
    except _DAMAGED as error:
        raise UserError(f"{path}: cannot be read ({flaw(error)})") from None
    for seed in config.seeds:
        result.rounds += read_rounds(folder, federation.names, seed, complete=False)
    if (folder / PREDICTIONS).is_file():
        result.predictions = _read_predictions(folder / PREDICTIONS, result)
    return result


def read_rounds(folder: Path, clients: tuple[str, ...], seed: int, complete: bool = True) -> list[Round]:
    """A seed's rounds from its run folder; times and bytes are means over the run.

    With ``complete`` every client must have answered in the last round, as in a simulation.

    Raises:
        UserError: if a file is missing or damaged.
    """
    try:
        summary = _read_summary(folder)
        metrics = _read_metrics(folder / "metrics.jsonl", clients, seed)
        influence = _read_influence(folder / "influence.npz", seed)
        refused = _read_refused(summary["refused"], clients, seed)
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
    except (*_DAMAGED, UserError) as error:
        raise UserError(f"{folder}: not a complete run ({flaw(error)}); remove it and run again") from None


def read_model(folder: Path | str, client: str, seed: int = 0, point: Point = "trained") -> Params:
    """A client's last model from a run folder, ready for ``module.load_state_dict``.

    Raises:
        UserError: if there is no such run, seed or client.
    """
    path, by_client = _read_models(Path(folder), seed, point)
    if client not in by_client:
        raise UserError(f"{path}: no client '{client}', allowed are {', '.join(sorted(by_client))}")
    return by_client[client]


def read_models(folder: Path, clients: tuple[str, ...], seed: int) -> Stacked:
    """Every client's last trained model, stacked in the order of ``clients``.

    Raises:
        UserError: if the file is missing, damaged, or of other clients.
    """
    path, by_client = _read_models(folder, seed, "trained")
    try:
        models = [by_client[client] for client in clients]
        return {part: torch.stack([own[part] for own in models]) for part in models[0]}
    except (KeyError, RuntimeError):
        raise UserError(f"{path}: not the models of the clients {', '.join(clients)}") from None


def _read_models(folder: Path, seed: int, point: Point) -> tuple[Path, dict[str, Params]]:
    """The file, and the models in it by client."""
    path = folder / "models" / f"seed{seed}-{point}.safetensors"
    if not path.is_file():
        raise UserError(f"{path}: no such file; a finished run with models has it, if seed {seed} was part of the run")
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors ({error})") from None
    by_client: dict[str, Params] = {}
    for name, tensor in tensors.items():
        client, _, part = name.rpartition("/")
        by_client.setdefault(client, {})[part] = tensor
    return path, by_client


def reopen(
    folder: Path | str,
    data: Federation | None = None,
    model: Model | None = None,
    method: Method | None = None,
    data_dir: Path | None = None,
) -> Plan:
    """The plan of a finished run, on the data it was run on.

    Data, model and method are those that the run was started with, if they were objects of Python; ``data_dir`` is
    where the data lies now, if it was moved.

    Raises:
        UserError: if it is not the folder of a finished run, or the data is not what it was.
    """
    folder = Path(folder)
    was = read_run(folder).written["data_checksums"]
    settings = read_toml(folder / "config.toml")
    wanted = method or str(settings["method"])
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


def _read_metrics(path: Path, names: tuple[str, ...], seed: int) -> dict[int, dict[Point, list[dict[str, float]]]]:
    rounds: dict[int, dict[Point, list[dict[str, float]]]] = {}
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MOST_BYTES), ""), 1):
            try:
                entry = json.loads(line)
                if entry["seed"] != seed:
                    continue
                if type(entry["round"]) is not int or not 1 <= entry["round"] <= MOST_ROUNDS:
                    raise ValueError(f"a round {one_line(entry['round'])}")
                if entry["client"] not in names or entry["point"] not in POINTS:
                    raise ValueError(f"no client or point '{one_line(entry['client'])}', '{one_line(entry['point'])}'")
                points = rounds.setdefault(entry["round"], {point: [{} for _ in names] for point in POINTS})
                value = np.nan if entry["value"] is None else float(entry["value"])  # null: it was not finite
                points[entry["point"]][names.index(entry["client"])][_text(entry["metric"])] = value
            except _DAMAGED as error:
                raise ValueError(f"{path.name}, line {number}: {flaw(error)}") from None
    return rounds


def _read_refused(entries: Any, names: tuple[str, ...], seed: int) -> dict[int, dict[str, Any]]:
    """By round: whose uploads were rejected, what was wrong, and who took part if nobody else did.

    An earlier version wrote neither how many took part nor reasons.
    """
    found = {}
    for entry in entries:
        clients = _texts(entry["clients"])
        why = {_text(name): _text(reason) for name, reason in dict(entry.get("why", {})).items()}
        if not {*clients, *why} <= set(names):
            raise ValueError("uploads of clients that are not there")
        if entry["seed"] == seed:
            all_of_them = clients if entry.get("of") == len(clients) else ()
            found[int(entry["round"])] = {"refused": clients, "participants": all_of_them, "why": why}
    return found


def _read_influence(path: Path, seed: int) -> dict[str, np.ndarray[Any, Any]]:
    if not path.is_file():
        return {}
    with npz.opened(path, ratio=None) as archive:
        prefix = f"seed{seed}_"
        own = [name for name in archive.names if name.startswith(prefix)]
        return {name.removeprefix(prefix): array for name, array in archive.read(own).items()}


def _read_predictions(path: Path, result: Result) -> Predictions:
    """Every seed's at both points, checked.

    Raises:
        UserError: if they are damaged, or not of this run.
    """
    keys = {(seed, point): f"seed{seed}_{point}" for seed in result.config.seeds for point in POINTS}
    classes = len(result.federation.classes)
    try:
        with npz.opened(path, ratio=None) as archive:
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
    except (*_DAMAGED, UserError) as error:
        raise UserError(f"{path}: cannot be read ({flaw(error)}); without this file, the run can be") from None


def _read_summary(folder: Path) -> dict[str, Any]:
    with (folder / SUMMARY).open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise ValueError(f"summary.json has more than {MOST_BYTES:,} bytes")
    summary = json.loads(content.decode("utf-8"))
    if not isinstance(summary, dict):
        raise ValueError("summary.json is not a table")
    return summary


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
    title, headline = _text(summary["title"]), summary["headline"]
    if headline not in POINTS:
        raise ValueError(f"headline is {one_line(headline)}")
    kind.name, kind.title, kind.headline = _text(summary.get("key", title)), title, headline
    return kind, wanted


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text is expected, got {one_line(value)}")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError(f"a list of texts is expected, got {one_line(value)}")
    return tuple(map(_text, value))
