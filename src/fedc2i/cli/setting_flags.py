"""Flags of a command for the settings of a run, derived from where the settings are declared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from fedc2i.core.options import Command, flags
from fedc2i.runs.settings import RunSettings


def setting_flags(command: Command) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a typer command: its parameter ``settings`` becomes the flags that ``command`` has for settings.

    The function is given ``settings``, the values by name as text, of the flags that were used.
    """
    offered = flags(RunSettings, command)

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(function, eval_str=True).parameters.values():
            if own.name != "settings":
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))
                continue
            for flag in offered:
                kind = Annotated[str | None, typer.Option(flag.flag, help=flag.help, show_default=False)]
                parameters.append(
                    inspect.Parameter(flag.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
                )

        @functools.wraps(function)
        def with_flags(**given: Any) -> None:
            used = {flag.name: given.pop(flag.name) for flag in offered}
            function(settings={name: value for name, value in used.items() if value is not None}, **given)

        with_flags.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {own.name: own.annotation for own in parameters}
        return with_flags

    return decorate
