"""Which node is which site, and the messages between them and the coordinator.

A site is identified by its name, never by its node's number, which changes when an unauthenticated node returns. Where
the sites' keys are known, a node can only be the site whose key it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict

from fedc2i.core.errors import UserError, one_line
from fedc2i.flower import compat
from fedc2i.flower.message_format import GREETING, MOST_REASON, WORK, Introduction

_LOOK = 1.0  # seconds between looks for new nodes
_AGAIN = 20.0  # seconds until a node that did not introduce itself is greeted again


class Grid(Protocol):
    """The part of Flower's grid that the coordinator needs."""

    def get_nodes(self) -> Iterable[Any]:
        """Nodes that are online, with their numbers and keys."""

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages, and returns an id for each."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have arrived."""


@dataclass(frozen=True)
class Reply:
    """A site's reply to the request with this serial number: its content, or the problem."""

    site: str
    round: int
    serial: int
    content: RecordDict | None
    problem: str = ""
    is_lost: bool = False  # the request or the reply was lost on its way


@dataclass(frozen=True)
class _Request:
    node: int
    site: str | None  # None for a greeting
    round: int
    serial: int


class SiteConnections:
    """The sites that have introduced themselves, and the requests that they have not answered."""

    def __init__(
        self, grid: Grid, say: Callable[[str], None], keys: Mapping[bytes, str] | None = None, ttl: float = 3600.0
    ) -> None:
        """Starts without sites.

        ``keys`` are the sites' names by public key, where nodes are authenticated; after ``ttl`` seconds Flower
        discards a message.
        """
        self._grid, self._say, self._keys, self._ttl = grid, say, keys, ttl
        self.sites: dict[str, Introduction] = {}
        self._nodes: dict[str, int] = {}  # by site
        self._online: dict[int, bytes] = {}  # nodes and their keys
        self._open: dict[str, _Request] = {}  # by message id
        self._lost: list[Reply] = []
        self._greeted: dict[int, float] = {}  # nodes, and when to greet them again
        self._rejected: set[tuple[int, str]] = set()
        self._looked = 0.0
        self.check: Callable[[Introduction], None] = lambda _: None  # raises a `UserError` to reject a site

    def is_free(self, site: str) -> bool:
        """Whether a site is online and has no open request."""
        known = self._nodes.get(site)
        return known in self._online and all(request.site != site for request in self._open.values())

    def ask(self, site: str, content: RecordDict, round: int, serial: int) -> bool:
        """Sends a site its task under a serial number; returns whether Flower accepted it."""
        return self._send(WORK, self._nodes[site], content, _Request(self._nodes[site], site, round, serial))

    @property
    def rejections(self) -> list[str]:
        """Why nodes were rejected."""
        return sorted({reason for _, reason in self._rejected})

    def dismiss(self, site: str, error: UserError) -> None:
        """Rejects a site that has introduced itself."""
        self.sites.pop(site, None)
        self._reject(self._nodes.pop(site), error, tell=True)

    def _reject(self, node: int, error: UserError, tell: bool = False) -> None:
        """Logs the reason once, since the node is greeted again; ``tell`` sends it to the site as well."""
        if (node, str(error)) not in self._rejected:
            self._rejected.add((node, str(error)))
            self._say(f"a site is rejected: {error}")
            if tell:
                self._greet(node, str(error))

    def forget(self) -> None:
        """Drops all open requests, because another run starts."""
        self._open = {key: request for key, request in self._open.items() if request.site is None}
        self._lost = []

    def collect(self) -> list[Reply]:
        """The replies since the last call; also greets new nodes."""
        self._look()
        replies = []
        for message in self._grid.pull_messages(list(self._open)) if self._open else ():
            request = self._open.pop(message.metadata.reply_to_message_id, None)
            if request is None:
                continue
            content = message.content if message.has_content() else None
            problem = "" if content is not None else compat.explain(message.error)
            lost = content is None and compat.is_lost(message.error)
            if request.site is not None:
                replies.append(Reply(request.site, request.round, request.serial, content, problem, lost))
            elif lost:
                self._greeted[request.node] = 0.0  # at once, if it is still online
            else:
                self._meet(request.node, content, problem)
        replies, self._lost = replies + self._lost, []
        return replies

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        self._online = {node.node_id: bytes(node.public_key) for node in self._grid.get_nodes()}
        gone = [key for key, one in self._open.items() if one.site is None and one.node not in self._online]
        for key in gone:
            del self._open[key]
        busy = {request.node for request in self._open.values()}
        known = set(self._nodes.values())
        for node in self._online:
            if node not in known and node not in busy and self._greeted.get(node, 0.0) <= now:
                self._greeted[node] = now + _AGAIN
                self._greet(node)

    def _greet(self, node: int, rejected: str = "") -> None:
        """Asks a node who it is, and says why it was rejected, if it was."""
        content = RecordDict({"greeting": ConfigRecord({"rejected": one_line(rejected, MOST_REASON)})})
        self._send(GREETING, node, content, _Request(node, None, 0, 0))

    def _meet(self, node: int, content: RecordDict | None, problem: str) -> None:
        """Accepts or rejects a node that introduces itself."""
        known = False
        try:
            if content is None:
                raise UserError(problem)
            site = Introduction.from_record(content)
            if self._keys is not None and self._keys.get(self._online.get(node, b"")) != site.name:
                raise UserError(f"it calls itself '{site.name}', but holds another site's key")
            before = self._nodes.get(site.name)
            if self._keys is not None and before in self._online and before != node:
                raise UserError(f"it calls itself '{site.name}', which is online already")
            known = True
            self.check(site)
        except UserError as error:
            self._reject(node, error, tell=known)
            return
        returned = site.name in self._nodes
        self.sites[site.name] = site
        self._nodes[site.name] = node
        for key in [key for key, request in self._open.items() if request.site == site.name]:
            asked = self._open.pop(key)  # sent to the site's earlier node
            self._lost.append(Reply(site.name, asked.round, asked.serial, None, "it returned as another node", True))
        self._say(f"{site.name} is back" if returned else f"{site.name} has joined, {site.samples['train']} samples")

    def _send(self, kind: str, node: int, content: RecordDict, request: _Request) -> bool:
        message = Message(content, node, kind, ttl=self._ttl, group_id=str(request.round))
        ids = [one for one in self._grid.push_messages([message]) if one]
        self._open |= dict.fromkeys(ids, request)
        return bool(ids)
