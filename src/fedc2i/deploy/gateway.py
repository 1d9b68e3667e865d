"""Flower's SuperLink behind a gate: other machines reach what sites need, other accounts no more than they.

The SuperLink has one port for three interfaces. That of the sites (``/v1/fleet``) checks a site's key. That for
starting runs and registering keys (``/v1/control``) checks nobody, and whoever reaches it could run code; that of the
server's own program (``/v1/runtime``) goes by tokens which other accounts can read in the list of processes. The gate
answers those two only to programs on the SuperLink's own machine that run under its own account (Linux; elsewhere to
all on that machine).

Started as a script, with the arguments of ``flower-superlink``; it imports nothing of ours, since that would bring
torch into the SuperLink, which has no use for it.
"""

from __future__ import annotations

import ipaddress
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Address = ipaddress.IPv4Address | ipaddress.IPv6Address
End = tuple[Address, int]  # with its port

_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_ESTABLISHED = "01"  # one that is closing has lost its owner


def _plain(address: Address) -> Address:
    """IPv4 in IPv6 clothes, without them."""
    return getattr(address, "ipv4_mapped", None) or address


def _end(text: str) -> End:
    """As the kernel writes it: words of four bytes in the machine's order, then the port."""
    words, _, port = text.partition(":")
    raw = bytes.fromhex(words)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(ipaddress.ip_address(raw)), int(port, 16)


def _owners(caller: End, called: End) -> Iterator[int]:
    """The accounts that hold the caller's end of a connection on this machine; one, or none if it is gone."""
    port = f":{caller[1]:04X}"
    for table in filter(Path.exists, _TABLES):
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            _, own, other, state, _, _, _, account, *_ = line.split()
            if own.endswith(port) and state == _ESTABLISHED and (_end(own), _end(other)) == (caller, called):
                yield int(account)


def _is_ours(scope: Scope) -> bool:
    """Whether the caller is on this machine, by loopback or by the very address it called, and of our account."""
    try:
        caller, called = ((_plain(ipaddress.ip_address(scope[end][0])), scope[end][1]) for end in ("client", "server"))
    except (KeyError, TypeError, ValueError):
        return False
    if not (caller[0].is_loopback or caller[0] == called[0]):
        return False
    return sys.platform != "linux" or os.geteuid() in _owners(caller, called)


class Gate:
    """ASGI middleware that refuses all but the sites' interface to other machines and to other accounts."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 403."""
        path = scope.get("path", "")
        is_open = path.startswith("/v1/fleet/") or path == "/health"
        if scope["type"] == "lifespan" or (scope["type"] == "http" and (is_open or _is_ours(scope))):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"only for the SuperLink's own machine and account"})


def main() -> None:
    """Starts the SuperLink with the gate as its outermost layer."""
    import uvicorn
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    extensions.get_middleware = lambda: (Middleware(Gate),)
    from flwr.superlink import main as superlink  # reads the line above

    layers: list[Any] = [layer.cls for layer in superlink._get_middleware()]
    if Gate not in layers:
        sys.exit("this version of Flower has no place for the gate; the pinned one is needed")
    # Else it waits for sites to hang up, and believes what a caller on this machine writes in X-Forwarded-For.
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=2, proxy_headers=False)
    flower_superlink()


if __name__ == "__main__":
    main()
