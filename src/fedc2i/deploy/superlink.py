"""Flower's SuperLink as a process of ours: the server that all sites connect to, and its control interface.

All traffic between machines is encrypted, and every site is known by its key.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from fedc2i.core.errors import UserError
from fedc2i.deploy.addresses import LOOPBACK, free_port, local_address, require_free
from fedc2i.deploy.program import Program, without_proxy
from fedc2i.flower.compat import ControlClient


class Tls(NamedTuple):
    """The files of an encrypted server: the authority's certificate, the server's own, and its private key."""

    ca: Path
    certificate: Path
    key: Path


class Node(NamedTuple):
    """A registered site."""

    id: int
    name: str
    status: str  # registered (never seen), online, offline
    public_key: bytes  # PEM


@dataclass(frozen=True)
class RunStatus:
    """Where a run of Flower's is: ``state`` is pending, starting, running, completed, failed or stopped."""

    id: int
    state: str
    reason: str  # if it failed

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("completed", "failed", "stopped")


class SuperLink(Program):
    """The server: sites connect to its one port; runs are started from its own machine only.

    Args:
        folder: for its log and Flower's own files.
        host: address to listen on; ``0.0.0.0`` for all interfaces.
        port: None for a free one.
        tls: the certificate must name ``host``, and ``127.0.0.1`` if that is ``0.0.0.0``.
        database: file with nodes, runs and messages that outlasts a restart; None keeps them in memory.
        home: Flower's own folder.
    """

    def __init__(
        self,
        folder: Path,
        host: str = LOOPBACK,
        port: int | None = None,
        *,
        tls: Tls,
        database: Path | None = None,
        home: Path | None = None,
    ) -> None:
        super().__init__("superlink", folder, home, host)
        for path in tls:
            if not path.is_file():
                raise UserError(f"{path}: no such file")
        self.host, self.port, self.tls, self.database = host, port or free_port(), tls, database
        self.address = local_address(host, self.port)
        self._control = ControlClient(self.address, tls.ca)
        os.environ["no_proxy"] = without_proxy(host)  # for our own calls to it

    def start(self, limit: float = 60.0) -> None:
        """Starts it and waits until it answers.

        Raises:
            UserError: if its port is taken, it ends, or it does not answer within ``limit`` seconds.
        """
        require_free(self.host, self.port)
        ca, certificate, key = (str(path.absolute()) for path in self.tls)
        words = ["--host", self.host, "--port", str(self.port), "--isolation", "subprocess"]
        words += ["--disable-runtime-dependency-installation", "--enable-supernode-auth"]
        words += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        if self.database:
            self.database.parent.mkdir(parents=True, exist_ok=True)
            words += ["--database", str(self.database.absolute())]
        self.launch([sys.executable, "-P", "-m", "fedc2i.deploy.gateway", *words], patience=5.0)
        self._wait_until_ready(limit)

    def stop(self) -> None:
        """Ends it with all that it started; sites keep trying until it is back."""
        self._control.close()  # it waits for open connections
        super().stop()

    def _wait_until_ready(self, limit: float) -> None:
        trust = ssl.create_default_context(cafile=str(self.tls.ca))
        url = f"https://{self.address}/health"
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
        )
        until = time.monotonic() + limit
        reason = "no answer"
        while time.monotonic() < until:
            if not self.is_alive():
                raise UserError(f"the SuperLink ended at its start: {self.tail()} (log: {self.log})")
            try:
                with opener.open(url, timeout=2):
                    return
            except (OSError, urllib.error.URLError) as error:
                reason = str(getattr(error, "reason", error))
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                break  # waiting does not help
            time.sleep(0.1)
        self.stop()
        raise UserError(f"the SuperLink did not answer at {url}: {reason} (log: {self.log})")

    # Control: each call raises a `UserError` if the SuperLink refuses it or does not answer.

    def nodes(self) -> list[Node]:
        """All registered sites."""
        nodes = self._control.call("ListNodes").nodes_info
        known = [node for node in nodes if node.status != "unregistered"]
        return [Node(node.node_id, node.name, node.status, node.public_key) for node in known]

    def register(self, key: bytes, name: str) -> int:
        """Lets the site with this public key (PEM) connect under this name, and returns its number."""
        return int(self._control.call("RegisterNode", public_key=key, name=name).node_id)

    def unregister(self, node: Node) -> None:
        """Disconnects a site at once, and rejects it from now on."""
        self._control.call("UnregisterNode", node_id=node.id)

    def start_run(self, app: Path, config: dict[str, bool | int | float | str]) -> int:
        """Starts the Flower App in a folder, and returns the run's number.

        Args:
            app: its files travel to the SuperLink and to every site.
            config: replaces values of the app's ``[tool.flwr.app.config]``.
        """
        return self._control.start_run(app, config)

    def run_status(self, run: int) -> RunStatus:
        """Where a run is."""
        for status in self._statuses(run_id=run):
            if status.id == run:
                return status
        raise UserError(f"the SuperLink at {self.address} has no run {run}")

    def stop_runs(self) -> list[int]:
        """Stops all runs that are not finished, for example from before a restart; returns their numbers."""
        unfinished = [status.id for status in self._statuses() if not status.is_finished]
        for run in unfinished:
            with contextlib.suppress(UserError):  # it may finish at this very moment
                self._control.call("StopRun", run_id=run)
        return unfinished

    def _statuses(self, **fields: int) -> list[RunStatus]:
        runs = self._control.call("ListRuns", **fields).run_dict.values()
        return [RunStatus(run.run_id, run.status.sub_status or run.status.status, run.status.details) for run in runs]
