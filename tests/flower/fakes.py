"""A stand-in for SuperLink and SuperNodes in one process: every message passes through Flower's own serialisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.deploy.run_description import understand
from fedc2i.deploy.worker import site_home
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Round
from fedc2i.engine.simulator import simulate
from fedc2i.flower import site
from fedc2i.flower.answer_collector import Policy
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.coordinator import Coordinator
from fedc2i.flower.enrolment import wait_for_sites
from fedc2i.flower.message_format import Answer
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

_numbers = itertools.count(1)


def sent(message: Message) -> Message:
    """As objects named by their hashes, which is how SuperLink and SuperNode exchange a message."""
    contents = {name: part.deflate() for name, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


@dataclass
class FakeNode:
    """A node: its app, what it keeps, and what is wrong with it."""

    app: ClientApp
    context: Context
    key: bytes = b""
    spoil: Callable[[Message], Message | None] = lambda reply: reply  # None: it never answers
    delay: int = 0  # looks into the mail until its answer is there


@dataclass
class FakeGrid:
    """Flower's grid over such nodes."""

    nodes: dict[int, FakeNode]
    before: Callable[[int, Message], None] = lambda node, message: None
    _replies: dict[str, tuple[int, Message]] = field(default_factory=dict)
    log: list[tuple[int, str]] = field(default_factory=list)

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=number, public_key=node.key) for number, node in self.nodes.items()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        number = f"message{next(_numbers)}"
        message.metadata.__dict__["_message_id"] = number
        to = message.metadata.dst_node_id
        self.log.append((to, message.metadata.message_type))
        self.before(to, message)
        node = self.nodes.get(to)
        if node is None:
            self._replies[number] = (1, Message(Error(5, "gone"), reply_to=message))
            return number
        reply = node.spoil(node.app(message=sent(message), context=node.context))
        if reply is not None:
            self._replies[number] = (node.delay, reply)
        return number

    def release(self) -> None:
        """All answers on their way arrive now."""
        self._replies = {number: (0, reply) for number, (_, reply) in self._replies.items()}

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        ready = []
        for number in message_ids:
            if number in self._replies:
                left, reply = self._replies[number]
                if left <= 0:
                    ready.append(self._replies.pop(number)[1])
                else:
                    self._replies[number] = (left - 1, reply)
        return [reply if reply.has_error() else sent(reply) for reply in ready]


def node(number: int, app: ClientApp, config: dict[str, Any] | None = None, key: bytes = b"") -> FakeNode:
    return FakeNode(app, Context(1, number, dict(config or {}), RecordDict(), {}), key)


def site_app(folder: Path) -> ClientApp:
    """What a worker does for the site in a folder, without its own process."""
    return site.make_app(lambda context: site_home(folder), lambda task: understand(task.setup))


def changed(change: Callable[[Answer], Answer]) -> Callable[[Message], Message]:
    """For `FakeNode.spoil`: changes every answer to a task."""

    def spoil(reply: Message) -> Message:
        if "upload" in reply.content:
            reply.content = change(Answer.from_record(reply.content)).to_record(False)
        return reply

    return spoil


def with_report(report: Any) -> Callable[[Message], Message]:
    """Answers to a task with other diagnostics."""
    return changed(lambda answer: replace(answer, report=report))


class Stage:
    """A federation in one process: a grid of nodes 100, 101, ..., its coordinator, and what was said."""

    SEED = 3

    def __init__(
        self, method: Method, model: Model, federation: Federation, policy: Policy | None = None, **settings: Any
    ) -> None:
        self.federation, self.policy = federation, policy or Policy(deadline=20.0, poll=0.0)
        self.settings = EngineSettings(**{"rounds": 2, "batch_size": 5, "lr": 0.01, "executor": "looped", **settings})
        context = RunContext(method, model, self.settings, self.settings.rounds, self.SEED)
        self.work = site.Assignment(context, self.settings)
        self.grid = FakeGrid({})
        for k, client in enumerate(federation.clients):
            self.grid.nodes[100 + k] = node(100 + k, self.app(site.Home(client, federation.classes)))
        self.said: list[str] = []
        self.coordinator = self.new_coordinator()

    def app(self, home: site.Home) -> ClientApp:
        """A site's app that knows its assignment."""
        return site.make_app(lambda context: home, lambda task: (self.work, self.federation.classes))

    def new_coordinator(self) -> Coordinator:
        connections = SiteConnections(self.grid, self.said.append)
        wait_for_sites(connections, self.federation.names, 0, 1, 0.0, self.said.append, 0.0)
        return Coordinator(connections, self.federation, self.work, self.policy, "run", say=self.said.append)

    def run(self) -> list[Round]:
        return list(self.coordinator.rounds())

    def in_process(self) -> list[Round]:
        """What the simulator reports of the same run."""
        found: list[Round] = []
        context = self.work.context
        simulate(context.method, context.model, self.federation, self.settings, [self.SEED], on_round=found.append)
        return found


def assert_same_rounds(got: list[Round], want: list[Round]) -> None:
    assert [report.round for report in got] == [report.round for report in want]
    for mine, theirs in zip(got, want, strict=True):
        assert mine.participants == theirs.participants
        assert mine.metrics == theirs.metrics
        assert set(mine.influence) == set(theirs.influence)
        for name in theirs.influence:
            np.testing.assert_array_equal(mine.influence[name], theirs.influence[name])


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedc2i.flower.connections._LOOK", 0.0)


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message carries who made it; Flower's runtime fills this in."""
    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
