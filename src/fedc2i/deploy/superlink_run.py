"""A run on the coordinator's SuperLink: starts the SuperLink and the run, follows the run's log, reports its end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.deploy import keys
from fedc2i.deploy.app_files import own_files
from fedc2i.deploy.coordinator_folder import CoordinatorFolder, admitted
from fedc2i.deploy.lead import JOB, Job
from fedc2i.deploy.superlink import RunStatus, SuperLink, Tls

APP = Path(__file__).parent / "app"
_POLL = 0.5  # seconds


def conduct(link: SuperLink, job: Job, say: Callable[[str], None]) -> None:
    """Runs a job to its end on a SuperLink that is ready; the lines of the run's log go to ``say``.

    Raises:
        UserError: if the run fails; the same job then resumes from its folder.
    """
    for run in link.stop_runs():
        say(f"stopped run {run}, which an earlier start had left")
    write_atomically(job.out / JOB, job.to_json().encode())
    log = job.out / "log.txt"
    position = log.stat().st_size if log.exists() else 0
    with _app(job) as app:
        run = link.start_run(app, {"job": str((job.out / JOB).absolute())})
        while (now := _status(link, run)) is None or not now.is_finished:
            position = _follow(log, position, say)
            time.sleep(_POLL)
    _follow(log, position, say)
    if now.state != "completed" or not (job.out / "summary.json").is_file():
        raise UserError(f"the run {now.state}: {_reason(log) or now.reason or link.tail()} (log: {link.log})")


def _status(link: SuperLink, run: int) -> RunStatus | None:
    """Where the run is; None while a busy SuperLink does not answer."""
    try:
        return link.run_status(run)
    except UserError:
        if not link.is_alive():
            raise UserError(f"the SuperLink ended: {link.tail()} (log: {link.log})") from None
        return None


def _follow(log: Path, position: int, say: Callable[[str], None]) -> int:
    """Passes on the new lines of a log, and returns the position after them."""
    if not log.exists():
        return position
    with log.open("rb") as file:
        file.seek(position)
        *lines, _ = file.read().split(b"\n")
    for line in lines:
        say(line.decode("utf-8", errors="replace"))
    return position + sum(len(line) + 1 for line in lines)


def _reason(log: Path) -> str:
    """The last line, if it is an error."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    return lines[-1].partition("error: ")[2] if lines else ""


@contextmanager
def _app(job: Job) -> Iterator[Path]:
    """A copy of our Flower App with the user's own files in it."""
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder) / "app"
        shutil.copytree(APP, app, ignore=shutil.ignore_patterns("__pycache__"))
        for place, file in own_files(job.method, job.settings.get("model")).items():
            if not file.is_file():
                raise UserError(f"{file}: no such file")
            (app / "fedc2i_app" / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, app / "fedc2i_app" / place)
        yield app


def open_link(own: CoordinatorFolder) -> SuperLink:
    """Starts the coordinator's SuperLink, with exactly the admitted sites registered."""
    own.state.mkdir(parents=True, exist_ok=True)
    link = SuperLink(
        own.logs,
        own.bind,
        own.port,
        tls=Tls(own.authority, own.certificate, own.key),
        database=own.state / "superlink.db",
        home=own.state / "flwr",
    )
    link.start()
    try:
        if not _register(link, own):
            link.stop()
            for path in own.state.glob("superlink.db*"):
                path.unlink()
            link.start()
            _register(link, own)
    except BaseException:
        link.stop()
        raise
    return link


def _register(link: SuperLink, own: CoordinatorFolder) -> bool:
    """Registers the admitted sites and no others.

    Returns:
        False if the SuperLink remembers one of the keys as removed. It never accepts such a key again, so its database
        has to be deleted.
    """
    wanted = {name: keys.pem_public(line) for name, line in admitted(own).items()}
    for node in link.nodes():
        if wanted.get(node.name) == node.public_key:
            del wanted[node.name]
        else:
            link.unregister(node)
    for name, key in wanted.items():
        try:
            link.register(key, name)
        except UserError as error:
            if "already in use" in str(error):
                return False
            raise
    return True
