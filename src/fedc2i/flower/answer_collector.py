"""Sends each site its task and collects the answers; a slow, dead or broken site does not stop a round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import RecordDict

from fedc2i.core.errors import UserError
from fedc2i.flower.connections import Reply, SiteConnections
from fedc2i.flower.masking import LEAST
from fedc2i.flower.message_format import Answer, Task

AGAIN = 2  # times that a site is asked again in a round when a message was lost
PAUSE = 10.0  # seconds until sites that all failed are asked again
HOPELESS = 3  # times that all of them fail before the run ends
TRIES = 10  # deadlines in a row without enough answers before the run ends


@dataclass(frozen=True)
class Policy:
    """How long the coordinator waits for whom, and how models travel."""

    deadline: float = 600.0  # seconds for a round; it ends earlier when everyone who was asked has answered
    min_sites: int = 1  # number of answers that a round needs
    half: bool = False  # whether models travel as float16
    poll: float = 0.25  # seconds between looks for replies
    secure: bool = False  # whether uploads travel under masks, and only their mean is seen
    secure_range: float = 64.0  # the largest number in an upload then
    strict: bool = False  # whether one site that fails ends the run

    def check(self, sites: int) -> None:
        """Raises a `UserError` if a round has too few sites for secure aggregation."""
        if self.secure and sites < LEAST:
            raise UserError(f"secure aggregation needs {LEAST} sites or more in a round, and there are {sites}")

    def settings(self) -> dict[str, Any]:
        """The same as settings of a run."""
        return {
            "engine": "flower",
            "wire": "float16" if self.half else "float32",
            "deadline": self.deadline,
            "min_sites": self.min_sites,
            "secure_aggregation": self.secure,
            "secure_range": self.secure_range,
        }


@dataclass
class _Progress:
    """The clients of one round, by what has happened to their tasks."""

    waiting: set[int]  # not sent yet
    asked: set[int] = field(default_factory=set)  # sent, no reply yet
    failed: set[int] = field(default_factory=set)  # replied without an answer
    lost: Counter[int] = field(default_factory=Counter)  # how often a message was lost
    answers: dict[int, Answer] = field(default_factory=dict)


class AnswerCollector:
    """Asks the sites of a run, which are numbered as in its table."""

    def __init__(
        self,
        connections: SiteConnections,
        names: Sequence[str],
        policy: Policy,
        say: Callable[[str], None],
        usable: Callable[[Answer], bool],
        late: Callable[[int, Answer, int], bool],
        on_client: Callable[[int, int], None] | None = None,
    ) -> None:
        """Starts before the first round.

        Args:
            usable: whether an answer's upload can be used, if it must have one.
            late: takes a client's answer to an earlier round, and that round; returns whether it is used.
            on_client: called with the number of answers so far and the number of sites asked.
        """
        self._connections, self._names, self._policy, self._say = connections, tuple(names), policy, say
        self._usable, self._late, self._on_client = usable, late, on_client
        self._serial = 0
        self._missing: dict[str, int] = {}  # sites, and the round since which each is missing

    def collect(
        self, number: int, tasks: Mapping[int, Task], content: Callable[[int], RecordDict], needed: int | None = None
    ) -> dict[int, Answer]:
        """The answers to a round that arrive in time, by client.

        ``content`` gives a client's task with its tensors, made when it is sent. ``needed`` is the number of answers
        without which it does not end; by default the policy's. Raises a `UserError` if too few sites answer for too
        long.
        """
        self._serial += 1
        began, tries, hopeless = time.monotonic(), 1, 0
        until = began + self._policy.deadline
        trains = sum(task.train for task in tasks.values())
        needed = min(self._policy.min_sites if needed is None else needed, trains or len(tasks))
        now = _Progress(set(tasks))
        while True:
            self._send(number, now, content)
            self._receive(number, now, len(tasks))
            useless = {m for m, own in now.answers.items() if tasks[m].train and not self._usable(own)}
            enough = sum(tasks[m].train for m in now.answers.keys() - useless) if trains else len(now.answers)
            all_failed = len(now.failed | useless) == len(tasks)
            resend = any(m in now.waiting and self._connections.is_free(self._names[m]) for m in now.lost)
            if enough >= needed and (not (now.asked or resend) or time.monotonic() > until):
                break
            if not now.asked and all_failed:
                until = min(until, time.monotonic() + PAUSE)
            if time.monotonic() > until:
                hopeless += all_failed
                seconds = time.monotonic() - began
                line = f"round {number}: {enough} of the {needed} sites needed answered within {seconds:.0f} s"
                if tries == TRIES or hopeless == HOPELESS:
                    raise UserError(f"{line}; the same command resumes the run")
                self._say(f"{line}; still waiting")
                now.waiting, now.failed = set(tasks) - now.answers.keys() - now.asked, set()
                until, tries = time.monotonic() + self._policy.deadline, tries + 1
            time.sleep(self._policy.poll)
        self._report_missing(number, tasks, now)
        return now.answers

    def _send(self, number: int, now: _Progress, content: Callable[[int], RecordDict]) -> None:
        for client in sorted(now.waiting):
            site = self._names[client]
            if self._connections.is_free(site) and self._connections.ask(site, content(client), number, self._serial):
                now.waiting.discard(client)
                now.asked.add(client)

    def _receive(self, number: int, now: _Progress, asked: int) -> None:
        for reply in self._connections.collect():
            client = self._names.index(reply.site)
            if reply.serial == self._serial:
                now.asked.discard(client)
                if reply.is_lost and now.lost[client] < AGAIN:
                    now.lost[client] += 1
                    now.waiting.add(client)
                    continue
            if not self._take(client, reply, number, now.answers):
                now.failed.add(client)
            if self._on_client is not None:
                self._on_client(len(now.answers), asked)

    def _take(self, client: int, reply: Reply, number: int, answers: dict[int, Answer]) -> bool:
        """Takes a reply to this round or an earlier one; returns whether it is an answer."""
        try:
            if reply.content is None:
                raise UserError(reply.problem)
            answer = Answer.from_record(reply.content)
        except UserError as error:
            if self._policy.strict:
                raise UserError(f"{reply.site}: {error}") from None
            self._say(f"round {reply.round}: {reply.site} failed: {error}")
            return False
        if reply.serial == self._serial:
            answers[client] = answer
        elif self._late(client, answer, reply.round):
            self._say(f"round {number}: {reply.site} answered round {reply.round}; its model is used, with its age")
        return True

    def _report_missing(self, number: int, tasks: Mapping[int, Task], now: _Progress) -> None:
        """Logs which sites are missing since this round, and which are back."""
        missing = []
        for client in tasks:
            site = self._names[client]
            if client in now.answers and site in self._missing:
                self._say(f"round {number}: {site} takes part again; missing since round {self._missing.pop(site)}")
            elif client not in now.answers and site not in self._missing:
                self._missing[site] = number
                late = f"did not answer within {self._policy.deadline:.0f} s"
                missing.append(f"{site} {late if client in now.asked else 'sent no usable answer'}")
        if missing:
            self._say(f"round {number}: {len(now.answers)} of {len(tasks)} sites answered; {'; '.join(missing)}")
