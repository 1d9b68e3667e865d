"""Flower's SuperLink as a process of ours: the server that all sites connect to, and runs on it.

All traffic between machines is encrypted, and every site is known by its key.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedc2i.core.errors import UserError
from fedc2i.deploy import keys
from fedc2i.deploy.child_process import ChildProcess, local_address, require_free, without_proxy
from fedc2i.deploy.coordinator_folder import CoordinatorFolder, admitted
from fedc2i.deploy.job import Job
from fedc2i.deploy.run_description import own_files
from fedc2i.flower.compat import ControlClient, erase_messages

APP = Path(__file__).parent / "app"
_POLL = 0.5  # seconds between looks at a run
_PATIENCE = 60.0  # seconds until the SuperLink must answer


class Node(NamedTuple):
    """A registered site."""

    id: int
    name: str
    status: str  # registered (never seen), online, offline
    public_key: bytes  # PEM


class RunStatus(NamedTuple):
    """Where a run of Flower's is."""

    id: int
    state: str  # pending, starting, running, completed, failed or stopped
    reason: str  # if it failed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("completed", "failed", "stopped")


class SuperLink(ChildProcess):
    """The coordinator's server: sites connect to its one port; runs are started from its own machine only.

    Its database, with nodes and runs, outlasts a restart; messages, with the models in them, are erased.
    """

    def __init__(self, own: CoordinatorFolder) -> None:
        super().__init__("superlink", own.folder / "logs", own.folder / "state" / "flwr", own.bind)
        self.own, self.address = own, local_address(own.bind, own.port)
        self._control = ControlClient(self.address, own.authority)
        self._database = own.folder / "state" / "superlink.db"
        self.refused = own.folder / "state" / "refused.prom"  # counters of the gate
        os.environ["no_proxy"] = without_proxy(own.bind)  # for our own calls to it

    def start(self) -> None:
        """Starts it and waits until it answers; a `UserError` if its port is taken or it does not answer."""
        own = self.own
        require_free(own.bind, own.port)
        (own.folder / "state").mkdir(parents=True, exist_ok=True)
        erase_messages(self._database)  # of a coordinator that was killed
        words = ["--host", own.bind, "--port", str(own.port), "--isolation", "subprocess"]
        words += ["--disable-runtime-dependency-installation", "--enable-supernode-auth"]
        words += ["--ssl-ca-certfile", str(own.authority), "--ssl-certfile", str(own.folder / "server.crt")]
        words += ["--ssl-keyfile", str(own.folder / "server.key")]
        words += ["--database", str(self._database)]
        gate = [sys.executable, "-P", "-m", "fedc2i.deploy.gateway", str(self.refused)]
        self.launch([*gate, *words], patience=5.0)
        until = time.monotonic() + _PATIENCE
        while True:
            if not self.is_alive():
                raise UserError(f"the SuperLink ended at its start: {self.tail()} (log: {self.log})")
            try:
                self.nodes()
                return
            except UserError as error:
                if time.monotonic() > until:
                    self.stop()
                    raise UserError(f"{error} (log: {self.log})") from None
            time.sleep(0.1)

    def stop(self) -> None:
        """Ends it with all that it started; sites keep trying until it is back."""
        self._control.close()  # it waits for open connections
        super().stop()
        erase_messages(self._database)

    # Control: each call raises a `UserError` if the SuperLink refuses it or does not answer.

    def nodes(self) -> list[Node]:
        """All registered sites."""
        nodes = self._control.call("ListNodes").nodes_info
        known = [node for node in nodes if node.status != "unregistered"]
        return [Node(node.node_id, node.name, node.status, node.public_key) for node in known]

    def register(self, key: bytes, name: str) -> None:
        """Lets the site with this public key (PEM) connect under this name."""
        self._control.call("RegisterNode", public_key=key, name=name)

    def unregister(self, node: Node) -> None:
        """Disconnects a site at once, and rejects it from now on."""
        self._control.call("UnregisterNode", node_id=node.id)

    def start_run(self, app: Path, config: dict[str, bool | int | float | str]) -> int:
        """Starts the Flower App in a folder, whose files travel to every site, and returns the run's number.

        ``config`` replaces values of the app's ``[tool.flwr.app.config]``.
        """
        return self._control.start_run(app, config)

    def runs(self) -> dict[int, RunStatus]:
        """All runs that it knows."""
        runs = self._control.call("ListRuns").run_dict.values()
        found = [RunStatus(run.run_id, run.status.sub_status or run.status.status, run.status.details) for run in runs]
        return {run.id: run for run in found}

    def stop_run(self, run: int) -> None:
        """Stops a run, unless it finishes at this very moment."""
        with contextlib.suppress(UserError):
            self._control.call("StopRun", run_id=run)


def open_superlink(own: CoordinatorFolder) -> SuperLink:
    """Starts the coordinator's SuperLink, with exactly the admitted sites registered."""
    link = SuperLink(own)
    link.start()
    try:
        if not _register(link, own):
            link.stop()
            for path in (own.folder / "state").glob("superlink.db*"):
                path.unlink()
            link.start()
            _register(link, own)
    except BaseException:
        link.stop()
        raise
    return link


def _register(link: SuperLink, own: CoordinatorFolder) -> bool:
    """Registers the admitted sites and no others.

    Returns False if the SuperLink remembers one of the keys as removed. It never accepts such a key again, so its
    database has to be deleted.
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


def run_on(link: SuperLink, job: Job, say: Callable[[str], None]) -> None:
    """Runs a job to its end on a SuperLink that is ready; the lines of the run's log go to ``say``.

    Raises a `UserError` if the run fails; the same job then resumes from its folder.
    """
    for left in link.runs().values():
        if not left.is_finished:
            link.stop_run(left.id)
            say(f"stopped run {left.id}, which an earlier start had left")
    log = job.out / "log.txt"
    position = log.stat().st_size if log.exists() else 0
    with _app(job) as app:
        run = link.start_run(app, {"job": str(job.write().absolute())})
        while (now := _status(link, run)) is None or not now.is_finished:
            position = _follow(log, position, say)
            time.sleep(_POLL)
    _follow(log, position, say)
    if now.state != "completed" or not job.is_finished:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else [""]
        reason = lines[-1].partition("error: ")[2] or now.reason or link.tail()
        raise UserError(f"the run {now.state}: {reason} (log: {link.log})")


def _status(link: SuperLink, run: int) -> RunStatus | None:
    """Where the run is; None while a busy SuperLink does not answer."""
    try:
        return link.runs().get(run)
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


@contextlib.contextmanager
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
