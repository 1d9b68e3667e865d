"""Options: dataclass fields with a default, a line of help and a range, checked in one place and readable from text."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from fedc2i.core.errors import UserError, one_line


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


def option(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    **more: Any,
) -> Any:
    """A dataclass field with a default, a one-line explanation and, for a number, its range.

    `validate` checks the range and the type: a ``Literal``, true or false, a whole number, a number or text. ``more``
    becomes further metadata of the field.
    """
    limits = Limits(low, high, above, below)
    return dataclasses.field(default=default, metadata={"about": about, "limits": limits, **more})


@dataclass(frozen=True)
class Option:
    """One option of a dataclass, for listings and messages."""

    name: str
    default: Any
    allowed: str
    about: str


def options_of(cls: type) -> dict[str, Option]:
    """Every option of a dataclass, by name; keyword-only ones, which are those that all methods have, come last."""
    hints = type_hints(cls)
    return {
        field.name: Option(field.name, field.default, _allowed(field, hints), field.metadata.get("about", ""))
        for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))
    }


def type_hints(cls: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name."""
    return _cached_hints(cls)


_cached_hints = functools.cache(typing.get_type_hints)


def validate(instance: Any) -> None:
    """Checks every field made by `option`; for ``__post_init__``.

    A whole number in a field of numbers becomes a float, and text in a field whose type can parse it is parsed.

    Raises:
        UserError: for a value of another type or outside its range; the message says what is allowed.
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
            raise UserError(f"{field.name} must be {_allowed(field, hints)}, got '{one_line(value)}'")


def describe(hint: Any, limits: Limits | None = None) -> str:
    """A type and its range in words."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (types.UnionType, typing.Union):
        return " | ".join(describe(part, limits) for part in get_args(hint))
    if limits is not None and hint in (int, float):
        return f"a {'whole' if hint is int else 'finite'} number {limits}".rstrip()
    names = {float: "number", int: "integer", bool: "true | false", str: "text", type(None): "none"}
    return names.get(hint, getattr(hint, "allowed", getattr(hint, "__name__", str(hint))))


def convert(value: Any, hint: Any, where: str) -> Any:
    """A value from a command line (text) or a TOML file (typed) as the field's type.

    Raises:
        UserError: if it does not fit; the message says what is allowed.
    """
    for kind in _kinds(hint):
        try:
            return _convert_one(value, kind)
        except (ValueError, TypeError, OverflowError):
            continue
    raise UserError(f"{where} must be {describe(hint)}, got '{one_line(value)}'")


def _allowed(field: dataclasses.Field[Any], hints: dict[str, Any]) -> str:
    return describe(hints[field.name], field.metadata.get("limits"))


def _kinds(hint: Any) -> list[Any]:
    """The alternatives of a type: "none" before text, which it is as well."""
    kinds = get_args(hint) if get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    return sorted(kinds, key=lambda kind: kind is not type(None))


def _accept(value: Any, kind: Any, limits: Limits) -> Any:
    """A Python value in its stored form; unlike `_convert_one`, text is not a number here."""
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise ValueError
    if kind in (int, float):
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or value not in limits:
            raise ValueError
        return kind(value)
    if isinstance(value, get_origin(kind) or kind):
        return value
    if hasattr(kind, "parse"):
        return kind.parse(value)
    raise ValueError


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
    if hasattr(kind, "parse"):  # a type that parses itself, and also says what is `allowed`
        return kind.parse(value)
    if kind is str and isinstance(value, (dict, list, tuple)):
        raise ValueError
    if kind in (int, float, str):
        return kind(value) if kind is not int else int(float(value))
    raise TypeError
