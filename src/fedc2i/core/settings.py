"""How a setting of a run is declared: once, as a dataclass field that states what the setting affects.

Cache keys, resume rules, command-line flags, what is sent to sites and the reference page derive from these fields, by
`names` and `flags`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from fedc2i.core.options import option

Command = Literal["run", "flower-local", "coordinator"]


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
class Flag:
    """A command-line flag of a setting; its value is text, which the settings record converts and checks."""

    name: str
    flag: str
    help: str


def setting(
    default: Any,
    about: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    **effect: Any,
) -> Any:
    """A field of a settings record: like `option`, with what it affects (the attributes of `Effect`)."""
    return option(default, about, low=low, high=high, above=above, below=below, effect=Effect(**effect))


def effects(cls: type) -> dict[str, Effect]:
    """What each setting of a record affects, by name; settings of the most derived class come first."""
    found = {field.name: field.metadata["effect"] for field in dataclasses.fields(cls) if "effect" in field.metadata}
    layers = [vars(layer).get("__annotations__", {}) for layer in cls.__mro__]
    return {name: found[name] for layer in layers for name in layer if name in found}


def names(cls: type, **wanted: Any) -> tuple[str, ...]:
    """The settings with these effects, such as ``scope="data"``."""
    return tuple(
        name
        for name, effect in effects(cls).items()
        if all(getattr(effect, attribute) == value for attribute, value in wanted.items())
    )


def flags(cls: type, command: Command) -> tuple[Flag, ...]:
    """The flags that a command has for settings."""
    about = {field.name: field.metadata.get("about", "") for field in dataclasses.fields(cls)}
    return tuple(
        Flag(name, f"--{name.replace('_', '-')}", effect.flag_help or f"{about[name][0].upper()}{about[name][1:]}.")
        for name, effect in effects(cls).items()
        if command in effect.flags
    )
