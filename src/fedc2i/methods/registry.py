"""Methods by name. A new file in this folder is found by itself, fastest if it is named after its method."""

from __future__ import annotations

from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.methods.base import Method, import_modules


def find(name: str) -> type[Method] | None:
    """The method of that name, if there is one; its own module is imported, all of them if it has none."""
    if name not in Method.registry:
        import_modules(name.replace("-", "_"))
    if name not in Method.registry:
        import_modules()
    return Method.registry.get(name)


def get(name: str) -> type[Method]:
    """The method of that name; a `UserError` that lists those there are if there is none."""
    if (found := find(name)) is None:
        hint = nearest(name, names())
        raise UserError(f"unknown method '{one_line(name)}'{hint}, allowed are {', '.join(names())} and FILE.py:CLASS")
    return found


def names() -> list[str]:
    """Every method there is, in alphabetical order."""
    import_modules()
    return sorted(Method.registry)
