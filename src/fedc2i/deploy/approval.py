"""The code that arrives with a run, and which of it a person at the site has approved.

A run comes with a Flower App. A site never executes it: it must be the app that is installed at the site, file by file,
and the installed one runs. Only method and model files of the user may be in it besides, and these wait in
``code/pending`` until `fedc2i site approve` moves them to ``code/approved``. Both are named by the SHA-256 of the file.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import re
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.files import write_atomically, writing
from fedc2i.deploy.run_description import PLUGINS
from fedc2i.flower import compat

APP = Path(__file__).parent / "app"
LEAST_DIGITS = 12  # of a hash that a person types
MOST_FILES, MOST_BYTES = 64, 4 * 2**20  # in a bundle, unpacked
MOST_PENDING = 32
UNPACKED = "code/unpacked"  # in a site's folder
_PLACE = re.compile(rf"fedc2i_app/{PLUGINS}/((method|model)_[A-Za-z0-9][\w.-]{{0,99}}\.py)", re.ASCII)
_MANIFEST = ".info/CONTENT"


def sha256(content: bytes) -> str:
    """In hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def own_files_in(bundle: bytes) -> dict[str, bytes]:
    """The user's method and model files in a Flower App, by name.

    Raises:
        UserError: if anything else in it is not as in the app that is installed here.
    """
    found = _unzip(bundle)
    own = {match[1]: content for place, content in found.items() if (match := _PLACE.fullmatch(place))}
    rest = {place: sha256(content) for place, content in found.items() if not _PLACE.fullmatch(place)}
    rest.pop(_MANIFEST, None)
    if rest != installed_app():
        other = sorted(set(rest.items()) ^ set(installed_app().items()))[0][0]
        raise UserError(
            f"the run's app is not the one installed at this site ('{one_line(other, 80)}' differs); a site runs "
            "no other, the coordinator needs the same version of fedc2i"
        )
    return own


@cache
def installed_app() -> Mapping[str, str]:
    """The SHA-256 of every file of the app that is installed here, as it travels."""
    found = {place: sha256(content) for place, content in _unzip(compat.bundle(APP)).items()}
    del found[_MANIFEST]
    return found


@cache
def installed_code() -> str:
    """The SHA-256 over all Python files of fedc2i that are installed here."""
    root = Path(__file__).parents[1]
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    listed = "".join(f"{name} {sha256((root / name).read_bytes())}\n" for name in names)
    return sha256(listed.encode())


def _unzip(bundle: bytes) -> dict[str, bytes]:
    """All files of a bundle; a bundle of unusual size is refused before it is unpacked."""
    found: dict[str, bytes] = {}
    left = MOST_BYTES
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            entries = [entry for entry in archive.infolist() if not entry.filename.endswith("/")]
            if len(entries) > MOST_FILES or len({entry.filename for entry in entries}) != len(entries):
                raise ValueError("too many files, or two of one name")
            for entry in entries:
                with archive.open(entry) as file:
                    found[entry.filename] = file.read(left + 1)
                left -= len(found[entry.filename])
                if left < 0:
                    raise ValueError(f"more than {MOST_BYTES:,} bytes")
    except (ValueError, OSError, EOFError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"the run's app cannot be read ({one_line(error)})") from None
    return found


@dataclass(frozen=True)
class OfferedFile:
    """A method or model file that came with a run."""

    hash: str
    name: str
    sender: str  # the coordinator's address and the SHA-256 of the authority that vouches for it
    received: str  # UTC
    decided: str = ""  # when and by whom, if it is approved

    def imports(self, source: bytes) -> list[str]:
        """The packages that the file names in import statements; code can import others without naming them."""
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return ["(not valid Python)"]
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "." for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        return sorted({one_line(name.split(".")[0] or ".", 60) for name in names})


class CodeStore:
    """The pending and approved files of a site, in its folder ``code``."""

    def __init__(self, site: Path) -> None:
        self.folder = site / "code"

    def require_approved(self, files: Mapping[str, bytes], sender: str) -> None:
        """Raises a `UserError` if a file is not approved, and keeps it for a person to look at."""
        waiting = {name: content for name, content in files.items() if not self._is_approved(sha256(content))}
        for name, content in waiting.items():
            self._keep(OfferedFile(sha256(content), name, sender, _now()), content)
        if waiting:
            described = ", ".join(f"{name} ({sha256(content)[:16]})" for name, content in waiting.items())
            raise UserError(
                f"code from a file runs here only after a person has approved it: {described}; "
                "`fedc2i site pending` and `fedc2i site approve` at the site"
            )

    def _is_approved(self, hash: str) -> bool:
        path = self._path("approved", hash)
        return path.is_file() and sha256(path.read_bytes()) == hash

    def _keep(self, entry: OfferedFile, content: bytes) -> None:
        if self._path("pending", entry.hash).exists():
            return
        if len(self.pending()) >= MOST_PENDING:
            raise UserError(
                f"{MOST_PENDING} files wait for approval at this site; it takes no more until some are gone"
            )
        self._write("pending", entry, content)

    def _write(self, state: str, entry: OfferedFile, content: bytes) -> None:
        write_atomically(self._path(state, entry.hash), content)
        write_atomically(self._path(state, entry.hash).with_suffix(".json"), json.dumps(asdict(entry)).encode())

    def pending(self) -> list[OfferedFile]:
        """What waits for a decision, oldest first."""
        return self._list("pending")

    def approved(self) -> list[OfferedFile]:
        """What a person has approved, oldest first."""
        return self._list("approved")

    def source(self, entry: OfferedFile) -> bytes:
        """The file's content, wherever it lies."""
        states = ("pending", "approved")
        return next(path for state in states if (path := self._path(state, entry.hash)).is_file()).read_bytes()

    def approve(self, digits: str, who: str) -> OfferedFile:
        """Lets the pending file whose hash starts so be executed from now on."""
        found = self._find(self.pending(), digits)
        content = self._path("pending", found.hash).read_bytes()
        if sha256(content) != found.hash:
            raise UserError(f"{self._path('pending', found.hash)}: has been changed since it was received; remove it")
        approved = OfferedFile(**{**asdict(found), "decided": f"{_now()} by {who}"})
        self._write("approved", approved, content)
        self._remove("pending", found.hash)
        return approved

    def trust(self, files: Iterable[bytes]) -> None:
        """Approves files without a look, where the one who runs them is the one who wrote them."""
        for content in files:
            self._write("approved", OfferedFile(sha256(content), "own.py", "this machine", _now(), _now()), content)

    def revoke(self, digits: str) -> OfferedFile:
        """Takes back an approval, or drops a pending file."""
        found = self._find(self.approved() + self.pending(), digits)
        self._remove("approved", found.hash)
        self._remove("pending", found.hash)
        return found

    def _remove(self, state: str, hash: str) -> None:
        for path in (self._path(state, hash), self._path(state, hash).with_suffix(".json")):
            path.unlink(missing_ok=True)

    def _find(self, entries: list[OfferedFile], digits: str) -> OfferedFile:
        found = list({entry.hash: entry for entry in entries if entry.hash.startswith(digits.lower())}.values())
        if len(digits) < LEAST_DIGITS or len(found) != 1:
            known = ", ".join(entry.hash[:16] for entry in entries) or "none"
            raise UserError(f"'{one_line(digits)}': give at least {LEAST_DIGITS} digits of a hash; there are {known}")
        return found[0]

    def _list(self, state: str) -> list[OfferedFile]:
        found = []
        for path in (self.folder / state).glob("*.py"):
            try:
                found.append(OfferedFile(**json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))))
            except (OSError, ValueError, TypeError):
                found.append(OfferedFile(path.stem, path.name, "unknown", ""))  # its record is damaged or not there yet
        return sorted(found, key=lambda entry: (entry.received, entry.hash))

    def _path(self, state: str, hash: str) -> Path:
        return self.folder / state / f"{hash}.py"


@contextmanager
def unpacked(files: Mapping[str, bytes], site: Path) -> Iterator[Path]:
    """A new folder with these files, read-only, for one message; it is gone afterwards."""
    parent = site / UNPACKED
    with writing(parent):
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="message-", dir=parent))
    try:
        with writing(folder):
            (folder / PLUGINS).mkdir()
            for name, content in files.items():
                (folder / PLUGINS / name).write_bytes(content)
                (folder / PLUGINS / name).chmod(0o400)
            (folder / PLUGINS).chmod(0o500)
        yield folder
    finally:
        _remove_unpacked(folder)


def clear_unpacked(site: Path) -> None:
    """Removes what a killed site has left of `unpacked`."""
    for folder in (site / UNPACKED).glob("message-*"):
        _remove_unpacked(folder)


def _remove_unpacked(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / PLUGINS).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
