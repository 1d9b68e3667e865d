"""A stand-in for SuperLink and SuperNodes in one process: every message passes through Flower's own serialisation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedc2i.data.federation import Federation
from fedc2i.flower import site
from fedc2i.flower.site import Assignment

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


def app_of(federation: Federation, client: int, assignments: Callable[[str], Assignment]) -> ClientApp:
    """A site's app that is told its assignment by the run's name."""
    home = site.Home(federation.clients[client], federation.classes)
    return site.make_app(lambda context: home, lambda task: (assignments(task.run), federation.classes))


@pytest.fixture(autouse=True)
def identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message carries who made it; Flower's runtime fills this in."""
    for part in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)
