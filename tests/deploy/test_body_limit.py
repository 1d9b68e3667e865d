"""Requests that are too large, or in another node's name, end at the gate, before anything reads or believes them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("flwr")
import httpx
from flwr.proto.fleet_pb2 import PushMessagesRequest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedc2i.deploy import gateway
from fedc2i.deploy.body_limit import MOST_OBJECT, MOST_OTHERS, MOST_OWN, BodyLimit
from fedc2i.deploy.gateway import Gate
from fedc2i.flower import compat

PIECE = 2**16


class Caller:
    """Sends a body in pieces; counts what was taken of it, and what the app got."""

    def __init__(self, layer: Any, path: str, size: int, declared: bool = True) -> None:
        self.taken, self.got, self.status = 0, -1, 0
        headers = [(b"content-length", str(size).encode())] if declared else [(b"transfer-encoding", b"chunked")]
        scope = {
            "type": "http",
            "path": path,
            "headers": headers,
            "client": ("192.0.2.9", 1),
            "server": ("192.0.2.1", 2),
        }

        async def receive() -> Any:
            part = min(PIECE, size - self.taken)
            self.taken += part
            return {"type": "http.request", "body": bytes(part), "more_body": self.taken < size}

        async def send(message: Any) -> None:
            self.status = self.status or message["status"]

        async def app(scope: Any, receive: Any, send: Any) -> None:
            self.got = len((await receive())["body"])
            await send({"type": "http.response.start", "status": 200})

        asyncio.run(layer(app)(scope, receive, send))


@pytest.mark.parametrize("layer", [Gate, BodyLimit])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("/v1/fleet/register-node", MOST_OTHERS),
        ("/v1/fleet/push-object", MOST_OBJECT),
        ("/v1/fleet/anything", MOST_OTHERS),
        ("/health", MOST_OTHERS),
    ],
)
def test_a_body_is_read_up_to_its_limit(layer: Any, declared: bool, path: str, limit: int) -> None:
    fits = Caller(layer, path, limit, declared)
    assert (fits.status, fits.got) == (200, limit)
    large = Caller(layer, path, 3 * limit, declared)
    assert (large.status, large.got) == (413, -1)
    assert large.taken <= (0 if declared else limit + PIECE)


def test_a_length_that_is_no_number_is_too_large() -> None:
    async def nobody(*_: Any) -> None:
        raise AssertionError("nothing is read or passed on")

    for text in (b"-1", b"x", b"9" * 5000, b""):
        said: list[Any] = []

        async def send(message: Any, said: list[Any] = said) -> None:
            said.append(message)

        scope = {"type": "http", "path": "/health", "headers": [(b"Content-Length", text)]}
        asyncio.run(BodyLimit(nobody)(scope, nobody, send))
        assert said[0]["status"] == 413


def test_the_coordinators_own_programs_may_send_an_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_is_ours", lambda scope: True)
    assert Caller(Gate, "/v1/control/start-run", MOST_OBJECT * 2).status == 200
    assert Caller(Gate, "/v1/control/start-run", MOST_OWN + 1).status == 413


def test_the_interface_of_a_node_has_the_limit() -> None:
    """As `compat.run_supernode` puts it on: Flower's own app would read all of it before it looks for a token."""
    from flwr.supernode.main import create_app

    async def post(app: Any, size: int) -> int:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            headers = {"content-type": "application/x-protobuf"}
            answer = await client.post("/v1/runtime/acquire-task", content=bytes(size), headers=headers)
            return answer.status_code

    assert asyncio.run(post(BodyLimit(create_app()), MOST_OTHERS + 1)) == 413
    assert asyncio.run(post(BodyLimit(create_app()), 10)) not in (200, 413)


def pushed(node: int, *sources: int) -> bytes:
    request = PushMessagesRequest()
    request.node.node_id = node
    for source in sources:
        request.messages_list.add().metadata.src_node_id = source
    return request.SerializeToString()


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (pushed(7, 7), 200),
        (pushed(7, 8), 403),
        (pushed(7, 7, 8), 403),
        (pushed(7, 1), 403),  # the SuperLink itself
        (pushed(7), 200),
        (b"\xff\xff", 403),
    ],
    ids=["own", "another's", "one of another", "the SuperLink's", "none", "no message"],
)
def test_a_message_must_come_from_the_node_that_sends_it(body: bytes, status: int) -> None:
    said: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        said.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == body
        await send({"type": "http.response.start", "status": 200})

    scope = {"type": "http", "path": "/v1/fleet/push-messages", "headers": []}
    asyncio.run(Gate(app)(scope, receive, send))
    assert said[0]["status"] == status


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 30), st.binary(max_size=4))
def test_any_body_is_from_its_node_or_not(noise: bytes, place: int, middle: bytes) -> None:
    """Whatever a stranger sends is decided without an error, and a sound message is not decided by chance."""
    assert compat.is_from_its_node(noise) in (True, False)
    sound = pushed(2**40 + 7, 2**40 + 7)
    assert compat.is_from_its_node(sound[:place] + middle + sound[place:]) in (True, False)
    assert compat.is_from_its_node(sound)
