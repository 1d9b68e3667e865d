"""Flower's SuperNode as a process of ours: a site's program, which asks the SuperLink for work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from fedc2i.core.errors import UserError
from fedc2i.deploy.addresses import free_port, parse_address
from fedc2i.deploy.program import Program
from fedc2i.flower import compat


class SuperNode(Program):
    """A site's program: asks the SuperLink for work, and starts the site's own code for each message.

    Args:
        folder: for its log and Flower's own files.
        superlink: ``host:port`` of the SuperLink.
        ca: the certificate of the SuperLink's authority.
        key: the site's private key (OpenSSH).
        site: what the site's own code finds as ``context.node_config["site"]``.
        preload: modules that the site's own code imports, imported once for all messages.
    """

    def __init__(
        self,
        folder: Path,
        superlink: str,
        *,
        ca: Path,
        key: Path,
        site: str = "",
        preload: Sequence[str] = (),
        name: str = "supernode",
    ) -> None:
        super().__init__(name, folder)
        parse_address(superlink)
        for path in (ca, key):
            if not path.is_file():
                raise UserError(f"{path}: no such file")
        if "'" in site or "\n" in site:
            raise UserError(f"{site!r}: a site's folder must not have quotes or line breaks in its path")
        self.superlink, self.ca, self.key, self.site, self.preload = superlink, ca, key, site, tuple(preload)

    def start(self) -> None:
        """Starts it, without waiting: it keeps trying until the SuperLink is there."""
        words = ["--port", str(free_port()), "--preload", ",".join(self.preload), "--superlink", self.superlink]
        words += ["--root-certificates", str(self.ca.absolute())]
        words += ["--auth-supernode-private-key", str(self.key.absolute()), "--node-config", f"site='{self.site}'"]
        self.launch([sys.executable, "-P", "-m", "fedc2i.deploy.node_executor", *words])

    def node_id(self) -> int | None:
        """Its number at the SuperLink; None until it has been accepted."""
        return compat.node_id(self.output())

    def rejection(self) -> str | None:
        """Why the SuperLink rejected it, if it ended for that."""
        return compat.rejection(self.output())
