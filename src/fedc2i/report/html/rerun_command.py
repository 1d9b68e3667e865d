"""The command that repeats a run."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

from fedc2i.core.files import is_plugin
from fedc2i.core.options import flags, names, options_of
from fedc2i.data.sources import SOURCES
from fedc2i.models import networks
from fedc2i.runs.results import Result
from fedc2i.runs.settings import RunSettings, run_settings

AT_SITES = {*names(RunSettings, scope="data"), *names(RunSettings, scope="machine")}  # decided by each site
ALWAYS = {  # given even where they are the default: what presets decide, the data, and the seeds
    *names(RunSettings, preset=True),
    *names(RunSettings, scope="data"),
    *names(RunSettings, scope="run", numbers=False),
}


class RerunCommand(NamedTuple):
    """How to run it again: a shell command, what it cannot repeat, and whether ``run --config`` takes the settings."""

    command: str
    note: str
    from_file: bool


def rerun_command(result: Result) -> RerunCommand:
    """The command line with every setting and option that differs from its default."""
    config = result.config
    real = config.engine == "flower"
    default = RunSettings(engine="flower") if real else RunSettings()
    words = ["fedc2i", "coordinator", "start", "HUB"] if real else ["fedc2i", "run"]
    words.append(config.method)
    pairs: list[str] = []
    flagged = {own.name: own.flag for own in flags(RunSettings, "coordinator" if real else "run")}
    for name in run_settings():
        value, usual = getattr(config, name), getattr(default, name)
        if real and name in AT_SITES:
            continue
        if name in flagged:
            if isinstance(value, bool):
                words += [flagged[name]] * value
            elif value is not None and (real or name in ALWAYS or value != usual):
                words += [flagged[name], _text(value)]
        elif value != usual:
            pairs.append(f"{name}={_text(value)}")
    for name, option in options_of(type(result.method)).items():
        # What is read back of a user's own method has the run's values as its defaults.
        if is_plugin(config.method) or getattr(result.method, name) != option.default:
            pairs.append(f"{name}={_text(getattr(result.method, name))}")
    for pair in pairs:
        words += ["--set", pair]
    return RerunCommand(shlex.join(words), _note(result), not real)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _note(result: Result) -> str:
    config = result.config
    if config.engine == "flower":
        return (
            "The data lies at the sites: HUB is the coordinator's folder, and the same sites must be admitted and up. "
            "A trial on one machine was started by `fedc2i flower-local`, which takes the same options."
        )
    source = config.data.partition(":")[0]
    model = str(config.model)
    named = {  # by a word that a command understands; earlier versions did not store what was given
        "data": source in SOURCES,
        "model": model in (*networks.NAMES, "auto") or networks.is_pretrained(model) or is_plugin(model),
        "method": True,
    }
    lost = [own for own, is_named in named.items() if own in result.given or not is_named]
    if lost:
        return f"The {' and the '.join(lost)} came from a Python program, which must be run again instead."
    if source in ("folder", "arrays", "table", "signals"):
        return "The folder named as data must hold the same files; the checksums below say whether it does."
    return ""
