"""Methods and models as a user names them: ``fedc2i:gamma=2``, ``FILE.py:CLASS``, objects of Python."""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import cloudpickle

from fedc2i.core.errors import UserError, nearest
from fedc2i.core.files import is_plugin, load_plugin
from fedc2i.core.options import convert, options_of
from fedc2i.methods import registry
from fedc2i.methods.base import Method
from fedc2i.models import named
from fedc2i.models.model import Model


def key_of(method: Method) -> str:
    """The method with the options that differ from its defaults, as typed on a command line."""
    differs = said(method)
    return f"{method.name}:{','.join(differs)}" if differs else method.name


def said(method: Method) -> list[str]:
    """The options that differ from the defaults, each as ``name=value``."""
    options = options_of(type(method)).items()
    return [f"{name}={value}" for name, own in options if (value := getattr(method, name)) != own.default]


def parse(wanted: str | Method) -> tuple[type[Method], str, dict[str, Any]]:
    """The method's class, its name as the user wrote it, and the options that came with it.

    Raises:
        UserError: if there is no such method, or it has no such option.
    """
    if isinstance(wanted, Method):
        _require_name(type(wanted), type(wanted).__name__)
        return type(wanted), wanted.name, asdict(wanted)
    if not isinstance(wanted, str):
        raise UserError(f"a method is a name such as fedc2i or a fedc2i.Method, got '{wanted}'")
    if is_plugin(wanted):
        file, _, rest = wanted.partition(".py:")
        attribute, _, options = rest.partition(":")
        name = f"{file}.py:{attribute}"
        kind = _load(name)
        if not (isinstance(kind, type) and issubclass(kind, Method)):
            raise UserError(f"{name} is not a subclass of fedc2i.Method")
    else:
        name, _, options = wanted.partition(":")
        if name.endswith(".toml"):
            raise UserError(f"'{name}' is no method; a file of settings is given as --config {name}")
        kind = registry.get(name)
    _require_name(kind, name)
    hints = typing.get_type_hints(kind)
    own = {}
    for entry in filter(None, options.split(",")):
        key, equals, value = entry.partition("=")
        if not equals or key not in option_names(kind):
            allowed = ", ".join(option_names(kind)) or "none"
            hint = nearest(key, option_names(kind))
            raise UserError(f"'{wanted}': no option '{key}'{hint}, allowed are {allowed}, written name=value")
        own[key] = convert(value, hints[key], f"'{wanted}': {key}")
    return kind, name, own


def is_listed(method: Method) -> bool:
    """Whether the method's name alone leads to its class in any process."""
    return type(method).__module__.startswith("fedc2i.methods.")


def _require_name(kind: type[Method], where: str) -> None:
    if not (vars(kind).get("name") and vars(kind).get("title")):  # inherited ones would pass it off as its parent
        raise UserError(f"{where} needs its own class attributes name and title")


def option_names(kind: type[Method]) -> list[str]:
    """What can be set of a method."""
    return list(options_of(kind))


def build(name: str, classes: Sequence[str], image_shape: tuple[int, int, int]) -> Model:
    """A model by its name or ``FILE.py:FUNCTION``, fitted to the data.

    Raises:
        UserError: if there is no such model, or the function fails.
    """
    if not is_plugin(name):
        return named.build(name, len(classes), image_shape)
    try:
        built = _load(name)(len(classes), image_shape)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{name}(classes, image_shape): {type(error).__name__}: {error}") from error
    if not isinstance(built, Model):
        raise UserError(f"{name} must return fedc2i.split(module, head=...), got {type(built).__name__}")
    return built


def _load(name: str) -> Any:
    """What FILE.py:NAME names, sent to worker processes by value: they cannot import it."""
    found, module = load_plugin(name)
    cloudpickle.register_pickle_by_value(module)
    return found
