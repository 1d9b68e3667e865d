"""How often layers were computed by our own GPU kernels; nothing is compiled to find out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from torch import Tensor

_Given = ParamSpec("_Given")
_uses = 0


def counted(layer: Callable[_Given, Tensor]) -> Callable[_Given, Tensor]:
    """A layer by our own kernels, whose calls are counted."""

    @wraps(layer)
    def computed(*given: _Given.args, **more: _Given.kwargs) -> Tensor:
        global _uses
        _uses += 1
        return layer(*given, **more)

    return computed


@contextmanager
def trial() -> Iterator[None]:
    """Calls within this context do not count."""
    global _uses
    before = _uses
    try:
        yield
    finally:
        _uses = before


def uses() -> int:
    """The count of calls in this process."""
    return _uses
