"""Options of methods: dataclass fields with a word of help, readable from text and listed by ``fedc2i methods``."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedc2i.core.errors import UserError, one_line


def option(default: Any, about: str) -> Any:
    """A dataclass field with a default and a one-line explanation."""
    return dataclasses.field(default=default, metadata={"about": about})


@dataclass(frozen=True)
class Option:
    """One option of a dataclass, for listings and messages."""

    name: str
    default: Any
    allowed: str
    about: str


def options_of(cls: type) -> dict[str, Option]:
    """Every option of a dataclass, by name; keyword-only ones, which are those that all methods have, come last."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: Option(field.name, field.default, describe(hints[field.name]), field.metadata.get("about", ""))
        for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
    }


def describe(hint: Any) -> str:
    """A type as a person would say it."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(describe(part) for part in get_args(hint))
    names = {float: "number", int: "integer", bool: "true | false", str: "text", type(None): "none"}
    return names.get(hint, getattr(hint, "allowed", getattr(hint, "__name__", str(hint))))


def convert(value: Any, hint: Any, where: str) -> Any:
    """A value from a command line (text) or a TOML file (typed) as the field's type.

    Raises:
        UserError: if it does not fit; the message says what is allowed.
    """
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    for kind in sorted(kinds, key=lambda kind: kind is not type(None)):  # "none" before text, which it is as well
        try:
            return _convert_one(value, kind)
        except (ValueError, TypeError, OverflowError):
            continue
    raise UserError(f"{where} must be {describe(hint)}, got '{one_line(value)}'")


def _convert_one(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        for choice in get_args(kind):
            if str(value) == str(choice):
                return choice
        raise ValueError
    if kind is bool:
        truth = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(value).lower() not in truth:
            raise ValueError
        return truth[str(value).lower()]
    if kind is type(None):
        if value is None or str(value).lower() == "none":
            return None
        raise ValueError
    if kind is int and (isinstance(value, bool) or float(value) != int(float(value))):
        raise ValueError
    if isinstance(value, bool) and kind is not str:
        raise ValueError
    if hasattr(kind, "parse"):  # a type of its own, which also says what is `allowed`
        return kind.parse(value)
    if kind is str and isinstance(value, (dict, list, tuple)):
        raise ValueError
    if kind in (int, float, str):
        return kind(value) if kind is not int else int(float(value))
    raise TypeError


def check_choice(instance: Any, *names: str) -> None:
    """Refuses a value outside a field's ``Literal``; for ``__post_init__``, so that Python users are checked too."""
    hints = typing.get_type_hints(type(instance))
    for name in names:
        value = getattr(instance, name)
        if value not in get_args(hints[name]):
            raise UserError(f"{name} must be {describe(hints[name])}, got '{value}'")


def check_at_least(instance: Any, low: float, *names: str) -> None:
    """Refuses a number below ``low``, or one that is not finite."""
    for name in names:
        value = getattr(instance, name)
        if not isinstance(value, (int, float)) or not low <= value < float("inf"):
            raise UserError(f"{name} must be a finite number of at least {low:g}, got {value}")


def check_whole(instance: Any, low: int, *names: str, also: str | None = None) -> None:
    """Refuses anything but a whole number of at least ``low``, or the word ``also``."""
    for name in names:
        value = getattr(instance, name)
        if value != also and not (type(value) is int and value >= low):
            word = "" if also is None else f", or {also}"
            raise UserError(f"{name} must be a whole number of at least {low}{word}, got '{value}'")
