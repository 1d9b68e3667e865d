"""Counts the modules of fedc2i that a command imports, and those in which it runs a function.

``python tests/count_modules.py run fedc2i --data digits --rounds 1`` prints both, and their names by package.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import fedc2i

HEAVY = ("torch", "matplotlib.figure", "safetensors.torch", "rich.console")
SOURCE = str(Path(fedc2i.__file__).parent)


def touched(arguments: list[str]) -> tuple[set[str], set[str]]:
    """The modules that ``fedc2i ARGUMENTS`` imports, and those of them that run a function; packages not counted."""
    for package in HEAVY:  # their own imports are not traced, which would take most of the time
        importlib.import_module(package)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED and code.co_name[0] != "<"  # no class body, no module
        if is_function and code.co_filename.startswith(SOURCE):
            files.add(code.co_filename)

    from fedc2i.cli.main import main

    sys.argv = ["fedc2i", *arguments]
    threading.settrace(note)
    sys.settrace(note)
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
    modules = {
        name: str(module.__file__)
        for name, module in sys.modules.items()
        if name.split(".")[0] == "fedc2i" and not hasattr(module, "__path__")
    }
    return set(modules), {name for name, file in modules.items() if file in files}


if __name__ == "__main__":
    imported, executed = touched(sys.argv[1:])
    print(f"{len(imported)} modules imported, {len(executed)} with a function that ran")
    for package, count in Counter(name.split(".")[1] for name in imported).most_common():
        own = sorted(name for name in imported if name.split(".")[1] == package)
        print(f"{package} ({count}):", ", ".join(f"{name}{'' if name in executed else ' -'}" for name in own))
