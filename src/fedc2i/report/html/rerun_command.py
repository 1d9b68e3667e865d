"""The command that repeats a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from fedc2i.core.files import is_plugin
from fedc2i.core.options import flags, names, options_of
from fedc2i.data.sources import SOURCES
from fedc2i.methods.base import Method
from fedc2i.models import named
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, run_settings

AT_SITES = {*names(RunSettings, scope="data"), *names(RunSettings, scope="machine")}  # decided by each site
ALWAYS = {*names(RunSettings, preset=True), "data", "seeds"}  # said even where they are the default


@dataclass(frozen=True)
class RerunCommand:
    """How to run it again.

    Attributes:
        command: to be typed in a shell.
        note: what the command cannot repeat by itself; empty if it repeats everything.
        from_file: whether ``fedc2i run --config`` takes the run's configuration.
    """

    command: str
    note: str = ""
    from_file: bool = True


def rerun_command(result: Result) -> RerunCommand:
    """The command line with every setting and option that differs from its default."""
    config, default = result.config, RunSettings()
    real = config.engine == "flower"
    words = ["fedc2i", "coordinator", "start", "HUB"] if real else ["fedc2i", "run"]
    words.append(config.method)
    pairs: list[str] = []
    flagged = {own.name: own.flag for own in flags(RunSettings, "coordinator" if real else "run")}
    for name in run_settings():
        value = getattr(config, name)
        if real and name in {*AT_SITES, "data_seed", "engine"}:
            continue
        if name in flagged:
            if value is not None and (real or name in ALWAYS or value != getattr(default, name)):
                words += [flagged[name], _text(value)]
        elif value != getattr(default, name):
            pairs.append(f"{name}={_text(value)}")
    pairs += [f"{name}={_text(value)}" for name, value in _own_options(result.method)]
    for pair in pairs:
        words += ["--set", pair]
    return RerunCommand(shlex.join(words), _note(config), not real)


def _own_options(method: Method) -> list[tuple[str, Any]]:
    own = options_of(type(method))
    return [(name, getattr(method, name)) for name in own if getattr(method, name) != own[name].default]


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _note(config: RunSettings) -> str:
    if config.engine == "flower":
        return (
            "The data lies at the sites: HUB is the coordinator's folder, and the same sites must be admitted and up. "
            "A trial on one machine was started by `fedc2i flower-local`, which takes the same options."
        )
    lost = [
        word
        for word, known in (
            ("data", config.data.partition(":")[0] in SOURCES),
            ("model", config.model in named.NAMES or is_plugin(str(config.model))),
        )
        if not known
    ]
    if lost:
        return f"The {' and the '.join(lost)} came from a Python program, which must be run again instead."
    if config.data.partition(":")[0] in ("folder", "arrays"):
        return "The folder named as data must hold the same files; the checksums below say whether it does."
    return ""
