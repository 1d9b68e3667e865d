"""Flower's programs as real processes on loopback: they start, do their work, and leave nothing behind."""

from __future__ import annotations

import asyncio
import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from processes_helpers import write_app, write_key, write_tls

from fedc2i.core.errors import UserError
from fedc2i.deploy.addresses import free_port
from fedc2i.deploy.flower_processes import SuperLink, SuperNode, Tls
from fedc2i.deploy.gateway import Gate
from fedc2i.deploy.process_guard import below
from fedc2i.deploy.program import Environment, Program
from fedc2i.deploy.superlink_control import Run, public_key
from fedc2i.deploy.supervisor import supervise


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait(condition: Callable[[], Any], limit: float) -> Any:
    until = time.monotonic() + limit
    while not (result := condition()) and time.monotonic() < until:
        time.sleep(0.1)
    return result


class Shell(Program):
    """A program that needs no second to start."""

    superlink = "nowhere:1"

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__("shell", folder)
        self.script, self.starts = script, 0

    def start(self) -> None:
        self.starts += 1
        self.launch(["sh", "-c", self.script], patience=1.0)

    def node_id(self) -> int | None:
        return None

    def refused(self) -> str | None:
        return None


# The keeper


def test_stop_ends_what_the_program_started_even_in_sessions_of_its_own(tmp_path: Path) -> None:
    with Shell(tmp_path, "setsid sleep 60 & (sleep 61 & sleep 62 &) ; sleep 63") as shell:
        assert shell.pid
        pids = _wait(lambda: len(found := below(shell.pid)) >= 5 and found, 5)
        assert pids
    assert not any(map(_exists, pids))


def test_the_end_of_the_program_ends_what_it_left(tmp_path: Path) -> None:
    shell = Shell(tmp_path, "setsid sleep 60 & echo $! >pid; exit 3")
    shell.start()
    assert _wait(lambda: not shell.is_alive(), 5)
    assert shell.exit_code == 3
    assert not _exists(int((tmp_path / "pid").read_text()))


def test_a_program_that_does_not_listen_is_ended_by_force(tmp_path: Path) -> None:
    with Shell(tmp_path, "trap '' TERM; echo ready; while true; do sleep 0.1; done") as shell:
        assert _wait(lambda: "ready" in shell.said(), 5)
        assert shell.pid
        assert (pids := below(shell.pid))
    assert shell.exit_code == 128 + signal.SIGKILL
    assert not any(map(_exists, pids))


_PARENT = """
import sys, time
from pathlib import Path
from fedc2i.deploy.program import Program
program = Program("shell", Path(sys.argv[1]))
program.launch(["sh", "-c", "setsid sleep 60 & sleep 61"])
time.sleep(60)
"""


def test_programs_end_when_our_process_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(tmp_path)])
    try:
        pids = _wait(lambda: len(found := below(parent.pid)) >= 4 and found, 20)
        assert pids
    finally:
        parent.kill()
        parent.wait()
    assert _wait(lambda: not any(map(_exists, pids)), 5)


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    program = Program("nothing", tmp_path)
    program.launch([str(tmp_path / "missing")])
    assert _wait(lambda: not program.is_alive(), 5)
    assert program.exit_code == 127
    assert "cannot start" in program.tail()


# Options


def test_plain_text_and_open_doors_are_for_loopback_only(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    with pytest.raises(UserError, match="needs tls"):
        SuperLink(tmp_path, tls=None)
    for options in ({"tls": None, "auth": False}, {"tls": tls, "auth": False}):
        with pytest.raises(UserError, match=r"127\.0\.0\.1 alone"):
            SuperLink(tmp_path, "0.0.0.0", **options)
    with pytest.raises(UserError, match="a certificate is needed"):
        SuperNode(tmp_path, "192.0.2.1:8000", root_certificates=None, private_key=None)
    with pytest.raises(UserError, match="a certificate is needed"):
        SuperNode(tmp_path, "127.0.0.1:8000", root_certificates=None, private_key=tls.key)
    with pytest.raises(UserError, match="host:port"):
        SuperNode(tmp_path, "somewhere", root_certificates=tls.ca, private_key=tls.key)
    with pytest.raises(UserError, match="no such file"):
        SuperLink(tmp_path, tls=Tls(tls.ca, tls.certificate, tmp_path / "missing"))


def test_a_taken_port_is_told_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen on port {port} of 127.0.0.1"):
            SuperLink(tmp_path, port=port, tls=write_tls(tmp_path)).start()


def test_variables_are_ours_and_foreign_flower_settings_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLWR_INTERNAL_GRPC_FLEET_API", "1")
    monkeypatch.setenv("no_proxy", "example.org")
    told = Environment(tmp_path, "10.1.2.3").variables()
    assert "FLWR_INTERNAL_GRPC_FLEET_API" not in told
    assert told["FLWR_HOME"] == str(tmp_path)
    assert told["FLWR_TELEMETRY_ENABLED"] == "0"
    assert told["NO_PROXY"].startswith("example.org,127.0.0.1")
    assert told["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert told["NO_PROXY"].endswith(",10.1.2.3")


# The gate


def _through_gate(path: str, client: tuple[Any, ...], server: tuple[Any, ...] = ("192.0.2.1", 8000)) -> int:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": client, "server": server}
    asyncio.run(Gate(app)(scope, None, send))  # type: ignore[arg-type]
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
    assert _through_gate(path, (caller, 1)) == status


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
            assert _through_gate("/v1/control/start-run", seen_from, accepted.getsockname()) == 200
            assert _through_gate("/v1/control/start-run", (seen_from[0], 1), accepted.getsockname()) == 403
            ours.shutdown(socket.SHUT_RDWR)
            assert _through_gate("/v1/control/start-run", seen_from, accepted.getsockname()) == 403


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
    assert _through_gate("/v1/runtime/pull-object", ("127.0.0.1", 40000), ("127.0.0.1", 8000)) == status
    table.unlink()
    assert _through_gate("/v1/runtime/pull-object", ("127.0.0.1", 40000), ("127.0.0.1", 8000)) == 403


# Supervision


def test_supervise_starts_again_until_it_is_stopped(tmp_path: Path) -> None:
    shell, stop, said = Shell(tmp_path, "echo broken; exit 4"), threading.Event(), list[str]()

    def listen(line: str) -> None:
        said.append(line)
        if shell.starts == 2 and "starting again" in line:
            stop.set()

    supervise(shell, stop, listen)  # type: ignore[arg-type]
    assert shell.starts == 2
    assert "ended with code 4: broken" in said[1]
    assert "starting again in 1 s" in said[1]
    assert "starting again in 2 s" in said[3]
    assert said[-1] == "shell: stopped"


def test_supervise_ends_on_sigterm(tmp_path: Path) -> None:
    shell, said = Shell(tmp_path, "sleep 60"), list[str]()
    before = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    supervise(shell, say=said.append)  # type: ignore[arg-type]
    assert said[-1] == "shell: stopped"
    assert not shell.is_alive()
    assert signal.getsignal(signal.SIGTERM) is before


# The real programs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_tls(folder / "tls")
    write_app(folder / "app")
    return folder


@pytest.fixture(scope="module")
def link(place: Path) -> Iterator[SuperLink]:
    tls = Tls(*(place / "tls" / name for name in ("ca.crt", "server.crt", "server.key")))
    with SuperLink(place / "link", tls=tls, database=place / "link" / "state.db") as link:
        yield link


def _node(place: Path, link: SuperLink, name: str) -> SuperNode:
    private, public = write_key(place, name)
    link.control.register(public_key(public), name)
    assert link.tls
    return SuperNode(
        place / f"{name}-node",
        link.control.address,
        root_certificates=link.tls.ca,
        private_key=private,
        node_config={"site": f"the {name}"},
    )


def _online(link: SuperLink, name: str) -> int:
    """Waits for a site; its number."""
    found = _wait(lambda: [one.id for one in link.control.nodes() if (one.name, one.status) == (name, "online")], 60)
    assert found, f"{name} did not come"
    return int(found[0])


def _finished(link: SuperLink, run: int) -> Run:
    assert _wait(lambda: link.control.status(run).is_finished, 60)
    return link.control.status(run)


def test_a_run_with_encryption_and_keys(place: Path, link: SuperLink) -> None:
    control = link.control
    with _node(place, link, "north") as node:
        number = control.register(public_key(place / "north.pub"), "north")  # again is no change
        with pytest.raises(UserError, match="registered as 'north' already"):
            control.register(public_key(place / "north.pub"), "south")
        with pytest.raises(UserError, match="unknown settings speed; known are fail, out, rounds, seconds"):
            control.run(place / "app", {"speed": 1})
        assert _online(link, "north") == number
        assert node.node_id() == number
        done = _finished(link, control.run(place / "app", {"out": str(place / "told")}))
        assert done.state == "completed"
        assert "reply of north site=the north" in (place / "told").read_text()
        failed = _finished(link, control.run(place / "app", {"fail": True}))
        assert (failed.state, failed.reason) == ("failed", "ServerApp failed with exception: told to fail")
        left = below(node.pid or 0)
    assert left
    assert not any(map(_exists, left))
    assert {one.name: one.status for one in control.nodes()}["north"] == "offline"  # told, not timed out
    assert control.unregister("north")
    assert not control.unregister("north")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
@pytest.mark.parametrize("forged", [False, True], ids=["plain", "forged"])
def test_another_account_of_the_same_machine_cannot_control_it(link: SuperLink, forged: bool) -> None:
    """Not even by claiming, in a header, to be a connection that really is ours."""
    host, port = "127.0.0.1", link.port
    with socket.create_connection((host, port)) as ours:
        headers = {"X-Forwarded-For": f"127.0.0.1:{ours.getsockname()[1]}"} if forged else {}
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                for path in ("/health", "/v1/control/list-runs", "/v1/runtime/acquire-task"):
                    call = http.client.HTTPSConnection(host, port, context=ssl._create_unverified_context(), timeout=20)
                    call.request("GET" if path == "/health" else "POST", path, b"", headers)
                    os.write(writing, f"{call.getresponse().status} ".encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading) as told:
            assert told.read().split() == ["200", "403", "403"]


def test_a_superlink_that_cannot_start_says_why(tmp_path: Path) -> None:
    tls = write_tls(tmp_path)
    tls.certificate.write_text("nonsense")
    with pytest.raises(UserError, match=r"the SuperLink ended at its start: ssl\.SSLError: .+ \(log: "):
        SuperLink(tmp_path, tls=tls).start()


@pytest.mark.slow
def test_a_node_ends_when_it_can_do_no_work_any_more(place: Path, link: SuperLink) -> None:
    """Without its executor, or once its key is taken back; whoever supervises it decides what is next."""
    with _node(place, link, "south") as node:
        _online(link, "south")
        _, executor = below(node.pid or 0)
        os.kill(executor, signal.SIGKILL)
        assert _wait(lambda: not node.is_alive(), 20)
        assert "executor of the site's own code ended" in node.said()
        assert {one.name: one.status for one in link.control.nodes()}["south"] == "offline"
        node.start()
        _online(link, "south")
        link.control.unregister("south")
        assert _wait(lambda: not node.is_alive(), 60)


@pytest.mark.slow
def test_an_unregistered_key_is_refused(place: Path, link: SuperLink) -> None:
    private, _ = write_key(place, "stranger")
    assert link.tls
    with SuperNode(
        place / "stranger-node", link.control.address, root_certificates=link.tls.ca, private_key=private
    ) as node:
        assert _wait(lambda: not node.is_alive(), 30)
        assert node.refused()
        assert node.node_id() is None


@pytest.mark.slow
def test_plain_text_and_nodes_without_key_are_refused(place: Path, link: SuperLink) -> None:
    assert link.tls
    before = {node.id for node in link.control.nodes()}
    with (
        SuperNode(place / "plain", link.control.address, root_certificates=None, private_key=None) as plain,
        SuperNode(place / "keyless", link.control.address, root_certificates=link.tls.ca, private_key=None) as keyless,
    ):
        assert _wait(lambda: not keyless.is_alive(), 30)
        assert keyless.refused()
        assert _wait(lambda: "retrying" in plain.said(), 30)
        time.sleep(3)
        assert plain.node_id() is None
    assert {node.id for node in link.control.nodes()} == before


@pytest.mark.slow
def test_another_authority_is_not_trusted(place: Path, link: SuperLink, tmp_path: Path) -> None:
    private, public = write_key(place, "misled")
    link.control.register(public_key(public), "misled")
    with SuperNode(
        tmp_path, link.control.address, root_certificates=write_tls(tmp_path).ca, private_key=private
    ) as node:
        assert _wait(lambda: not node.is_alive() or "retrying" in node.said(), 30)
        assert node.node_id() is None
    assert {one.name: one.status for one in link.control.nodes()}["misled"] == "registered"


@pytest.mark.slow
def test_a_killed_node_is_started_again(place: Path, link: SuperLink) -> None:
    node, stop, said = _node(place, link, "west"), threading.Event(), list[str]()
    thread = threading.Thread(target=supervise, args=(node, stop, said.append))
    thread.start()
    try:
        _online(link, "west")
        assert _wait(lambda: any("online as node" in line for line in said), 5)
        os.kill(below(node.pid or 0)[0], signal.SIGKILL)
        assert _wait(lambda: sum("online as node" in line for line in said) == 2, 120), said
    finally:
        stop.set()
        thread.join()
    assert any("ended with code 137" in line for line in said)
    assert any("did not let it in" in line for line in said), said
    assert len({line for line in said if "online as node" in line}) == 1  # the same number as before


_DEPLOYMENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from processes_helpers import write_app, write_key, write_tls
from fedc2i.deploy.superlink_control import public_key
from fedc2i.deploy.flower_processes import SuperLink, SuperNode
place = Path(sys.argv[1])
tls = write_tls(place)
link = SuperLink(place / "link", tls=tls)
link.start()
private, public = write_key(place, "east")
link.control.register(public_key(public), "east")
node = SuperNode(place / "east-node", link.control.address, root_certificates=tls.ca, private_key=private)
node.start()
while [one.status for one in link.control.nodes()] != ["online"]:
    time.sleep(0.1)
link.control.run(write_app(place / "app"), {"seconds": 600.0})
time.sleep(600)
"""


def _names(pids: list[int]) -> str:
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids if _exists(pid))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "keepers"])
def test_nothing_is_left_after_kill_9(tmp_path: Path, victim: str) -> None:
    """Of us, in the middle of a run with the apps' processes at work; or of the keepers themselves."""
    words = [sys.executable, "-c", _DEPLOYMENT, str(tmp_path), str(Path(__file__).parent)]
    parent = subprocess.Popen(words)
    try:
        # two keepers, their programs, an executor and an app's process under each
        assert _wait(lambda: len(below(parent.pid)) == 8, 60), _names(below(parent.pid))
        time.sleep(1)
        pids = below(parent.pid)
        names = _names(pids)
        if victim == "keepers":
            for pid in [pid for pid in pids if "keeper.py" in _names([pid])]:
                os.kill(pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    assert "flwr-serverapp" in names
    assert _wait(lambda: not any(map(_exists, pids)), 20), _names(pids)


def test_free_ports_differ_from_taken_ones() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        assert free_port() != other.getsockname()[1]


def test_an_address_of_another_machine_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"192\.0\.2\.1 is not an address of this machine"):
        SuperLink(tmp_path, "192.0.2.1", 9092, tls=write_tls(tmp_path)).start()
