"""The models that a site keeps.

The last three are kept: after a crash the coordinator may repeat a round from the older one of its two checkpoints, and
the site must then start from the model that it had before that round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import RecordDict
from safetensors import SafetensorError
from safetensors.torch import load

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.core.params import Params
from fedc2i.engine.checkpoint import to_bytes
from fedc2i.engine.records import Point
from fedc2i.flower import wire

KEPT = 3


@dataclass(frozen=True)
class Predictor:
    """What makes a folder of a site's models one that `fedc2i predict` and `fedc2i export` read."""

    client: str
    seed: int
    texts: Mapping[str, str]  # by file name


def run_folder(folder: Path, run: str) -> Path:
    """Where a site keeps its models of a run; the name, which the coordinator chooses, must be a plain one."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
        raise UserError(f"'{run[:100]}' cannot name a run; allowed are letters, digits, '.', '_' and '-'")
    return folder / run


class FolderMemory:
    """A site's models of one run in files, which outlast a restart of the site's machine."""

    def __init__(self, folder: Path, run: str, predictor: Predictor | None = None) -> None:
        """Files go to a subfolder with the run's name; ``predictor`` is stored with the last models."""
        self._folder, self._predictor = run_folder(folder, run), predictor

    def load(self, before: int) -> Params | None:
        """The latest readable model from before the round; damaged files are skipped."""
        for number in sorted((number for number in self._rounds() if number < before), reverse=True):
            try:
                return load(self._path(number).read_bytes())
            except (OSError, SafetensorError):
                continue
        return None

    def save(self, round: int, params: Params) -> None:
        """Writes the model, and deletes all but the last three."""
        write_atomically(self._path(round), to_bytes(params))
        for number in _outdated(self._rounds(), round):
            self._path(number).unlink(missing_ok=True)

    def finish(self, models: Mapping[Point, Params]) -> None:
        """Writes the models that the run ended with, for the site's own use."""
        for point, params in models.items():
            write_atomically(self._folder / f"{point}.safetensors", to_bytes(params))
        if (own := self._predictor) is not None:
            for point, params in models.items():
                named = {f"{own.client}/{name}": tensor for name, tensor in params.items()}
                write_atomically(self._folder / "models" / f"seed{own.seed}-{point}.safetensors", to_bytes(named))
            for name, text in own.texts.items():
                write_atomically(self._folder / name, text.encode())

    def _rounds(self) -> list[int]:
        found = [path.stem.removeprefix("round") for path in self._folder.glob("round[0-9]*.safetensors")]
        return [int(number) for number in found if number.isdecimal()]

    def _path(self, round: int) -> Path:
        return self._folder / f"round{round:06d}.safetensors"


class ContextMemory:
    """The same in Flower's state of a node, which is lost with the node; this is enough for a simulation."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state, self._prefix = state, f"{run}."

    def load(self, before: int) -> Params | None:
        """The latest model from before the round."""
        found = [number for number in self._rounds() if number < before]
        return wire.unpack(self._state[f"{self._prefix}{max(found)}"]) if found else None

    def save(self, round: int, params: Params) -> None:
        """Keeps the last three."""
        self._state[f"{self._prefix}{round}"] = wire.pack(params)
        for number in _outdated(self._rounds(), round):
            del self._state[f"{self._prefix}{number}"]

    def finish(self, models: Mapping[Point, Params]) -> None:
        """Keeps nothing: nobody reads them in a simulation."""

    def _rounds(self) -> list[int]:
        own = [name.removeprefix(self._prefix) for name in self._state if name.startswith(self._prefix)]
        return [int(number) for number in own if number.isdecimal()]


Memory = FolderMemory | ContextMemory


def _outdated(rounds: list[int], last: int) -> list[int]:
    """All but the last three; rounds after the last one are from before a crash, and are repeated."""
    kept = sorted(number for number in rounds if number <= last)[-KEPT:]
    return [number for number in rounds if number not in kept]
