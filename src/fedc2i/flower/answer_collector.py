"""Asking sites and waiting for them, no longer than agreed: a slow, dead or broken site does not stop a round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict

from fedc2i.core.errors import UserError
from fedc2i.flower.connections import Mail, SiteConnections
from fedc2i.flower.messages import Answer, Task

AGAIN = 2  # times that a site is asked again in a round when a message was lost
PAUSE = 10.0  # seconds until sites that all failed are asked again
HOPELESS = 3  # times that all of them fail before the run ends
TRIES = 10  # deadlines in a row without enough answers before the run ends


@dataclass(frozen=True)
class Policy:
    """How long to wait for whom, and how models travel.

    Attributes:
        deadline: seconds for a round; it goes on earlier when everyone who was asked has answered.
        min_sites: answers without which a round is not closed.
        half: whether models travel as float16.
        poll: seconds between looks into the mail.
    """

    deadline: float = 600.0
    min_sites: int = 1
    half: bool = False
    poll: float = 0.25

    def settings(self) -> dict[str, Any]:
        """As a run's configuration keeps them."""
        wire = "float16" if self.half else "float32"
        return {"engine": "flower", "wire": wire, "deadline": self.deadline, "min_sites": self.min_sites}


class AnswerCollector:
    """The sites of a run, by their number in the table."""

    def __init__(
        self,
        fleet: SiteConnections,
        names: Sequence[str],
        policy: Policy,
        say: Callable[[str], None],
        usable: Callable[[Answer], bool],
        late: Callable[[int, Answer, int], bool],
        on_client: Callable[[int, int], None] | None = None,
    ) -> None:
        """Has asked nobody yet.

        Args:
            fleet: the way to the sites.
            names: theirs.
            policy: how long to wait.
            say: takes one line for a person.
            usable: whether an answer's upload can be used, if it has to have one.
            late: takes a client's answer to an earlier round, and that round; says whether it was of use.
            on_client: called with the number of answers so far and the number of sites asked.
        """
        self._fleet, self._names, self._policy, self._say = fleet, tuple(names), policy, say
        self._usable, self._late, self._on_client = usable, late, on_client
        self._serial = 0
        self._missing: dict[str, int] = {}  # since which round

    def collect(
        self, number: int, tasks: Mapping[int, Task], content: Callable[[int], RecordDict]
    ) -> dict[int, Answer]:
        """The answers of those who give one in time.

        Args:
            number: of the round.
            tasks: by client.
            content: a client's task with its tensors, made when it is sent.

        Raises:
            UserError: if too few answer for too long.
        """
        self._serial += 1
        began = time.monotonic()
        policy, waiting, asked, lost = self._policy, set(tasks), set[int](), list[int]()
        failed, hopeless = set[int](), 0
        answers: dict[int, Answer] = {}
        trains = sum(task.train for task in tasks.values())
        needed = min(policy.min_sites, trains or len(tasks))
        until, tries = time.monotonic() + policy.deadline, 1
        while True:
            for client in sorted(waiting):
                site = self._names[client]
                if self._fleet.is_free(site) and self._fleet.ask(site, content(client), number, self._serial):
                    waiting.discard(client)
                    asked.add(client)
            for mail in self._fleet.collect():
                client = self._names.index(mail.site)
                if mail.is_lost and mail.serial == self._serial and lost.count(client) < AGAIN:
                    lost.append(client)  # if the site is there, it is asked again
                    asked.discard(client)
                    waiting.add(client)
                    continue
                if not self._sort(client, mail, number, asked, answers):
                    failed.add(client)
                if self._on_client is not None:
                    self._on_client(len(answers), len(tasks))
            useless = {m for m, own in answers.items() if tasks[m].train and not self._usable(own)}
            enough = sum(tasks[m].train for m in answers.keys() - useless) if trains else len(answers)
            again = any(client in waiting and self._fleet.is_free(self._names[client]) for client in lost)
            if enough >= needed and (not (asked or again) or time.monotonic() > until):
                break
            if not asked and len(failed | useless) == len(tasks):  # nobody is left to wait for
                until = min(until, time.monotonic() + PAUSE)
            if time.monotonic() > until:
                hopeless += len(failed | useless) == len(tasks)
                if tries == TRIES or hopeless == HOPELESS:
                    raise UserError(
                        f"round {number}: {enough} of the {needed} sites needed answered within "
                        f"{time.monotonic() - began:.0f} s; the same command goes on from the last round"
                    )
                self._say(f"round {number}: {enough} of the {needed} sites needed have answered; waiting on")
                waiting, failed = set(tasks) - answers.keys() - asked, set()
                until, tries = time.monotonic() + policy.deadline, tries + 1
            time.sleep(policy.poll)
        self._notice(number, tasks, answers, asked)
        return answers

    def _sort(self, client: int, mail: Mail, number: int, asked: set[int], answers: dict[int, Answer]) -> bool:
        """A reply: to this round, to an earlier one, or of no use; whether it was an answer."""
        if mail.serial == self._serial:
            asked.discard(client)
        try:
            if mail.content is None:
                raise UserError(mail.problem)
            answer = Answer.from_record(mail.content)
        except UserError as error:
            self._say(f"round {mail.round}: {mail.site} is left out: {error}")
            return False
        if mail.serial == self._serial:
            answers[client] = answer
        elif self._late(client, answer, mail.round):
            self._say(f"{mail.site} answered round {mail.round} in round {number}; its model is used, with its age")
        return True

    def _notice(self, number: int, tasks: Mapping[int, Task], answers: Mapping[int, Answer], asked: set[int]) -> None:
        """Says once who is missing, and who has returned."""
        for client in tasks:
            site = self._names[client]
            if client in answers and site in self._missing:
                self._say(f"{site} takes part again in round {number}; it was missing since {self._missing.pop(site)}")
            elif client not in answers and site not in self._missing:
                self._missing[site] = number
                why = f"no answer within {self._policy.deadline:.0f} s" if client in asked else "no usable answer"
                self._say(f"round {number} goes on without {site} ({why}); its last model, if any, is kept")
