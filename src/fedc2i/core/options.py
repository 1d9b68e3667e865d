"""Options and settings: dataclass fields with a default, a line of help and a range, readable from text.

An `option` belongs to a method, a `setting` to a run. A setting also states what it affects, its `Effect`: cache keys,
resume rules, command-line flags, what is sent to sites and the reference page derive from it, by `names` and `flags`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedc2i.core.errors import UserError, nearest, one_line

Command = Literal["run", "paper", "flower-local", "coordinator", "site"]
_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}

type_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)  # of a dataclass's fields


@dataclass(frozen=True)
class Limits:
    """The range of a number: ``low`` and ``high`` belong to it, ``above`` and ``below`` do not; never nan or inf."""

    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None

    def __contains__(self, value: float) -> bool:
        return (
            math.isfinite(value)
            and (self.low is None or value >= self.low)
            and (self.high is None or value <= self.high)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        words = {"of at least": self.low, "above": self.above, "at most": self.high, "below": self.below}
        return " and ".join(f"{word} {limit:.12g}" for word, limit in words.items() if limit is not None)


@dataclass(frozen=True)
class Effect:
    """What a setting affects.

    Attributes:
        numbers: whether it decides the numbers of a single seed; then it is part of the cache key.
        resume: whether a resumed run must have the same value, or may have another.
        scope: ``run``, the same at every site, which the coordinator decides; ``data``, where data comes from, which at
            a real site is that site's own; ``machine``, how one machine computes.
        engine: the one engine it is for, in process or Flower; none: all.
        preset: whether a data set's preset comes before the default.
        flags: the commands that have a flag of its name; all take it as ``--set NAME=VALUE``.
        flag_help: the flag's help text, where that differs.
    """

    numbers: bool = True
    resume: Literal["same", "free"] = "same"
    scope: Literal["run", "data", "machine"] = "run"
    engine: Literal["inprocess", "flower"] | None = None
    preset: bool = False
    flags: tuple[Command, ...] = ()
    flag_help: str = ""


@dataclass(frozen=True)
class Option:
    """One option of a dataclass, for listings and messages."""

    name: str
    default: Any
    allowed: str
    about: str


@dataclass(frozen=True)
class Flag:
    """A command-line flag of a setting; its value is text, which the settings record converts and checks."""

    name: str
    flag: str
    help: str
    is_switch: bool = False  # it has no value: given, it means true


def option(default: Any, about: str, *, effect: Effect | None = None, **limits: float) -> Any:
    """A dataclass field with a default, a one-line explanation and, for a number, its range (see `Limits`).

    `validate` checks the range and the type: a ``Literal``, true or false, a whole number, a number or text.
    """
    metadata = {"about": about, "limits": Limits(**limits), "effect": effect}
    return dataclasses.field(default=default, metadata=metadata)


def setting(default: Any, about: str, **more: Any) -> Any:
    """A field of a settings record: like `option`, with the attributes of `Effect` beside those of `Limits`."""
    limits = {field.name: more.pop(field.name) for field in dataclasses.fields(Limits) if field.name in more}
    return option(default, about, effect=Effect(**more), **limits)


def options_of(cls: type) -> dict[str, Option]:
    """Every option of a dataclass, by name; keyword-only ones, which are those that all methods have, come last."""
    hints = type_hints(cls)
    return {
        field.name: Option(field.name, field.default, _allowed(field, hints), field.metadata.get("about", ""))
        for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
    }


def effects(cls: type) -> dict[str, Effect]:
    """What each setting of a record affects, by name; settings of the most derived class come first."""
    found = {field.name: field.metadata.get("effect") for field in dataclasses.fields(cls)}
    layers = [vars(layer).get("__annotations__", {}) for layer in cls.__mro__]
    return {name: effect for layer in layers for name in layer if (effect := found.get(name)) is not None}


def names(cls: type, **wanted: Any) -> tuple[str, ...]:
    """The settings with these effects, such as ``scope="data"``."""
    return tuple(
        name
        for name, effect in effects(cls).items()
        if all(getattr(effect, attribute) == value for attribute, value in wanted.items())
    )


def flags(cls: type, command: Command) -> tuple[Flag, ...]:
    """The flags that a command has for settings; ``site`` has one for each that is about data."""
    about = {field.name: field.metadata.get("about", "") for field in dataclasses.fields(cls)}
    return tuple(
        Flag(
            name,
            f"--{name.replace('_', '-')}",
            effect.flag_help or f"{about[name][0].upper()}{about[name][1:]}.",
            type_hints(cls)[name] is bool,
        )
        for name, effect in effects(cls).items()
        if command in effect.flags or (command == "site" and effect.scope == "data")
    )


def validate(instance: Any) -> None:
    """Checks every field made by `option`, for ``__post_init__``; a `UserError` says what is allowed.

    A whole number in a field of numbers becomes a float, and text in a field whose type can parse it is parsed.
    """
    hints = type_hints(type(instance))
    for field in dataclasses.fields(instance):
        if "limits" not in field.metadata:
            continue
        value = getattr(instance, field.name)
        for alternative in _kinds(hints[field.name]):
            try:
                accepted = _accept(value, alternative, field.metadata["limits"])
            except (ValueError, TypeError, OverflowError):
                continue
            object.__setattr__(instance, field.name, accepted)
            break
        else:
            hint = nearest(value, _choices(hints[field.name]))
            raise UserError(f"{field.name} must be {_allowed(field, hints)}, got '{one_line(value)}'{hint}")


def convert(value: Any, cls: type, name: str, where: str = "") -> Any:
    """A value from a command line (text) or a TOML file (typed) as the type of a dataclass's field.

    Raises:
        UserError: if it is not one; the line names the field, after ``where``, and what it allows.
    """
    for kind in _kinds(type_hints(cls)[name]):
        try:
            return _convert_one(value, kind)
        except (ValueError, TypeError, KeyError, OverflowError):
            continue
    hint = nearest(value, _choices(type_hints(cls)[name]))
    raise UserError(f"{where}{name} must be {options_of(cls)[name].allowed}, got '{one_line(value)}'{hint}")


def describe(hint: Any, limits: Limits | None = None) -> str:
    """A type and its range in words."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(describe(part, limits) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return "whole numbers such as 0,1,2 or 0-9"
    if limits is not None and hint in (int, float):
        return f"a {'whole' if hint is int else 'finite'} number {limits}".rstrip()
    names = {float: "a number", int: "a whole number", bool: "true | false", str: "text", type(None): "none"}
    return names.get(hint, getattr(hint, "allowed", getattr(hint, "__name__", str(hint))))


def _allowed(field: dataclasses.Field[Any], hints: dict[str, Any]) -> str:
    return describe(hints[field.name], field.metadata.get("limits"))


def _choices(hint: Any) -> list[str]:
    """The words that a field allows."""
    return [str(choice) for kind in _kinds(hint) if get_origin(kind) is Literal for choice in get_args(kind)]


def _kinds(hint: Any) -> list[Any]:
    """The alternatives of a type: "none" before text, which it is as well."""
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return sorted(kinds, key=lambda kind: kind is not type(None))


def _accept(value: Any, kind: Any, limits: Limits) -> Any:
    """A Python value in its stored form; unlike `_convert_one`, text is not a number here."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif kind in (int, float):
        if isinstance(value, (int, kind)) and not isinstance(value, bool) and value in limits:
            return kind(value)
    elif isinstance(value, get_origin(kind) or kind):
        return value
    elif hasattr(kind, "parse"):
        return kind.parse(value)
    raise ValueError


def _convert_one(value: Any, kind: Any) -> Any:
    text = str(value)
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is bool:
        return _TRUTH[text.lower()]
    if kind is type(None) and (value is None or text.lower() == "none"):
        return None
    if hasattr(kind, "parse"):  # a type that parses itself, and also says what is `allowed`
        return kind.parse(value)
    if kind is str and not isinstance(value, (dict, list, tuple)):
        return text
    if kind in (int, float) and not isinstance(value, bool):
        number = float(value)
        if kind is float or number == int(number):
            return kind(number)
    raise ValueError
