"""What a site keeps between rounds: its own model, which never leaves it as a whole.

The last three are kept: when the coordinator was killed and does a round again, perhaps from the older one of its two
checkpoints, a site must start from the model that it had before that round.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from flwr.app import RecordDict
from safetensors import SafetensorError
from safetensors.torch import load

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.core.params import Params
from fedc2i.engine.checkpoint_file import to_bytes
from fedc2i.engine.records import Point
from fedc2i.flower import wire

KEPT = 3


class Memory(Protocol):
    """A site's own models of one run, by the round they were trained in."""

    def load(self, before: int) -> Params | None:
        """The latest model of a round before ``before``, if there is one."""
        ...

    def save(self, round: int, params: Params) -> None:
        """Keeps the model of a round."""
        ...

    def finish(self, models: Mapping[Point, Params]) -> None:
        """Keeps the models that the run ended with, for the site's own use."""
        ...


def _outdated(rounds: list[int], last: int) -> list[int]:
    """All but the last three; later ones than the last are of a course of the run that was given up."""
    kept = sorted(number for number in rounds if number <= last)[-KEPT:]
    return [number for number in rounds if number not in kept]


class FolderMemory:
    """In files, so that nothing is lost when the site's machine restarts."""

    def __init__(self, folder: Path, run: str) -> None:
        """In a folder of the run's own inside ``folder``."""
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", run):
            raise UserError(f"'{run[:100]}' cannot name a run; allowed are letters, digits, '.', '_' and '-'")
        self._folder = folder / run

    def load(self, before: int) -> Params | None:
        """The latest readable model before the round; a damaged file counts as absent."""
        for number in sorted((number for number in self._rounds() if number < before), reverse=True):
            try:
                return load(self._path(number).read_bytes())
            except (OSError, SafetensorError):
                continue
        return None

    def save(self, round: int, params: Params) -> None:
        """Writes beside and renames; older ones than the last three go."""
        write_atomically(self._path(round), to_bytes(params))
        for number in _outdated(self._rounds(), round):
            self._path(number).unlink(missing_ok=True)

    def finish(self, models: Mapping[Point, Params]) -> None:
        """Writes ``received.safetensors`` and ``trained.safetensors``."""
        for point, params in models.items():
            write_atomically(self._folder / f"{point}.safetensors", to_bytes(params))

    def _rounds(self) -> list[int]:
        found = [path.stem.removeprefix("round") for path in self._folder.glob("round[0-9]*.safetensors")]
        return [int(number) for number in found if number.isdecimal()]

    def _path(self, round: int) -> Path:
        return self._folder / f"round{round:06d}.safetensors"


class ContextMemory:
    """In the state that Flower keeps for a node; it lasts as long as the node does, which is enough in a simulation."""

    def __init__(self, state: RecordDict, run: str) -> None:
        self._state, self._prefix = state, f"{run}."

    def load(self, before: int) -> Params | None:
        """The latest model before the round."""
        found = [number for number in self._rounds() if number < before]
        return wire.unpack(self._state[f"{self._prefix}{max(found)}"]) if found else None

    def save(self, round: int, params: Params) -> None:
        """Keeps the last three."""
        self._state[f"{self._prefix}{round}"] = wire.pack(params)
        for number in _outdated(self._rounds(), round):
            del self._state[f"{self._prefix}{number}"]

    def finish(self, models: Mapping[Point, Params]) -> None:
        """Nobody will ask for them."""

    def _rounds(self) -> list[int]:
        own = [name.removeprefix(self._prefix) for name in self._state if name.startswith(self._prefix)]
        return [int(number) for number in own if number.isdecimal()]
