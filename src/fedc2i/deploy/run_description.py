"""What sites receive with a run: its description as JSON, and the user's own method and model files.

These files travel inside the Flower App. No file outside of the app is ever executed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedc2i import __version__
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_plugin, plugin_file
from fedc2i.core.options import names
from fedc2i.core.params import Params
from fedc2i.core.plugins import local_import
from fedc2i.data.federation import InputSpec
from fedc2i.data.remote import RemoteFederation
from fedc2i.data.schema import Schema
from fedc2i.engine import attacks
from fedc2i.engine.client import RunContext
from fedc2i.flower.message_format import MOST_CLASSES
from fedc2i.flower.site import Assignment
from fedc2i.methods.fedavg import FedAvg
from fedc2i.models.model import Model
from fedc2i.models.weights import checksum
from fedc2i.runs.plan import Plan, build_model, parse_method
from fedc2i.runs.settings import RunSettings, make

PLUGINS = "plugins"  # a folder of the Flower App


def describe(plan: Plan, seed: int, contribution: bool = False) -> str:
    """Describes a plan with one seed, and whether contributions are measured by it."""
    if plan.config.attack and plan.config.noise:
        raise UserError("over real sites attack and noise exclude each other: what an attacker sends has no noise")
    sent = [name for name in names(RunSettings, scope="run") if name != "seeds"]
    values = _given({name: getattr(plan.config, name) for name in sent})
    values |= {name: _place_in_app(name, str(values[name])) for name in ("method", "model")}
    if plan.config.weights is not None:  # every site has the file itself
        values["weights"] = Path(plan.config.weights).name
    values["attack"] = attacks.resolved(plan.config.attack, plan.federation.names, seed)
    context = RunContext(plan.method, plan.model, plan.config, plan.config.rounds, seed)
    schema = plan.federation.schema if isinstance(plan.federation, RemoteFederation) else None
    return json.dumps(
        {
            "version": __version__,
            "settings": {**values, "options": _given(plan.config.options)},
            "seed": seed,
            "classes": plan.federation.classes,
            "input": plan.federation.input.to_json(),
            "schema": None if schema is None else schema.to_json(),
            "fingerprint": fingerprint(context.first_model("", plan.config.init)),
            "constants": _constants(plan.model, plan.config),
            "contribution": contribution,
        },
        default=str,
    )


def understand(text: str, root: Path | None = None) -> tuple[Assignment, tuple[str, ...]]:
    """Reads a description; returns the assignment, and the classes' names in the order of their labels.

    The text may come from anyone who poses as the coordinator, so everything is checked: the version, every setting,
    the shapes of the model. ``root`` is the folder of the Flower App, with the user's own files.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        settings, classes = dict(values["settings"]), tuple(map(str, values["classes"]))
        if not isinstance(values["classes"], list) or len(set(classes)) != len(classes):
            raise ValueError("classes that are no list of different names")
        sample = InputSpec.from_json(values["input"])
        schema = None if values.get("schema") is None else Schema.from_json(values["schema"])
        if schema is not None and schema.input != sample:
            raise ValueError(f"{sample} of a table that has {schema.input}")
        for name in ("method", "model"):
            if is_plugin(str(settings[name])):
                settings[name] = _place_at_site(str(settings[name]), root)
        if "weights" in settings and Path(str(settings["weights"])).name != settings["weights"]:
            raise ValueError(f"weights in '{settings['weights']}'")
        kind, name, own = parse_method(str(settings["method"]))
        config = make(kind, {**settings, **own, "method": name, "seeds": [int(values["seed"])]})
        _measures_contribution(values)
        version, expected, constants = (str(values[name]) for name in ("version", "fingerprint", "constants"))
        if len(classes) > MOST_CLASSES:
            raise ValueError(f"{len(classes):,} classes")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"the run's description is not valid ({reason})") from None
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise UserError(f"this site has fedc2i {__version__}, the coordinator {one_line(version, 40)}")
    model = build_model(config, classes, sample)
    attackers = attacks.read_resolved(config.attack)
    context = RunContext(kind(**config.options), model, config, config.rounds, config.seeds[0], attackers)
    if fingerprint(context.first_model("", config.init)) != expected:
        raise UserError(f"its model '{config.model}' has another architecture than the coordinator's")
    if _constants(model, config) != constants:
        raise UserError(f"its model '{config.model}' starts from other weights than the coordinator's")
    return Assignment(context, config, schema, config.to_toml()), classes


def _measures_contribution(values: Mapping[str, Any]) -> bool:
    found = values.get("contribution", False)
    if not isinstance(found, bool):
        raise TypeError("contribution is neither true nor false")
    return found


def _constants(model: Model, config: RunSettings) -> str:
    """A digest of what does not train and of the file that a model starts from, which must be the same everywhere."""
    return model.constants_digest() + ("" if config.weights is None else checksum(config.weights))


@dataclass(frozen=True)
class RunTerms:
    """What a run asks of a site, as far as it can be read without executing any code that came with it."""

    method: str  # its name, or its file and class
    model: str
    seed: int
    rounds: int
    clip: float
    noise: float
    attack: str
    settings: str  # all that were given, as JSON
    secure_aggregation: bool = False
    secure_range: float = 64.0
    contribution: bool = False  # whether it is one of several runs that measure contributions


def read_terms(text: str) -> RunTerms:
    """The terms in a description; a method from a file cannot change the settings that every run has."""
    try:
        values: dict[str, Any] = json.loads(text)
        settings = dict(values["settings"])
        method = str(settings["method"])
        kind, name, own = (FedAvg, method, {}) if is_plugin(method) else parse_method(method)
        nested = {} if is_plugin(method) else dict(settings.pop("options", {}))
        shared = {key: value for key, value in settings.items() if key != "options"}
        config = make(kind, {**shared, **own, "options": nested, "method": name, "seeds": [int(values["seed"])]})
        given = json.dumps({"seed": values["seed"], **dict(values["settings"])}, sort_keys=True)
        contribution = _measures_contribution(values)
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"the run's description is not valid ({reason})") from None
    return RunTerms(
        name,
        str(config.model),
        config.seeds[0],
        config.rounds,
        config.clip,
        config.noise,
        config.attack,
        given,
        config.secure_aggregation,
        config.secure_range,
        contribution,
    )


def fingerprint(params: Params) -> str:
    """Twelve digits that are equal for models with the same names, shapes and types of tensors."""
    described = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(params.items())]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


# The user's own files


def _place_in_app(kind: str, name: str) -> str:
    """``FILE.py:NAME`` with the file's place in the Flower App; other names of methods and models unchanged."""
    if not is_plugin(name):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{PLUGINS}/{kind}_{Path(file).name}:{attribute}"


def _place_at_site(name: str, root: Path | None) -> str:
    """The reverse at a site, where the app lies in ``root``."""
    folder, _, file = name.partition("/")
    if root is None or folder != PLUGINS or "/" in file or "\\" in file:
        raise UserError(f"'{name}' is no file of this run's Flower App")
    return str(root / name)


def own_files(method: str, model: str | None) -> dict[str, Path]:
    """The user's files that a run needs, by their place in the Flower App."""
    named = {"method": method, "model": model or ""}
    return {
        _place_in_app(kind, file).rpartition(":")[0]: Path(plugin_file(file))
        for kind, name in named.items()
        if is_plugin(name)
        for file in [":".join(name.split(":")[:2])]
    }


def reject_local_imports(method: str, model: str | None) -> None:
    """Rejects a user's file that imports another one beside it, since only the named file travels."""
    for file in own_files(method, model).values():
        if (name := local_import(file)) is not None:
            raise UserError(
                f"{file}: imports '{name}' from beside it, which does not travel to the sites; move what it needs "
                f"into {file.name}, or install '{name.lstrip('.')}' as a package here and at every site"
            )
