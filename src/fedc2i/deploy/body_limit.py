"""A limit on the bodies of HTTP requests, checked before anything else reads them.

Flower reads a whole request into memory before it checks who sent it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

MOST_OBJECT = 8 * 2**20  # bytes of a part of a message; Flower sends at most 5 MiB of an array at once
MOST_OWN = 2**28  # of a request by the coordinator's own programs, such as a Flower App
MOST_OTHERS = 2**18  # of a request that has no part of a message in it
LARGE = ("/push-object", "/push-messages", "/push-task-output", "/push-logs")  # parts of messages, or lists of them


def most(path: str, own: bool = False) -> int:
    """The largest body that a path takes; ``own`` for programs of the coordinator itself."""
    return MOST_OWN if own else MOST_OBJECT if path.endswith(LARGE) else MOST_OTHERS


async def read_body(scope: Scope, receive: Any, limit: int) -> bytes | None:
    """The body of a request; None if it is larger than ``limit`` bytes, of which no more are read."""
    for name, value in scope.get("headers", ()):
        if name.lower() == b"content-length" and not (value.isdigit() and int(value[:20]) <= limit):
            return None
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":  # the caller has hung up
            return None
        parts.append(message.get("body", b""))
        size, more = size + len(parts[-1]), message.get("more_body", False)
        if size > limit:
            return None
    return b"".join(parts)


def replay(body: bytes, receive: Any) -> Callable[[], Awaitable[Any]]:
    """What an app receives for a body that has been read."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Any:
        return waiting.pop() if waiting else await receive()

    return again


async def refuse(send: Any, status: int, reason: bytes) -> None:
    """Answers with an error."""
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": reason})


class BodyLimit:
    """ASGI middleware that answers 413 to a body larger than its path takes."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Passes the request on, or answers 413."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = await read_body(scope, receive, most(scope.get("path", "")))
        if body is None:
            await refuse(send, 413, b"the body is too large")
        else:
            await self._app(scope, replay(body, receive), send)
