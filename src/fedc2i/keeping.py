"""What a run that is cut off needs to go on, in its folder until it is finished.

checkpoints/begun.json      on what it was begun: settings, data, versions, device
checkpoints/round*          the state of all seeds after the last two rounds that were kept
rounds/seed*/round*.npz     the reports of finished rounds

A round's reports are written before its checkpoint. So a checkpoint's reports are there, and what was written behind it
is done again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedc2i import checkpoint, journal, plugins
from fedc2i.config import Config
from fedc2i.data.federation import Federation
from fedc2i.engine import Round
from fedc2i.engine.saving import Start, State, ends_of
from fedc2i.errors import UserError, flaw, one_line
from fedc2i.runs import read_json, to_json, write_atomically, writing
from fedc2i.version import versions

SUMMARY = "summary.json"
OBJECTS = ("data", "model", "method")  # what may come as an object of Python
MUCH = 10**9  # bytes of checkpoints for each round, that a user should know of
_BITS = ("fedc2i", "torch")  # packages of which another version is not expected to give the same bits
_FREE = ("data_dir", "device", "workers", "checkpoint_every")  # settings that may be others after an interruption


@dataclass(frozen=True)
class Begun:
    """On what a run was begun.

    Attributes:
        settings: all that decide numbers, as text.
        data: the clients' checksums.
        versions: of the packages.
        device: where it was computed.
        given: what came as an object of Python, which a file cannot name: data, model or method.
        notes: what a reader of the result must know of its interruptions.
        files: checksums of the Python files that its method and its model come from, see `plugins.checksums`.
    """

    settings: str
    data: Mapping[str, str]
    versions: Mapping[str, str]
    device: str
    given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, federation: Federation, given: Sequence[str], notes: Sequence[str]) -> Begun:
        """Of a run that is begun, or gone on with, now."""
        decided = {name: value for name, value in asdict(config).items() if name not in _FREE}
        decided["topology"] = neighbours(config.topology)
        text, device = json.dumps(decided, default=str), config.torch_device().type
        files = plugins.checksums(config.method, config.model)
        return cls(text, federation.checksums, versions(), device, tuple(given), tuple(notes), files)

    @classmethod
    def read(cls, folder: Path) -> Begun | None:
        """Of the run in ``folder``; none if it never came that far.

        Raises:
            UserError: if the file is damaged, or does not fit into memory.
        """
        path = _begun(folder)
        try:
            return cls.of_values(read_json(path))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{path}: cannot be read ({flaw(error)})") from None

    @classmethod
    def of_values(cls, values: Mapping[str, Any]) -> Begun:
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

    def refuse_others(self, now: Begun, folder: Path) -> None:
        """Refuses to go on with what would not give the numbers of an uninterrupted run, but for another device.

        Raises:
            UserError: for other settings, data or versions, or a changed file of the method or model.
        """
        anew = f"run it anew (fedc2i run --config {folder / 'config.toml'})"
        if now.settings != self.settings:
            raise UserError(
                f"{folder}: config.toml, a topology's file or an object given is not what the run was begun with"
                + _first_other(self.settings, now.settings)
            )
        if dict(now.data) != dict(self.data):
            other = [name for name in {**self.data, **now.data} if self.data.get(name) != now.data.get(name)]
            raise UserError(f"{folder}: the data is not what the run was begun with (clients {', '.join(other)})")
        for what, checksum in self.files.items():
            if now.files.get(what) != checksum:
                file = one_line(plugins.file_of(dict(json.loads(now.settings))[what]))
                raise UserError(
                    f"{folder}: {file}, where its {what} comes from, is not what it was when the run was begun; "
                    f"put it back, or {anew}"
                )
        for package in _BITS:
            was, here = self.versions.get(package), now.versions.get(package)
            if was != here:
                raise UserError(
                    f"{folder}: begun with {package} {was}, and here is {here}, which may give other numbers; "
                    f"go on with {package} {was}, or {anew}"
                )


def _first_other(was: str, now: str) -> str:
    """The first setting that is another one, in brackets; empty where the texts cannot be read."""
    try:
        before, after = dict(json.loads(was)), dict(json.loads(now))
    except (ValueError, TypeError, RecursionError):
        return ""
    other = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "".join(f" ({n} was {one_line(before.get(n), 60)}, is {one_line(after.get(n), 60)})" for n in other[:1])


class Keeper:
    """Writes a run's checkpoints and reports, finds the place where it goes on, and cleans up."""

    def __init__(self, folder: Path, every: int) -> None:
        """In a run folder, a checkpoint after every so many rounds and after the last one; 0: none at all."""
        self._folder, self._every = folder, every
        self._states = folder / "checkpoints"

    def clean(self) -> None:
        """Removes what an interruption left half-written."""
        with writing(self._folder):
            for rest in self._folder.rglob(".*.part"):
                rest.unlink(missing_ok=True)

    def expect(self, size: int, say: Callable[[str], None]) -> None:
        """Says how many bytes a checkpoint will have, if that is much for a round."""
        if not self._every or size / self._every < MUCH:
            return
        often = "after every round" if self._every == 1 else f"after every {self._every} rounds"
        amount = f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
        say(
            f"checkpoints of about {amount} are written into {self._states} {often}; "
            "checkpoint_every=K (--set) writes them after every K rounds, 0 none"
        )

    def begin(self, begun: Begun) -> None:
        """Writes down on what the run is begun."""
        write_atomically(_begun(self._folder), to_json(asdict(begun)).encode(), durable=True)

    def record(self, report: Round) -> None:
        """Keeps a round's report."""
        if self._every:
            journal.write(self._reports(report.seed), report)

    def keep(self, number: int, is_last: bool, state: Callable[[], State]) -> None:
        """Keeps the state behind a round, if it is one of those."""
        if self._every and (is_last or number % self._every == 0):
            checkpoint.save(self._states, number, *state())

    def latest(
        self, seeds: Sequence[int], require_fit: Callable[[State, int], None]
    ) -> tuple[Start, list[Round]] | None:
        """Where to go on, with all reports up to there in the order of an uninterrupted run; none: at the beginning.

        Args:
            seeds: of the run.
            require_fit: raises a `UserError` for a state, and the round it is of, that the run cannot go on from.

        Raises:
            UserError: if there are checkpoints, and none can be used.
        """
        damaged: list[str] = []
        for saved in checkpoint.sound(self._states):
            try:
                require_fit((saved.tensors, saved.values), saved.round)
            except UserError as error:
                damaged.append(str(error))
                continue
            try:
                ends = ends_of(saved.values, saved.round)
                by_seed = {seed: journal.read(self._reports(seed), ends[seed] + 1) for seed in seeds}
            except (UserError, KeyError, AttributeError, ValueError, TypeError) as error:
                damaged.append(f"round {saved.round}: {error}")
                continue
            reports = [own[number] for number in range(saved.round) for own in by_seed.values() if number < len(own)]
            return Start(*saved, {seed: own[-1] for seed, own in by_seed.items()}), reports
        if any(self._states.glob("round*.json")):
            why = "; ".join(damaged) or "all are damaged"
            raise UserError(
                f"{self._states}: no checkpoint can be used ({why}); "
                "remove the files round* there, and the run goes on from its beginning"
            )
        return None

    def tidy(self) -> None:
        """Removes what only an unfinished run needs."""
        for name in ("checkpoints", "rounds"):
            shutil.rmtree(self._folder / name, ignore_errors=True)

    def _reports(self, seed: int) -> Path:
        return self._folder / "rounds" / f"seed{seed}"


def _begun(folder: Path) -> Path:
    return folder / "checkpoints" / "begun.json"


def neighbours(topology: str) -> str:
    """A topology by what it says: that of a file by what the file holds."""
    try:
        return hashlib.sha256(Path(topology).read_bytes()).hexdigest() if Path(topology).is_file() else topology
    except OSError:  # no file's name
        return topology


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Only one process at a time writes into a run folder; the lock is on the folder itself and ends with the process.

    Raises:
        UserError: if another one is at it.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    with writing(folder):
        descriptor = os.open(folder, os.O_RDONLY)
    try:
        for more in (True, True, False):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    break  # a file system without locks goes without
                if not more:
                    raise UserError(
                        f"{folder}: another process is at work on this run; wait for it or end it"
                    ) from None
                time.sleep(0.05)  # it may be `is_locked` of another process, which holds it for a moment
        yield
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process is at work in a run folder, see `locked`; true where that cannot be known."""
    if os.name != "posix":
        return True
    import fcntl

    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as `locked` does: where it cannot, nor can this
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
