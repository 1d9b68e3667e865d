"""What a run is, as text: how sites on other machines learn what to do."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedc2i.core import plugins
from fedc2i.core.errors import UserError, one_line
from fedc2i.core.version import __version__
from fedc2i.engine import attacks
from fedc2i.engine.client import RunContext
from fedc2i.flower.messages import MOST_CLASSES, MOST_SIDE
from fedc2i.flower.site import Assignment, fingerprint
from fedc2i.runs.plan import Plan
from fedc2i.runs.settings import make
from fedc2i.runs.specs import build, parse

PLUGINS = "plugins"  # a folder of the Flower App
NOT_FOR_SITES = ("data", "data_dir", "partition", "device", "seeds", "executor", "workers", "clients_at_once")


def describe(plan: Plan, seed: int) -> str:
    """A plan with one seed.

    Raises:
        UserError: for attackers in a run with noise, which would send something that has none.
    """
    if plan.config.attack and plan.config.noise:
        raise UserError("over real sites attack and noise exclude each other: what an attacker sends has no noise")
    values = {
        name: value for name, value in vars(plan.config).items() if name not in NOT_FOR_SITES and value is not None
    }
    values |= {name: _in_app(name, str(values[name])) for name in ("method", "model")}
    values["attack"] = attacks.resolved(plan.config.attack, plan.federation.names, seed)
    recipe = RunContext(plan.method, plan.model, plan.config.settings().training, plan.config.settings().rounds, seed)
    return json.dumps(
        {
            "version": __version__,
            "settings": {**values, "options": _said(plan.config.options)},
            "seed": seed,
            "classes": plan.federation.classes,
            "image": plan.federation.image_shape,
            "fingerprint": fingerprint(recipe.first_model("", plan.config.init)),
        },
        default=str,
    )


def _in_app(kind: str, name: str) -> str:
    """A user's own file as it lies in the Flower App, see `files`."""
    if not plugins.is_plugin(name):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{PLUGINS}/{kind}_{Path(file).name}:{attribute}"


def files(method: str, model: str | None) -> dict[str, Path]:
    """The user's own files that a run needs, by their place in the Flower App."""
    named = {"method": method, "model": model or ""}
    return {
        _in_app(kind, file).rpartition(":")[0]: Path(plugins.file_of(file))
        for kind, name in named.items()
        if plugins.is_plugin(name)
        for file in [":".join(name.split(":")[:2])]
    }


def refuse_neighbours(method: str, model: str | None) -> None:
    """Refuses a user's own file that needs another one beside it: only the file that was named travels.

    Raises:
        UserError: with the other's name, and what to do.
    """
    for file in files(method, model).values():
        for name in dict.fromkeys(_imports(file)):
            if name.startswith(".") or _is_beside(file, name):
                raise UserError(
                    f"{file}: imports '{name}' from beside it, which does not travel to the sites; move what it needs "
                    f"into {file.name}, or install '{name.lstrip('.')}' as a package here and at every site"
                )


def _imports(file: Path) -> Iterator[str]:
    """What a file imports, wherever in it, by the first part of the name; with dots before it if relative."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return  # whoever loads it says what is wrong with it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or node.names[0].name).split(".")[0]


def _is_beside(file: Path, name: str) -> bool:
    """Whether a module would be found beside the file, and is not installed."""
    folder = file.absolute().parent
    if not (folder / f"{name}.py").is_file() and not any((folder / name).glob("*.py")):
        return False
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    if any(place and folder not in Path(place).absolute().parents for place in places):
        return False
    known = importlib.metadata.packages_distributions()
    return name not in known and not any(True for _ in importlib.metadata.distributions(name=name))


def _at_site(name: str, root: Path | None) -> str:
    """Where such a file lies at a site; no other file of the site's is executed, whatever a coordinator says."""
    folder, _, file = name.partition("/")
    if root is None or folder != PLUGINS or "/" in file or "\\" in file:
        raise UserError(f"'{name}' is no file of this run's Flower App")
    return str(root / name)


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def understand(text: str, root: Path | None = None) -> tuple[Assignment, tuple[str, ...]]:
    """The assignment, and the classes' names in the order of their labels.

    Args:
        text: from `describe`.
        root: the folder of the Flower App, in which files named in it lie.

    Raises:
        UserError: if this site cannot do it: another version, an unknown method, a model of another shape.
    """
    try:
        said: dict[str, Any] = json.loads(text)
        settings, classes = dict(said["settings"]), tuple(map(str, said["classes"]))
        channels, height, width = map(int, said["image"])
        for name in ("method", "model"):
            if plugins.is_plugin(str(settings[name])):
                settings[name] = _at_site(str(settings[name]), root)
        kind, name, own = parse(str(settings["method"]))
        config = make(kind, {**settings, **own, "method": name, "seeds": [int(said["seed"])]})
        version, expected = str(said["version"]), str(said["fingerprint"])
        if channels != 3 or not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE and len(classes) <= MOST_CLASSES):
            raise ValueError(f"{len(classes):,} classes of images {channels}x{height}x{width}")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"the run's description is not understood ({reason})") from None
    if version.split(".")[:2] != __version__.split(".")[:2]:
        raise UserError(f"this site has fedc2i {__version__}, the coordinator {one_line(version, 40)}")
    model = build(str(config.model), classes, (channels, height, width))
    attackers = attacks.read_resolved(config.attack)
    training, rounds = config.settings().training, int(config.rounds or 0)
    recipe = RunContext(kind(**config.options), model, training, rounds, config.seeds[0], attackers)
    if fingerprint(recipe.first_model("", config.init)) != expected:
        raise UserError(f"its model '{config.model}' is of another architecture than the coordinator's")
    return Assignment(recipe, replace(config.settings(), executor="looped")), classes
