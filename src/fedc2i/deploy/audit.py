"""A site's log of what it was asked and what left it: one line for each task, each with the hash of the line before it.

A line is JSON, and is on the disk before an answer leaves. A changed, removed or inserted line breaks the chain, and
``audit.head``, which holds the number and hash of the last line, shows that lines at the end were removed.
"""

from __future__ import annotations

import errno
import getpass
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import write_atomically, writing
from fedc2i.deploy.policy import AGAIN, Spent

START = "0" * 64  # what the first line has as the hash before it
TASK, RENEWED = "task", "renewed"  # events
SENT = "sent"  # the outcome of a task whose answer may leave
TRAINED = "trained"  # a refused task's upload, by its hash, if the refusal says something about it
_PATIENCE = 30.0  # seconds for another process to finish its line

Entry = Mapping[str, Any]


class AuditLog:
    """The log of a site."""

    def __init__(self, site: Path) -> None:
        self.path, self.head = site / "audit.log", site / "audit.head"

    def entries(self) -> list[Entry]:
        """All lines, verified.

        Raises:
            UserError: that names the first line that is damaged or missing.
        """
        return self._read()[0]

    def _read(self) -> tuple[list[Entry], str, int]:
        """The entries, the last line's hash, and the number of bytes up to its end."""
        try:
            content = self.path.read_bytes() if self.path.exists() else b""
            known: Any = {"lines": 0, "hash": START}
            known = json.loads(self.head.read_bytes()) if self.head.exists() else known
            lines, stated = int(known["lines"]), str(known["hash"])
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(f"{self.head}: cannot be read ({one_line(error)})") from None
        whole, _, rest = content.rpartition(b"\n")
        entries: list[Entry] = []
        before, hashes = START, [START]
        for number, line in enumerate(whole.split(b"\n") if whole else (), 1):
            entry = self._verified(line, number, before)
            before = hashlib.sha256(line).hexdigest()
            entries.append(entry)
            hashes.append(before)
        if len(entries) < lines:
            cut = "is incomplete" if rest else "is missing"
            raise UserError(f"{self.path}: line {len(entries) + 1} {cut}; there were {lines}")
        if not 0 <= len(entries) - lines <= 1 or lines < 0 or hashes[lines] != stated:
            raise UserError(f"{self.path}: line {max(lines, 1)} is not the one that {self.head.name} names")
        return entries, before, len(whole) + 1 if whole else 0

    def _verified(self, line: bytes, number: int, before: str) -> Entry:
        try:
            entry = json.loads(line)
            follows = entry["previous"] == before and entry["line"] == number
        except (ValueError, LookupError, TypeError, RecursionError):
            raise UserError(f"{self.path}: line {number} is damaged") from None
        if not follows:
            raise UserError(f"{self.path}: line {number} does not follow the line before it; one of them was changed")
        return dict(entry)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps other processes from writing meanwhile."""
        with writing(self.path), FileLock(self.path.with_suffix(".lock"), timeout=_PATIENCE):
            yield

    def append(self, event: str, **values: Any) -> None:
        """Writes a line, durably; an unfinished one, which a power failure may have left, is replaced.

        Raises:
            UserError: if the log is damaged or cannot be written.
        """
        with self.locked():
            entries, before, end = self._read()
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = {"line": len(entries) + 1, "time": now, "event": event, **values, "previous": before}
            line = json.dumps(entry, ensure_ascii=True, allow_nan=False).encode()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                if os.fstat(descriptor).st_size > end:
                    os.ftruncate(descriptor, end)
                os.lseek(descriptor, end, os.SEEK_SET)
                if os.write(descriptor, line + b"\n") != len(line) + 1:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            head = {"lines": len(entries) + 1, "hash": hashlib.sha256(line).hexdigest()}
            write_atomically(self.head, json.dumps(head).encode(), durable=True)


def spent(entries: Iterable[Entry], *, renewed: bool = True) -> Spent:
    """What has left the site, by its log; by default only since the last renewal."""
    runs: dict[str, None] = {}
    noises: dict[str, float] = {}
    for entry in entries:
        if entry["event"] == RENEWED and renewed:
            runs, noises = {}, {}
        if _counts(entry):
            runs[str(entry["run"])] = None
            if upload := _upload(entry):
                noises[upload] = float(entry["noise"])
    return Spent(tuple(runs), tuple(noises.values()))


def _counts(entry: Entry) -> bool:
    """Whether something left with a task: its answer, or a refusal that depends on what was trained."""
    return entry["event"] == TASK and (entry.get("outcome") == SENT or TRAINED in entry)


def _upload(entry: Entry) -> str:
    return str(entry.get(TRAINED) or entry.get("upload") or "")


def check_course(entries: Iterable[Entry], run: str, terms: str, round: int) -> None:
    """Raises a `UserError` if a run has other settings or code than before, or asks for a round too often."""
    own = [entry for entry in entries if _counts(entry) and entry.get("run") == run]
    if any(entry["terms"] != terms for entry in own):
        raise UserError(f"run {one_line(run, 100)} was started with other settings or code; a new run needs a new name")
    uploads = {_upload(entry) for entry in own if entry["round"] == round} - {""}
    if len(uploads) >= AGAIN:
        raise UserError(f"round {round} of run {one_line(run, 100)} was answered with {AGAIN} uploads, and has no more")


def check_sum(entries: Iterable[Entry], run: str, round: int, upload: str, sites: Sequence[str]) -> None:
    """Raises a `UserError` if an upload, or another one of its round, was unmasked in a sum with other sites.

    The difference of the sums would show single uploads. ``upload`` is a hash, ``sites`` are identities.
    """
    for entry in entries:
        if entry["event"] != TASK or entry["outcome"] != SENT or entry.get("sum", sites) == sites:
            continue
        where = f"round {entry['round']} of run {one_line(entry['run'], 100)}"
        why = "the difference of two sums would show uploads"
        if (entry["run"], entry["round"]) == (run, round):
            raise UserError(f"{where} was unmasked with other sites, and {why}; it needs those again, or a new run")
        if entry.get("summed") == upload:
            raise UserError(
                f"its upload is the one of {where}, unmasked with other sites, and {why}; use those sites, or another "
                "seed (--seeds)"
            )


def account() -> str:
    """The account that a command runs under, for lines about decisions of people."""
    try:
        return one_line(getpass.getuser(), 60)
    except (OSError, KeyError, ImportError):
        return f"account {os.getuid()}"
