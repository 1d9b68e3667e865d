"""The process that reads a site's data and does one task, apart from the site's key, its log and the network.

The process that talks to the SuperNode forks it before it knows anything of the task, hands it the request through a
pipe, and reads the reply from another. The worker loads the data, enters the sandbox, and only then touches what came
from the coordinator: settings, tensors, and approved code. See `fedc2i.deploy.sandbox` for what the kernel enforces.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NoReturn

from flwr.app import RecordDict

from fedc2i.core.errors import UserError, one_line
from fedc2i.deploy import sandbox
from fedc2i.deploy.process_tree import die_with_parent
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.site_folder import MASKS, read_site
from fedc2i.flower import compat
from fedc2i.flower.message_format import failure
from fedc2i.flower.site import COMPLAINT, Home, answer, private_reasons
from fedc2i.models import features, weights

MOST_OUTPUT = 2**20  # bytes of text that a task may print
_LENGTHS = struct.Struct("<QQ")  # of the request's two parts
_CHUNK = 2**16
_MOST_FILES = 2**16  # that a process may have open


@dataclass(frozen=True)
class Request:
    """What a worker needs besides the message."""

    site: str  # its folder
    kind: str  # of the message, as Flower names it
    root: str = ""  # where approved code lies, if there is any
    models: str = ""  # the one folder that it may write to, if there is one
    noise_key: str = ""  # of this run alone, in hexadecimal digits


Work = Callable[[Request, RecordDict], RecordDict]


def site_home(folder: Path) -> Home:
    """The data of the site with this folder."""
    site = read_site(folder, ready=False)  # the SuperNode has checked its key and certificates
    with private_reasons():
        rows = site.rows()
        encoded = None if rows is None else site.load(rows)
    found = encoded or site.load()
    return Home(found.clients[0], found.classes, site.state, rows=rows)


def work(request: Request, content: RecordDict) -> RecordDict:
    """A worker's work: the data first, then the sandbox, then everything that came from outside."""
    folder = Path(request.site)
    try:
        home = replace(site_home(folder), noise_key=bytes.fromhex(request.noise_key))
        root = [Path(request.root)] if request.root else []
        readable, writable = [*root, weights.folder()], _writable(request)
        forbidden = [folder / name for name in ("site.key", "site.toml", "state/noise.key", MASKS)]
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = request.site  # any that exists: code may import torch's compiler
        sandbox.enter(writable, readable, forbidden)
        return answer(request.kind, content, home, lambda task: understand(task.setup, *root))
    except UserError as error:
        return failure(str(error))
    except Exception as error:  # one line for the coordinator, the traceback for the site's log
        traceback.print_exc()
        return failure(f"{type(error).__name__}: {error}")


def _writable(request: Request) -> list[Path]:
    """The run's own folder, and the cache of features, which code from a file gets there as well."""
    if not request.models:
        return []
    if request.root:
        os.environ["FEDC2I_CACHE"] = request.models
        return [Path(request.models)]
    with contextlib.suppress(OSError):  # a read-only file system
        features.folder().mkdir(parents=True, exist_ok=True)
    return [Path(request.models), features.folder()]


class Worker:
    """One worker, which takes one request."""

    def __init__(self, work: Work = work) -> None:
        """Starts it; call this before the process has other threads."""
        request, reply, output = os.pipe(), os.pipe(), os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run(work, request[0], reply[1], output[1])
        for end in (request[0], reply[1], output[1]):
            os.close(end)
        self._request, self._reply, self._output = request[1], reply[0], output[0]

    def ask(self, request: Request, content: RecordDict, most: int) -> RecordDict:
        """The content of its reply; `most` bytes at most.

        Raises:
            UserError: if it ends without one, or sends more.
        """
        try:
            with os.fdopen(self._request, "wb") as pipe:
                self._request = -1
                parts = json.dumps(asdict(request)).encode(), compat.to_bytes(content)
                pipe.write(_LENGTHS.pack(*map(len, parts)))
                for part in parts:
                    pipe.write(part)
            found = self._receive(most, bool(request.root))
        except BrokenPipeError:
            found = b""
        finally:
            self.end()
        if not found:
            raise UserError("the program of its task ended without an answer; the site's own log says more")
        try:
            reply: RecordDict = compat.from_bytes(found)
            return reply
        except Exception as error:  # whatever Flower raises for bytes that approved code made up
            raise UserError(f"its answer is not valid ({type(error).__name__}: {one_line(error)})") from None

    def _receive(self, most: int, foreign: bool) -> bytes:
        """Reads the reply, and passes on what is printed meanwhile; marked, if it is not our own code that prints."""
        received, printed = bytearray(), bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(self._reply, selectors.EVENT_READ, received)
            selector.register(self._output, selectors.EVENT_READ, printed)
            while selector.get_map():
                for key, _ in selector.select():
                    part = os.read(key.fd, _CHUNK)
                    if not part:
                        selector.unregister(key.fd)
                    key.data.extend(part)
                if len(received) > most:
                    raise UserError(f"its answer has more than the {most / 1e6:g} MB that this site allows")
                del printed[MOST_OUTPUT:]
        for line in printed.decode("utf-8", errors="replace").splitlines():
            mark = "approved code: " if foreign else ""
            print(f"{mark}{one_line(line, 1000) if foreign or line.startswith(COMPLAINT) else line}", flush=True)
        return bytes(received)

    def end(self) -> None:
        """Ends it, whatever it does; safe to repeat."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0
            for end in (self._request, self._reply, self._output):
                if end >= 0:
                    os.close(end)


def _run(work: Work, request: int, reply: int, output: int) -> NoReturn:
    """The worker's life: a request, its work, a reply."""
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        first, last = sorted((request, reply))
        for low, high in ((3, first), (first + 1, last), (last + 1, _MOST_FILES)):
            os.closerange(low, high)  # the log, sockets, and whatever else the other process has open
        sys.stdout, sys.stderr = (os.fdopen(end, "w", buffering=1, errors="replace", closefd=False) for end in (1, 2))
        sys.dont_write_bytecode = True
        with os.fdopen(request, "rb") as pipe:
            lengths = _LENGTHS.unpack(pipe.read(_LENGTHS.size))
            told, content = (pipe.read(length) for length in lengths)
        found = compat.to_bytes(work(Request(**json.loads(told)), compat.from_bytes(content)))
        with os.fdopen(reply, "wb") as pipe:
            pipe.write(found)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
