"""Which node is which site, and the messages on their way: the coordinator's post office.

A site is known by its name, never by its node's number, which changes when an unauthenticated node returns. Where the
sites' keys are known, a node can only be the site whose key it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict

from fedc2i.core.errors import UserError
from fedc2i.flower.messages import Introduction

GREETING, WORK = "query", "train"  # Flower's kinds of messages
_LOOK = 1.0  # seconds between looks for new nodes
_AGAIN = 20.0  # seconds until a node that did not introduce itself is asked again
_LOST = (3, 4, 5)  # Flower's codes for a message that did not arrive, in either direction


class Grid(Protocol):
    """What is needed of Flower's grid."""

    def get_nodes(self) -> Iterable[Any]:
        """Nodes that are online, with their numbers and keys."""
        ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends; returns a number for each message."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that have come."""
        ...


@dataclass(frozen=True)
class Mail:
    """A site's reply to what was asked under a number: its content, or why there is none; lost, if only on its way."""

    site: str
    round: int
    serial: int
    content: RecordDict | None
    problem: str = ""
    is_lost: bool = False


@dataclass(frozen=True)
class _Letter:
    node: int
    site: str | None  # none: a greeting
    round: int
    serial: int


class SiteConnections:
    """Sites that have introduced themselves, and what they were asked."""

    def __init__(
        self, grid: Grid, say: Callable[[str], None], keys: Mapping[bytes, str] | None = None, ttl: float = 3600.0
    ) -> None:
        """Knows nobody yet.

        Args:
            grid: Flower's way to the nodes.
            say: takes one line for a person.
            keys: whose public key is whose, where nodes are authenticated.
            ttl: seconds until Flower gives a message up.
        """
        self._grid, self._say, self._keys, self._ttl = grid, say, keys, ttl
        self.sites: dict[str, Introduction] = {}
        self._nodes: dict[str, int] = {}  # by site
        self._online: dict[int, bytes] = {}  # nodes and their keys
        self._open: dict[str, _Letter] = {}
        self._lost: list[Mail] = []
        self._greeted: dict[int, float] = {}  # when to greet them again
        self._refused: set[tuple[int, str]] = set()
        self._looked = 0.0
        self.welcome: Callable[[Introduction], None] = lambda _: None  # may refuse, with a `UserError`

    def is_free(self, site: str) -> bool:
        """Whether a site is online and has nothing to do."""
        known = self._nodes.get(site)
        return known in self._online and all(letter.site != site for letter in self._open.values())

    def ask(self, site: str, content: RecordDict, round: int, serial: int) -> bool:
        """Sends a site its task, under a number of the asker's; whether Flower took it."""
        return self._send(WORK, self._nodes[site], content, _Letter(self._nodes[site], site, round, serial))

    def dismiss(self, site: str, error: UserError) -> None:
        """Leaves out a site that has introduced itself."""
        self.sites.pop(site, None)
        self._refuse(self._nodes.pop(site), error)

    def _refuse(self, node: int, error: UserError) -> None:
        """Says why a site is left out, once: it will be asked again."""
        if (node, str(error)) not in self._refused:
            self._refused.add((node, str(error)))
            self._say(f"a site is left out: {error}")

    def forget(self) -> None:
        """Another run begins: what sites were asked before is of no use to it, nor are their answers."""
        self._open = {key: letter for key, letter in self._open.items() if letter.site is None}
        self._lost = []

    def collect(self) -> list[Mail]:
        """What has come since the last time; meets nodes that are new."""
        self._look()
        mails = []
        for reply in self._grid.pull_messages(list(self._open)) if self._open else ():
            letter = self._open.pop(reply.metadata.reply_to_message_id, None)
            if letter is None:
                continue
            content = reply.content if reply.has_content() else None
            problem = "" if content is not None else _explain(reply.error)
            if letter.site is None:
                if content is None and reply.error.code in _LOST:
                    self._greeted[letter.node] = 0.0  # if it is there still, it is greeted again
                else:
                    self._meet(letter.node, content, problem)
            else:
                lost = content is None and reply.error.code in _LOST
                mails.append(Mail(letter.site, letter.round, letter.serial, content, problem, lost))
        mails, self._lost = mails + self._lost, []
        return mails

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        self._online = {node.node_id: bytes(node.public_key) for node in self._grid.get_nodes()}
        gone = [key for key, letter in self._open.items() if letter.site is None and letter.node not in self._online]
        for key in gone:
            del self._open[key]
        busy = {letter.node for letter in self._open.values()}
        known = set(self._nodes.values())
        for node in self._online:
            if node not in known and node not in busy and self._greeted.get(node, 0.0) <= now:
                self._greeted[node] = now + _AGAIN
                content = RecordDict({"greeting": ConfigRecord({})})
                self._send(GREETING, node, content, _Letter(node, None, 0, 0))

    def _meet(self, node: int, content: RecordDict | None, problem: str) -> None:
        try:
            if content is None:
                raise UserError(problem)
            who = Introduction.from_record(content)
            if self._keys is not None and self._keys.get(self._online.get(node, b"")) != who.name:
                raise UserError(f"it says it is '{who.name}', but holds another site's key")
            before = self._nodes.get(who.name)
            if self._keys is not None and before in self._online and before != node:
                raise UserError(f"it says it is '{who.name}', which is online already")
            self.welcome(who)
        except UserError as error:
            self._refuse(node, error)
            return
        returned = who.name in self._nodes
        self.sites[who.name] = who
        self._nodes[who.name] = node
        for key in [key for key, letter in self._open.items() if letter.site == who.name]:
            asked = self._open.pop(key)  # of the node it was before
            self._lost.append(Mail(who.name, asked.round, asked.serial, None, "it came back as another node", True))
        self._say(f"{who.name} is back" if returned else f"{who.name} has joined, {who.samples['train']} samples")

    def _send(self, kind: str, node: int, content: RecordDict, letter: _Letter) -> bool:
        message = Message(content, node, kind, ttl=self._ttl, group_id=str(letter.round))
        numbers = [number for number in self._grid.push_messages([message]) if number]
        self._open |= dict.fromkeys(numbers, letter)
        return bool(numbers)


def _explain(error: Any) -> str:
    """An error reply of Flower's in words."""
    words = {
        1: "its Flower App could not be loaded; is fedc2i installed there?",
        2: "its program failed",
        3: "the message was lost on its way",
        4: "it did not answer in time",
        5: "it has gone",
        7: "it refused the Flower App",
        8: "its program crashed",
    }
    reason = " ".join(str(error.reason or "").split())[:300]
    said = words.get(error.code, f"error {error.code}")
    return f"{said} ({reason})" if reason and error.code in (0, 1, 2, 6, 7, 8) else said
