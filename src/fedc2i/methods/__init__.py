"""The methods, one file each. A new file in this folder is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from fedc2i.errors import UserError, nearest, one_line
from fedc2i.methods.base import Download, Method, Phase, Probe, Site, Uploads

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")


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


__all__ = ["Download", "Method", "Phase", "Probe", "Site", "Uploads", "get"]
