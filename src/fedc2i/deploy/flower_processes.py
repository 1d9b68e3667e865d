"""Flower's long-lived programs as processes of ours: the SuperLink on the server, a SuperNode at each site.

All traffic between machines is encrypted and every site is known by its key; plain text is for this machine alone.
"""

from __future__ import annotations

import re
import ssl
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedc2i.core.errors import UserError
from fedc2i.deploy import gateway, supernode
from fedc2i.deploy.addresses import LOOPBACK, free_port, is_loopback, local_address, require_free
from fedc2i.deploy.program import Environment, Program
from fedc2i.deploy.superlink_control import Control, Value

REFUSED = 305  # Flower's exit code for a node that the SuperLink does not let in


class Tls(NamedTuple):
    """The files of an encrypted server: the authority's certificate, the server's own, and its private key."""

    ca: Path
    certificate: Path
    key: Path


class SuperLink(Program):
    """The server: sites connect to its one port; runs are started from its own machine only.

    Args:
        folder: for its log, its state and Flower's own files.
        host: address to listen at; ``0.0.0.0`` for all interfaces.
        port: None for a free one.
        tls: its certificate must name ``host``, and ``127.0.0.1`` if that is ``0.0.0.0``; None is plain text, for
            loopback without ``auth`` only.
        auth: whether only sites with a registered key are let in.
        database: file with nodes, runs and messages that outlasts a restart; None keeps them in memory.
        forced: plain text on other addresses than loopback, by explicit wish.

    Raises:
        UserError: if the options do not go together.
    """

    def __init__(
        self,
        folder: Path,
        host: str = LOOPBACK,
        port: int | None = None,
        *,
        tls: Tls | None,
        auth: bool = True,
        database: Path | None = None,
        environment: Environment | None = None,
        forced: bool = False,
    ) -> None:
        super().__init__("superlink", folder, environment)
        if tls is None and auth:
            raise UserError("authentication of sites needs tls=(ca, certificate, key)")
        if not (tls and auth) and not is_loopback(host) and not forced:
            raise UserError(
                f"{host}: plain text without authentication is for 127.0.0.1 alone; --force allows it, and then "
                "whoever reaches the port can run code at every site"
            )
        for path in tls or ():
            if not path.is_file():
                raise UserError(f"no such file: {path} (of the server's tls=(ca, certificate, key))")
        self.host, self.port, self.tls, self.auth, self.database = host, port or free_port(), tls, auth, database
        self.control = Control(local_address(host, self.port), tls.ca if tls else None)

    def start(self, limit: float = 60.0) -> None:
        """Starts it and waits until it answers.

        Raises:
            UserError: if its port is taken, it ends, or it does not answer within ``limit`` seconds.
        """
        require_free(self.host, self.port)
        words = [sys.executable, "-P", gateway.__file__, "--host", self.host, "--port", str(self.port)]
        words += ["--disable-runtime-dependency-installation", "--isolation", "subprocess"]
        if self.tls:
            ca, certificate, key = (str(path.absolute()) for path in self.tls)
            words += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        else:
            words += ["--insecure"]
        if self.auth:
            words += ["--enable-supernode-auth"]
        if self.database:
            self.database.parent.mkdir(parents=True, exist_ok=True)
            words += ["--database", str(self.database.absolute())]
        self.launch(words, patience=5.0)
        self._wait_until_ready(limit)

    def stop(self) -> None:
        """Asks it to end, waits until nothing of it is left; sites keep trying until it is back."""
        self.control.close()  # it waits for open connections
        super().stop()

    def _wait_until_ready(self, limit: float) -> None:
        trust = ssl.create_default_context(cafile=str(self.tls.ca)) if self.tls else None
        url = f"{'https' if self.tls else 'http'}://{local_address(self.host, self.port)}/health"
        handlers = [urllib.request.ProxyHandler({}), *([urllib.request.HTTPSHandler(context=trust)] if trust else [])]
        opener = urllib.request.build_opener(*handlers)
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
                break  # it will not get better
            time.sleep(0.1)
        self.stop()
        raise UserError(f"the SuperLink did not get ready at {url}: {reason} (log: {self.log})")


class SuperNode(Program):
    """A site's program: asks the SuperLink for work, and starts the site's own code for each message.

    Args:
        folder: for its log and Flower's own files.
        superlink: ``host:port`` of the SuperLink.
        root_certificates: the authority's certificate; None is plain text, to this machine only.
        private_key: this site's key (OpenSSH, NIST curve); None where the SuperLink lets anyone in.
        node_config: what the site's own code finds in ``context.node_config``.
        port: of the interface to the site's own code, on loopback; None for a free one.
        poll: seconds between two questions for work; Flower's own are 3.
        preload: modules that the site's own code imports, imported once for all messages.
        forced: plain text to other machines, by explicit wish.

    Raises:
        UserError: if the options do not go together.
    """

    def __init__(
        self,
        folder: Path,
        superlink: str,
        *,
        root_certificates: Path | None,
        private_key: Path | None,
        node_config: Mapping[str, Value] | None = None,
        port: int | None = None,
        poll: float = 1.0,
        preload: Sequence[str] = (),
        environment: Environment | None = None,
        name: str = "supernode",
        forced: bool = False,
    ) -> None:
        super().__init__(name, folder, environment)
        host = superlink.rpartition(":")[0].strip("[]")
        if not host or not superlink.rpartition(":")[2].isdigit():
            raise UserError(f"superlink={superlink!r}: write it as host:port")
        if root_certificates is None and (private_key or not (forced or is_loopback(host))):
            raise UserError(f"{superlink}: a certificate is needed; plain text is for 127.0.0.1 alone, unless forced")
        for path in (root_certificates, private_key):
            if path and not path.is_file():
                raise UserError(f"no such file: {path}")
        self.superlink, self.root_certificates, self.private_key = superlink, root_certificates, private_key
        self.node_config, self._port, self.poll, self.preload = dict(node_config or {}), port, poll, tuple(preload)

    def start(self) -> None:
        """Starts it, without waiting: it keeps trying until the SuperLink is there."""
        words = [sys.executable, "-P", supernode.__file__, "--port", str(self._port or free_port())]
        words += ["--poll", str(self.poll), "--preload", ",".join(self.preload), "--superlink", self.superlink]
        if self.root_certificates:
            words += ["--root-certificates", str(self.root_certificates.absolute())]
        else:
            words += ["--insecure"]
        if self.private_key:
            words += ["--auth-supernode-private-key", str(self.private_key.absolute())]
        if self.node_config:
            words += ["--node-config", " ".join(f"{key}={_toml(value)}" for key, value in self.node_config.items())]
        self.launch(words)

    def node_id(self) -> int | None:
        """Its number at the SuperLink; None until it has been let in."""
        found = re.findall(r"SuperNode ID: (\d+)", self.said())
        return int(found[-1]) if found else None

    def refused(self) -> str | None:
        """Why the SuperLink did not let it in, if it ended for that."""
        lines = self.said().splitlines()
        at = [number for number, line in enumerate(lines) if f"Exit Code: {REFUSED}" in line]
        if not at:
            return None
        reason = [line.strip() for line in lines[at[-1] + 1 : at[-1] + 4] if "Failed to initialize" not in line]
        return " ".join(filter(None, reason))


def _toml(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        if "'" in value or "\n" in value:
            raise UserError(f"node_config: {value!r} must not contain quotes or line breaks")
        return f"'{value}'"
    return repr(value)
