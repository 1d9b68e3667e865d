"""The version of fedc2i, and those of Python and the packages that decide numbers."""

from __future__ import annotations

import functools
import platform

__version__ = "0.1.0"


@functools.cache
def versions(engine: str = "inprocess") -> dict[str, str]:
    """The versions by package; Flower's is among them if that engine was used."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"fedc2i": __version__, "python": platform.python_version()}
    carrier = () if engine == "inprocess" else ("flwr",)
    for package in ("torch", "numpy", "scikit-learn", "pillow", "matplotlib", *carrier):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # e.g. a torch that was built by hand
            found[package] = "unknown"
    return found
