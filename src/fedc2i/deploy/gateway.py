"""The program that the coordinator runs for `SuperLink`: Flower's SuperLink behind a gate.

The SuperLink has three interfaces on one port. The one for sites (``/v1/fleet``) checks a site's key. The one for
starting runs and registering keys (``/v1/control``) checks nothing, so anyone who reaches it can run code. The one for
the server's own program (``/v1/runtime``) checks tokens, which other accounts can read in the list of processes. The
gate allows those two only to programs on the SuperLink's own machine that run under its own account (on Linux; on
other systems to all programs on that machine). It limits the size of requests before anything else reads them, and
rejects messages whose source is not the node that sends them: Flower checks the node's key, but not the source.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedc2i.deploy.body_limit import App, Scope, most, read_body, refuse, replay
from fedc2i.deploy.run_counters import RefusedRequests
from fedc2i.flower import compat

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address, int]  # with its port

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"  # one that is closing has lost its owner


def _plain(address: Address) -> Address:
    """IPv4 addresses that are written as IPv6 become plain IPv4."""
    return getattr(address, "ipv4_mapped", None) or address


def _end(text: str) -> End:
    """Parses the kernel's form: words of four bytes in the machine's byte order, then the port."""
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(ipaddress.ip_address(raw)), int(port, 16)


def _owners(caller: End, called: End) -> Iterator[int]:
    """The account that holds the caller's end of a connection on this machine; nothing if it was closed."""
    port = f":{caller[1]:04X}"
    for table in filter(Path.exists, _TABLES):
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, own, other, state, _, _, _, account, *_ = line.split()
            if own.endswith(port) and state == _ESTABLISHED and (_end(own), _end(other)) == (caller, called):
                yield int(account)


def _is_ours(scope: Scope) -> bool:
    """Whether the caller is on this machine (loopback, or the address that it called) and runs under our account."""
    try:
        caller, called = ((_plain(ipaddress.ip_address(scope[end][0])), scope[end][1]) for end in ("client", "server"))
    except (KeyError, TypeError, ValueError):
        return False
    if not (caller[0].is_loopback or caller[0] == called[0]):
        return False
    return sys.platform != "linux" or os.geteuid() in _owners(caller, called)


class Gate:
    """ASGI middleware that allows other machines and accounts only the sites' interface, and sound requests there."""

    def __init__(self, app: App, refused: RefusedRequests | None = None) -> None:
        """``refused`` counts what it does not let through."""
        self._app, self._refused = app, refused

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes the request on, or answers 403 or 413."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        path = scope.get("path", "")
        is_open = path.startswith("/v1/fleet/") or path == "/health"
        if not is_open and not _is_ours(scope):
            await self._refuse(send, 403, b"only for the SuperLink's own machine and account")
            return
        body = await read_body(scope, receive, most(path, own=not is_open))
        if body is None:
            await self._refuse(send, 413, b"the body is too large")
        elif path.startswith("/v1/fleet/push-messages") and not compat.is_from_its_node(body):
            await self._refuse(send, 403, b"a message's source must be the node that sends it")
        else:
            await self._app(scope, replay(body, receive), send)

    async def _refuse(self, send: Any, status: int, reason: bytes) -> None:
        if self._refused is not None:
            self._refused.add(status)
        await refuse(send, status, reason)


if __name__ == "__main__":
    compat.run_superlink(Gate, sys.argv[2:], refused=RefusedRequests(Path(sys.argv[1])))
