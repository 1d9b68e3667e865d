"""The gate in front of the SuperLink: other machines and accounts reach only the sites' interface."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedc2i.deploy.gateway import Gate
from fedc2i.deploy.run_counters import RefusedRequests


def status_of(path: str, client: tuple[Any, ...], server: tuple[Any, ...] = ("192.0.2.1", 8000)) -> int:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "path": path, "client": client, "server": server}
    asyncio.run(Gate(app)(scope, receive, send))  # type: ignore[arg-type]
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    ("path", "caller", "status"),
    [
        ("/v1/fleet/pull-messages", "192.0.2.9", 200),
        ("/health", "192.0.2.9", 200),
        ("/v1/control/start-run", "192.0.2.9", 403),
        ("/v1/runtime/acquire-task", "192.0.2.9", 403),
        ("/v1/fleet", "192.0.2.9", 403),
        ("/docs", "192.0.2.9", 403),
        ("/v1/control/start-run", "not an address", 403),
        ("/v1/control/start-run", "127.0.0.1", 403),  # there is no such connection
        ("/v1/control/start-run", "192.0.2.1", 403),
    ],
)
def test_gate_keeps_control_to_its_own_machine(path: str, caller: str, status: int) -> None:
    assert status_of(path, (caller, 1)) == status


@pytest.mark.parametrize(("family", "bound", "caller"), [(4, "127.0.0.1", "127.0.0.1"), (6, "::", "127.0.0.1")])
def test_gate_is_open_to_a_program_of_the_same_account(family: int, bound: str, caller: str) -> None:
    """Over a real connection; the second one is IPv4 to a server that listens on all of IPv6."""
    if family == 6 and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    kind = socket.AF_INET6 if family == 6 else socket.AF_INET
    with (
        socket.create_server((bound, 0), family=kind, dualstack_ipv6=family == 6) as server,
        socket.create_connection((caller, server.getsockname()[1])) as ours,
    ):
        accepted, seen_from = server.accept()
        with accepted:
            assert status_of("/v1/control/start-run", seen_from, accepted.getsockname()) == 200
            assert status_of("/v1/control/start-run", (seen_from[0], 1), accepted.getsockname()) == 403
            ours.shutdown(socket.SHUT_RDWR)
            assert status_of("/v1/control/start-run", seen_from, accepted.getsockname()) == 403


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("0100007F:9C40 0100007F:1F40 01 0:0 0:0 0 {own}", 200),  # 127.0.0.1:40000 to 127.0.0.1:8000
        ("0100007F:9C40 0100007F:1F40 01 0:0 0:0 0 {other}", 403),
        ("0100007F:9C40 0100007F:1F40 06 0:0 0:0 0 {own}", 403),  # closed, and nobody's
        ("0100007F:9C40 0100007F:1F41 01 0:0 0:0 0 {own}", 403),  # to another port
        ("0200007F:9C40 0100007F:1F40 01 0:0 0:0 0 {own}", 403),  # from another address
    ],
)
def test_gate_goes_by_the_kernels_list(line: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = tmp_path / "tcp"
    written = line.format(own=os.geteuid(), other=os.geteuid() + 1)
    table.write_text(f"sl local_address rem_address st ...\n   0: {written} 0 177 1 0\n", encoding="ascii")
    monkeypatch.setattr("fedc2i.deploy.gateway._TABLES", (table, tmp_path / "no IPv6"))
    assert status_of("/v1/runtime/pull-object", ("127.0.0.1", 40000), ("127.0.0.1", 8000)) == status
    table.unlink()
    assert status_of("/v1/runtime/pull-object", ("127.0.0.1", 40000), ("127.0.0.1", 8000)) == 403


def test_refused_requests_are_counted_and_seldom_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.deploy.run_counters._PAUSE", 0.05)
    file, scope = tmp_path / "refused.prom", {"type": "http", "client": ("192.0.2.9", 1), "server": ("192.0.2.1", 1)}
    refused = RefusedRequests(file)
    gate = Gate(None, refused)  # type: ignore[arg-type]
    large = [(b"content-length", b"9" * 9)]

    async def nothing(message: Any) -> None:
        """Nobody reads the answers."""

    async def ask() -> tuple[str, str]:
        for k in range(12):
            path = {"path": "/docs"} if k % 4 else {"path": "/v1/fleet/pull-messages", "headers": large}
            await gate({**scope, **path}, None, nothing)
        early = file.read_text()
        await asyncio.sleep(0.2)
        return early, file.read_text()

    early, late = asyncio.run(ask())
    assert early.splitlines()[2:] == [f'fedc2i_refused_requests_total{{status="{own}"}} 0' for own in (403, 413)]
    assert late.splitlines()[2:] == [
        'fedc2i_refused_requests_total{status="403"} 9',
        'fedc2i_refused_requests_total{status="413"} 3',
    ]
