"""A run on a SuperLink of ours, from the job to the finished folder: hand it over, follow its log, report its end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.core.files import write_atomically
from fedc2i.deploy.coordinator_folder import CoordinatorFolder, admitted
from fedc2i.deploy.flower_processes import SuperLink, Tls
from fedc2i.deploy.lead import JOB, Job
from fedc2i.deploy.program import Environment
from fedc2i.deploy.run_description import files
from fedc2i.deploy.superlink_control import Run, public_key

APP = Path(__file__).parent / "app"
PRELOAD = ("torch", "fedc2i.deploy.client_app")  # what a site's program imports, once for all messages
_LOOK = 0.5  # seconds


def conduct(link: SuperLink, job: Job, say: Callable[[str], None]) -> None:
    """Runs a job on a SuperLink that is ready, to its end; what it has to tell goes to ``say``, line by line.

    Raises:
        UserError: if the run fails; its folder then holds what was finished, and the same job goes on from there.
    """
    for run in link.control.stop_all():
        say(f"stopped run {run}, which was left over from before")
    write_atomically(job.out / JOB, job.to_json().encode())
    log = job.out / "log.txt"
    told = log.stat().st_size if log.exists() else 0
    with _app(job) as app:
        run = link.control.run(app, {"job": str((job.out / JOB).absolute())})
        while (now := _status(link, run)) is None or not now.is_finished:
            told = _follow(log, told, say)
            time.sleep(_LOOK)
    _follow(log, told, say)
    if now.state != "completed" or not (job.out / "summary.json").is_file():
        raise UserError(f"the run has {now.state}: {_reason(log) or now.reason or link.tail()} (log: {link.log})")


def _status(link: SuperLink, run: int) -> Run | None:
    """Where the run is; none while a busy SuperLink does not answer."""
    if not link.is_alive():
        raise UserError(f"the SuperLink ended: {link.tail()} (log: {link.log})")
    try:
        return link.control.status(run)
    except UserError:
        if not link.is_alive():
            raise UserError(f"the SuperLink ended: {link.tail()} (log: {link.log})") from None
        return None


def _follow(log: Path, told: int, say: Callable[[str], None]) -> int:
    """Passes on the lines that are new; how far it has read."""
    if not log.exists():
        return told
    with log.open("rb") as file:
        file.seek(told)
        *lines, _ = file.read().split(b"\n")
    for line in lines:
        say(line.decode("utf-8", errors="replace"))
    return told + sum(len(line) + 1 for line in lines)


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
        for place, file in files(job.method, job.settings.get("model")).items():
            if not file.is_file():
                raise UserError(f"{file}: no such file")
            (app / "fedc2i_app" / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, app / "fedc2i_app" / place)
        yield app


def open_link(own: CoordinatorFolder, insecure: bool = False, forced: bool = False) -> SuperLink:
    """Starts the coordinator's SuperLink, with exactly the admitted sites registered.

    Args:
        own: the coordinator's folder.
        insecure: plain text, and anyone may come; on this machine alone unless ``forced``.
        forced: plain text on other addresses, too.

    Raises:
        UserError: if it does not start.
    """
    own.state.mkdir(parents=True, exist_ok=True)
    link = SuperLink(
        own.logs,
        own.bind,
        own.port,
        tls=None if insecure else Tls(own.authority, own.certificate, own.key),
        auth=not insecure,
        database=own.state / ("insecure.db" if insecure else "superlink.db"),
        environment=Environment(own.state / "flwr", own.bind),
        forced=forced,
    )
    link.start()
    if insecure:
        return link
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
        False if the SuperLink remembers one of the keys as removed: it never takes such a key again, so it has to
        forget everything.
    """
    wanted = {name: public_key(own.sites / f"{name}.pub") for name in admitted(own)}
    for node in link.control.nodes():
        if wanted.get(node.name) != node.public_key:
            link.control.unregister(node.name)
    for name, key in wanted.items():
        try:
            link.control.register(key, name)
        except UserError as error:
            if "already in use" in str(error):
                return False
            raise
    return True
