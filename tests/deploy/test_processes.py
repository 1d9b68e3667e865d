"""Flower's SuperLink and SuperNodes as real processes on loopback: they start, do their work, and end completely."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from processes_helpers import exists, new_link, new_node, pid, register, wait, write_app

from fedc2i.core.errors import UserError
from fedc2i.deploy.process_tree import below
from fedc2i.deploy.superlink import Node, RunStatus, SuperLink
from fedc2i.deploy.supernode import SuperNode


def test_a_place_where_it_cannot_work_is_named_before_anything_starts(tmp_path: Path) -> None:
    link = new_link(tmp_path / "link")
    with (
        socket.create_server(("127.0.0.1", link.own.port)),
        pytest.raises(UserError, match=f"cannot listen on port {link.own.port} of 127.0.0.1"),
    ):
        link.start()
    with pytest.raises(UserError, match=r"192\.0\.2\.1 is not an address of this machine"):
        SuperLink(replace(link.own, bind="192.0.2.1")).start()
    with pytest.raises(UserError, match="quotes"):
        SuperNode(replace(new_node(tmp_path / "a", link).site, folder=tmp_path / "a'b"))


# The real programs


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    write_app(folder / "app")
    return folder


@pytest.fixture(scope="module")
def link(place: Path) -> Iterator[SuperLink]:
    with new_link(place / "link") as link:
        yield link


def _node(place: Path, link: SuperLink, name: str) -> SuperNode:
    node = new_node(place / name, link)
    register(link, node)
    return node


def _known(link: SuperLink, name: str) -> Node:
    return next(node for node in link.nodes() if node.name == name)


def _online(link: SuperLink, name: str) -> int:
    """Waits for a site, and returns its number."""
    assert wait(lambda: _known(link, name).status == "online", 60), f"{name} did not come"
    return _known(link, name).id


def _finished(link: SuperLink, run: int) -> RunStatus:
    assert wait(lambda: link.runs()[run].is_finished, 60)
    return link.runs()[run]


@pytest.mark.slow
def test_a_run_with_encryption_and_keys(place: Path, link: SuperLink) -> None:
    with _node(place, link, "north") as node:
        assert _online(link, "north") == node.node_id()
        done = _finished(link, link.start_run(place / "app", {"out": str(place / "told")}))
        assert done.state == "completed"
        told = (place / "told").read_text()  # the app of that run is not the one that is installed
        assert "reply of north {'reason': \"the run's app is not the one installed at this site" in told
        assert not list(place.rglob("executed"))
        failed = _finished(link, link.start_run(place / "app", {"fail": True}))
        assert (failed.state, failed.reason) == ("failed", "ServerApp failed with exception: told to fail")
        left = below(pid(node))
    assert left
    assert not any(map(exists, left))
    assert _known(link, "north").status == "offline"  # at once, without waiting for its session to end
    public = _known(link, "north").public_key
    with pytest.raises(UserError, match="refused RegisterNode"):
        link.register(public, "south")
    link.unregister(_known(link, "north"))
    with pytest.raises(UserError, match="already in use"):  # `open_superlink` then starts with a new database
        link.register(public, "north")
    with pytest.raises(UserError, match="not a valid Flower App"):
        link.start_run(place, {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
@pytest.mark.parametrize("forged", [False, True], ids=["plain", "forged"])
def test_another_account_of_the_same_machine_cannot_control_it(link: SuperLink, forged: bool) -> None:
    """Not even by claiming, in a header, to be a connection that really is ours."""
    host, port = "127.0.0.1", link.own.port
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
    link = new_link(tmp_path / "link")
    (tmp_path / "link" / "server.crt").write_text("nonsense")
    with pytest.raises(UserError, match=r"the SuperLink ended at its start: ssl\.SSLError: .+ \(log: "):
        link.start()


@pytest.mark.slow
def test_a_node_ends_when_it_cannot_work(place: Path, link: SuperLink) -> None:
    """Without its executor, or once its key is unregistered; `keep_running` decides what follows."""
    with _node(place, link, "south") as node:
        _online(link, "south")
        _, executor = below(pid(node))
        os.kill(executor, signal.SIGKILL)
        assert wait(lambda: not node.is_alive(), 20)
        assert "executor of the site's own code ended" in node.output()
        assert _known(link, "south").status == "offline"
        node.start()
        _online(link, "south")
        link.unregister(_known(link, "south"))
        assert wait(lambda: not node.is_alive(), 60)


class Outsider(SuperNode):
    """A node that leaves some of its arguments out."""

    dropped: tuple[str, ...] = ()
    added: tuple[str, ...] = ()

    def launch(self, command: Sequence[str], patience: float = 1.0) -> None:
        words = list(command)
        for name in self.dropped:
            at = words.index(name)
            del words[at : at + 2]
        super().launch([*words, *self.added], patience)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unregistered key", "no key", "plain text", "other authority"])
def test_a_node_without_the_right_credentials_is_rejected(
    case: str, place: Path, link: SuperLink, tmp_path: Path
) -> None:
    node = new_node(tmp_path / case.replace(" ", "-"), link, Outsider)
    assert isinstance(node, Outsider)
    if case == "other authority":
        register(link, node)
        node.site.authority.write_bytes(new_link(tmp_path / "link").own.authority.read_bytes())
    before = link.nodes()
    if case in ("no key", "plain text"):
        node.dropped = ("--auth-supernode-private-key",)
    if case == "plain text":
        node.dropped, node.added = (*node.dropped, "--root-certificates"), ("--insecure",)
    with node:
        if case in ("unregistered key", "no key"):
            assert wait(lambda: not node.is_alive(), 60)
            assert node.rejection()
        else:
            assert wait(lambda: not node.is_alive() or "retrying" in node.output(), 60)
            time.sleep(3)
        assert node.node_id() is None
    assert link.nodes() == before


_DEPLOYMENT = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from processes_helpers import new_link, new_node, register, write_sleeper
from fedc2i.deploy.approval import CodeStore
from fedc2i.deploy.job import Job
from fedc2i.deploy.superlink import run_on
place = Path(sys.argv[1])
sleeper = write_sleeper(place)
link = new_link(place / "link")
link.start()
node = new_node(place / "east", link)
CodeStore(place / "east").trust([sleeper.read_bytes()])
register(link, node)
node.start()
while [one.status for one in link.nodes()] != ["online"]:
    time.sleep(0.1)
run_on(link, Job(place / "run", "fedavg", {"model": f"{sleeper}:build"}, ("east",), wait=60.0), print)
"""


def _names(pids: list[int]) -> str:
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids if exists(pid))


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["parent", "guards"])
def test_nothing_is_left_after_kill_9(tmp_path: Path, victim: str) -> None:
    """Of us, in the middle of a run with the apps' processes at work; or of the guards themselves."""
    words = [sys.executable, "-c", _DEPLOYMENT, str(tmp_path), str(Path(__file__).parent)]
    parent = subprocess.Popen(words)
    try:
        # two guards, their programs, an executor and an app's process under each, and the site's worker
        assert wait(lambda: any((tmp_path / "east" / "code").glob("unpacked/*")), 120), _names(below(parent.pid))
        assert wait(lambda: len(below(parent.pid)) == 9, 20), _names(below(parent.pid))
        time.sleep(1)
        pids = below(parent.pid)
        names = _names(pids)
        if victim == "guards":
            guards = [pid for pid in pids if "process_tree.py" in _names([pid])]
            assert len(guards) == 2
            for pid in guards:
                os.kill(pid, signal.SIGKILL)
    finally:
        parent.kill()
        parent.wait()
    assert "flwr-serverapp" in names
    assert wait(lambda: not any(map(exists, pids)), 90), _names(pids)
