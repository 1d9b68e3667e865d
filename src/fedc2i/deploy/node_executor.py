"""The program that a site runs for `SuperNode`: Flower's SuperNode, and an executor that forks for each message.

Flower starts a new Python for every message, which imports Flower, torch and the app: three seconds and more. Here an
executor process imports them once and forks for each message, so every message still has its own processes: a `Guard`,
which decides and keeps the log, and a `Worker`, which handles the data. Only the SuperNode reads the site's key. The
executor proves to the SuperNode that it belongs to it, by a secret that never leaves these processes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedc2i.deploy.approval import installed_app, installed_code
from fedc2i.deploy.body_limit import BodyLimit
from fedc2i.deploy.folder_settings import LOOPBACK
from fedc2i.deploy.guard import Guard
from fedc2i.deploy.process_tree import die_with_parent
from fedc2i.deploy.worker import Worker
from fedc2i.flower import compat


def _answer(site: Path, message: Callable[[compat.Answering], None]) -> None:
    """Answers a message in two new processes: one talks to the SuperNode, the other handles the data."""
    if os.fork():
        return
    code = 1
    try:
        die_with_parent()
        guard = Guard(site, Worker())
        message(guard.answer)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(words: Sequence[str]) -> None:
    """Starts the executor and becomes the SuperNode; ends when either ends."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--preload", required=True, help="modules to import once, with commas between them")
    parser.add_argument("--site", required=True, type=Path, help="the site's folder")
    parser.add_argument("--port", required=True, help="of the SuperNode's interface to the executor")
    own, others = parser.parse_known_args(words)
    secret = secrets.token_bytes(32)
    executor = os.fork()
    if executor == 0:
        try:
            die_with_parent()
            installed_app()  # read once for all messages
            installed_code()
            compat.run_executor(f"{LOOPBACK}:{own.port}", secret, own.preload.split(","), partial(_answer, own.site))
        finally:
            os._exit(1)

    def notice(*_: Any) -> None:
        if os.waitpid(executor, os.WNOHANG)[0]:
            print("the executor of the site's own code ended unexpectedly", file=sys.stderr, flush=True)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGCHLD, notice)
    reading, writing = os.pipe()
    os.write(writing, secret)
    os.close(writing)
    others += ["--host", LOOPBACK, "--port", own.port]
    others += ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{reading}"]
    compat.run_supernode(others, BodyLimit)


if __name__ == "__main__":
    main(sys.argv[1:])
