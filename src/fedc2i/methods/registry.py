"""Methods by name. A new file in this folder is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from fedc2i import methods
from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.methods.base import Method

for _module in pkgutil.iter_modules(methods.__path__):
    if not _module.ispkg and _module.name != "registry":
        importlib.import_module(f"{methods.__name__}.{_module.name}")


def get(name: str) -> type[Method]:
    """The method of that name.

    Raises:
        UserError: if there is none; the message lists those there are.
    """
    if name not in Method.registry:
        allowed = ", ".join(sorted(Method.registry))
        hint = nearest(name, Method.registry)
        raise UserError(f"unknown method '{one_line(name)}'{hint}, allowed are {allowed} and FILE.py:CLASS")
    return Method.registry[name]
