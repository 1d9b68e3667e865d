"""What decides the numbers of a run: the fingerprint that a resumed run must share, and the key of a cached run."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fedc2i
from fedc2i.core.errors import UserError, flaw, one_line
from fedc2i.core.files import plugin_checksums, plugin_file, read_json
from fedc2i.data.federation import Federation
from fedc2i.runs.results import versions
from fedc2i.runs.settings import RunSettings

FINGERPRINT = Path("checkpoints") / "fingerprint.json"  # in the folder of an unfinished run
OBJECTS = ("data", "model", "method")  # what may come as an object of Python
_BITS = ("fedc2i", "torch")  # packages of which another version is not expected to give the same bits
_GPU_BITS = (*_BITS, "triton")  # which compiles our kernels
_DECIDING = ("core", "data", "models", "training", "methods", "engine")  # rooms whose code decides numbers


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
    def read(cls, folder: Path) -> Fingerprint | None:
        """Of the run in ``folder``; none if it never came that far.

        Raises:
            UserError: if the file is damaged, or does not fit into memory.
        """
        path = folder / FINGERPRINT
        try:
            return cls.of_values(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({flaw(error)})") from None

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Fingerprint:
        """As it was before it was written; a `ValueError`, or another of its kind, if that was no fingerprint."""
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
        for package in _GPU_BITS if self.device == now.device == "cuda" else _BITS:
            was, here = self.versions.get(package, "none"), now.versions.get(package, "none")
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


def cache_key(config: RunSettings, federation: Federation) -> str:
    """Twelve digits that change with settings, data, device, versions and the code that decides numbers."""
    device, here = config.torch_device().type, versions()
    decided = {
        "settings": config.decisive(),
        "data": federation.checksums,
        "device": device,
        "versions": [here.get(package) for package in (_GPU_BITS if device == "cuda" else _BITS)],
        "code": code_digest(),
        **({"files": files} if (files := plugin_checksums(config.method, config.model)) else {}),
    }
    return hashlib.sha256(json.dumps(decided, sort_keys=True, default=str).encode()).hexdigest()[:12]


@functools.cache
def code_digest(root: Path = Path(fedc2i.__file__).parent) -> str:
    """A digest of the code that decides numbers; comments and docstrings do not count."""
    digest = hashlib.sha256()
    for package in _DECIDING:
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_bytes())
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    node.body = node.body[ast.get_docstring(node, clean=False) is not None :]
            digest.update(f"{path.relative_to(root)} {ast.dump(tree)}".encode())
    return digest.hexdigest()
