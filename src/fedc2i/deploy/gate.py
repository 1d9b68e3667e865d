"""Flower's SuperLink behind a gate: other machines reach what sites need, and nothing else.

The SuperLink has one port for three interfaces. That of the sites (``/v1/fleet``) checks a site's key; that for
starting runs and registering keys (``/v1/control``) and that of the server's own program (``/v1/runtime``) check
nobody. Whoever reaches the port could run code. The gate answers those only to the SuperLink's own machine.

Started as a script, with the arguments of ``flower-superlink``; it imports nothing of ours, since that would bring
torch into the SuperLink, which has no use for it.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def _is_local(scope: Scope) -> bool:
    """Whether the caller is on this machine: by loopback, or by the very address it called."""
    try:
        caller, called = (ipaddress.ip_address(scope[end][0]) for end in ("client", "server"))
    except (KeyError, TypeError, ValueError):
        return False
    mapped = getattr(caller, "ipv4_mapped", None) or caller
    return mapped.is_loopback or caller == called


class Gate:
    """ASGI middleware that refuses all but the sites' interface to callers from elsewhere."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on, or answers 403."""
        path = scope.get("path", "")
        is_open = path.startswith("/v1/fleet/") or path == "/health"
        if scope["type"] == "lifespan" or (scope["type"] == "http" and (is_open or _is_local(scope))):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"only from the SuperLink's own machine"})


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
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=2)  # else it waits for sites to hang up
    flower_superlink()


if __name__ == "__main__":
    main()
