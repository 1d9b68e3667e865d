"""The description of a run that sites receive: method, model, settings and classes as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import is_plugin
from fedc2i.core.options import names
from fedc2i.core.params import Params
from fedc2i.core.version import __version__
from fedc2i.deploy.app_files import place_at_site, place_in_app
from fedc2i.engine import attacks
from fedc2i.engine.client import RunContext
from fedc2i.flower.message_format import MOST_CLASSES, MOST_SIDE
from fedc2i.flower.site import Assignment
from fedc2i.runs.plan import Plan, build_model, parse_method
from fedc2i.runs.settings import RunSettings, make


def describe(plan: Plan, seed: int) -> str:
    """Describes a plan with one seed."""
    if plan.config.attack and plan.config.noise:
        raise UserError("over real sites attack and noise exclude each other: what an attacker sends has no noise")
    sent = [name for name in names(RunSettings, scope="run") if name != "seeds"]
    values = _given({name: getattr(plan.config, name) for name in sent})
    values |= {name: place_in_app(name, str(values[name])) for name in ("method", "model")}
    values["attack"] = attacks.resolved(plan.config.attack, plan.federation.names, seed)
    context = RunContext(plan.method, plan.model, plan.config, plan.config.rounds, seed)
    return json.dumps(
        {
            "version": __version__,
            "settings": {**values, "options": _given(plan.config.options)},
            "seed": seed,
            "classes": plan.federation.classes,
            "image": plan.federation.image_shape,
            "fingerprint": fingerprint(context.first_model("", plan.config.init)),
        },
        default=str,
    )


def understand(text: str, root: Path | None = None) -> tuple[Assignment, tuple[str, ...]]:
    """Reads a description; returns the assignment, and the classes' names in the order of their labels.

    Args:
        text: from `describe`; it may come from anyone who poses as the coordinator, so everything is checked.
        root: the folder of the Flower App, with the user's own files.

    Raises:
        UserError: for another version, an unknown setting, a model with other shapes, or a damaged text.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        settings, classes = dict(values["settings"]), tuple(map(str, values["classes"]))
        channels, height, width = map(int, values["image"])
        for name in ("method", "model"):
            if is_plugin(str(settings[name])):
                settings[name] = place_at_site(str(settings[name]), root)
        kind, name, own = parse_method(str(settings["method"]))
        config = make(kind, {**settings, **own, "method": name, "seeds": [int(values["seed"])]})
        version, expected = str(values["version"]), str(values["fingerprint"])
        if channels != 3 or not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE and len(classes) <= MOST_CLASSES):
            raise ValueError(f"{len(classes):,} classes of images {channels}x{height}x{width}")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"the run's description is not valid ({reason})") from None
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise UserError(f"this site has fedc2i {__version__}, the coordinator {one_line(version, 40)}")
    model = build_model(str(config.model), classes, (channels, height, width))
    attackers = attacks.read_resolved(config.attack)
    context = RunContext(kind(**config.options), model, config, config.rounds, config.seeds[0], attackers)
    if fingerprint(context.first_model("", config.init)) != expected:
        raise UserError(f"its model '{config.model}' has another architecture than the coordinator's")
    return Assignment(context, config), classes


def fingerprint(params: Params) -> str:
    """Twelve digits that are equal for models with the same names, shapes and types of tensors."""
    described = [(name, str(tensor.dtype), list(tensor.shape)) for name, tensor in sorted(params.items())]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:12]


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
