"""The fingerprint of a run: settings, data, versions and files that must be the same when it is resumed."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.core.files import plugin_checksums, plugin_file, read_json
from fedc2i.core.version import __version__
from fedc2i.data.federation import Federation
from fedc2i.runs.settings import RunSettings

OBJECTS = ("data", "model", "method")  # what may come as an object of Python
_BITS = ("fedc2i", "torch")  # packages of which another version is not expected to give the same bits


@dataclass(frozen=True)
class Fingerprint:
    """What a run was started with.

    Attributes:
        settings: all that decide numbers, as text.
        data: the clients' checksums.
        versions: of the packages.
        device: where it was computed.
        given: what came as an object of Python, which a file cannot name: data, model or method.
        notes: what a reader of the result must know of its interruptions.
        files: checksums of the Python files that its method and its model come from, see `plugin_checksums`.
    """

    settings: str
    data: Mapping[str, str]
    versions: Mapping[str, str]
    device: str
    given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunSettings, federation: Federation, given: Sequence[str], notes: Sequence[str]) -> Fingerprint:
        """Of a run that is started or resumed now."""
        decided = {**config.fixed(), "topology": neighbours(config.topology)}
        text, device = json.dumps(decided, default=str), config.torch_device().type
        files = plugin_checksums(config.method, config.model)
        return cls(text, federation.checksums, versions(), device, tuple(given), tuple(notes), files)

    @classmethod
    def read(cls, folder: Path) -> Fingerprint | None:
        """Of the run in ``folder``; none if it never came that far.

        Raises:
            UserError: if the file is damaged, or does not fit into memory.
        """
        path = fingerprint_path(folder)
        try:
            return cls.of_values(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({flaw(error)})") from None

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Fingerprint:
        """As it was before it was written.

        Raises:
            ValueError: or others of its kind, if it is nothing that was.
        """
        found = cls(**dict(values) | {name: tuple(values[name]) for name in ("given", "notes")})
        texts = all(isinstance(text, str) for text in (found.settings, found.device, *found.notes))
        tables = all(isinstance(table, dict) for table in (found.data, found.versions, found.files))
        if not texts or not tables or not set(found.given) <= set(OBJECTS):
            raise ValueError("an entry is of another type")
        return found

    def refuse_others(self, now: Fingerprint, folder: Path) -> None:
        """Refuses to resume what would not give the numbers of an uninterrupted run, but for another device.

        Raises:
            UserError: for other settings, data or versions, or a changed file of the method or model.
        """
        again = f"run it again (fedc2i run --config {folder / 'config.toml'})"
        if now.settings != self.settings:
            raise UserError(
                f"{folder}: config.toml, a topology's file or an object given is not what the run was started with"
                + _first_other(self.settings, now.settings)
            )
        if dict(now.data) != dict(self.data):
            other = [name for name in {**self.data, **now.data} if self.data.get(name) != now.data.get(name)]
            raise UserError(f"{folder}: the data is not what the run was started with (clients {', '.join(other)})")
        for what, checksum in self.files.items():
            if now.files.get(what) != checksum:
                file = one_line(plugin_file(dict(json.loads(now.settings))[what]))
                raise UserError(
                    f"{folder}: {file}, where its {what} comes from, is not what it was when the run started; "
                    f"put it back, or {again}"
                )
        for package in _BITS:
            was, here = self.versions.get(package), now.versions.get(package)
            if was != here:
                raise UserError(
                    f"{folder}: started with {package} {was}, and here is {here}, which may give other numbers; "
                    f"resume with {package} {was}, or {again}"
                )


def _first_other(was: str, now: str) -> str:
    """The first setting that is another one, in brackets; empty where the texts cannot be read."""
    try:
        before, after = dict(json.loads(was)), dict(json.loads(now))
    except (ValueError, TypeError, RecursionError):
        return ""
    other = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "".join(f" ({n} was {one_line(before.get(n), 60)}, is {one_line(after.get(n), 60)})" for n in other[:1])


def fingerprint_path(folder: Path) -> Path:
    """Where the fingerprint of an unfinished run lies."""
    return folder / "checkpoints" / "fingerprint.json"


def neighbours(topology: str) -> str:
    """A topology by what it says: that of a file by what the file holds."""
    try:
        return hashlib.sha256(Path(topology).read_bytes()).hexdigest() if Path(topology).is_file() else topology
    except OSError:  # no file's name
        return topology


@functools.cache
def versions(engine: str = "inprocess") -> dict[str, str]:
    """Of fedc2i, Python and the packages that decide numbers; Flower is among them if that engine was used."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"fedc2i": __version__, "python": platform.python_version()}
    carrier = () if engine == "inprocess" else ("flwr",)
    for package in ("torch", "numpy", "scikit-learn", "pillow", "matplotlib", *carrier):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # e.g. a torch that was built by hand
            found[package] = "unknown"
    return found
