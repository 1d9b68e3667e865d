"""The rounds of a federation whose sites are somewhere else: asks, waits no longer than agreed, and goes on.

It holds what the server of the in-process engine holds: the sites' latest uploads and the method's own state. A site's
model, data and private parts stay where they are. What the last exchange brought is scored when the sites do their next
task, so a round's report is complete one message later.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from flwr.app import ArrayRecord

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, finite, stack
from fedc2i.engine import topology
from fedc2i.engine.checkpoint_file import Checkpoint
from fedc2i.engine.diagnostics import Told, spread
from fedc2i.engine.participation import Patience, choose
from fedc2i.engine.records import Metrics, Point, Round
from fedc2i.engine.server import Mailbox, Server
from fedc2i.flower import wire
from fedc2i.flower.answer_collector import AnswerCollector, Policy
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.diagnostics_check import agreed
from fedc2i.flower.messages import Answer, Task
from fedc2i.flower.site import Assignment


@dataclass(frozen=True)
class _Open:
    """A round whose exchange has not been scored yet."""

    number: int
    participants: tuple[str, ...]
    refused: Mapping[str, str]  # names, and what was wrong
    trained: list[dict[str, float]]
    seconds: float
    bytes_up: int
    bytes_down: int


class Coordinator:
    """One run with one seed over the sites of a fleet."""

    def __init__(
        self,
        fleet: SiteConnections,
        samples: Mapping[str, int],
        assignment: Assignment,
        expected: Params,
        classes: int,
        policy: Policy,
        run: str,
        setup: str = "",
        say: Callable[[str], None] = lambda line: None,
        on_client: Callable[[int, int], None] | None = None,
    ) -> None:
        """Starts before the first round.

        Args:
            fleet: the sites.
            samples: the sites of this run in table order, and how many training samples each has, 0 where it has not
                introduced itself yet.
            assignment: what they do.
            expected: an upload as it should be, see `expected_upload`.
            classes: how many the run has.
            policy: how long to wait for whom.
            run: names the run at the sites.
            setup: how a site on another machine learns the assignment.
            say: takes one line for a person.
            on_client: called with the number of answers so far and the number of sites asked.
        """
        self._names, self._policy, self._run, self._setup, self._say = tuple(samples), policy, run, setup, say
        self._fleet = fleet
        fleet.forget()
        self._expected, self._classes = _shapes(expected), classes
        self._collector = AnswerCollector(fleet, self._names, policy, say, self._is_usable, self._take_late, on_client)
        self._recipe, self._settings = assignment.recipe, assignment.settings
        recipe, settings = assignment.recipe, assignment.settings
        self._samples = torch.tensor(list(samples.values()))
        firsts = recipe.first_models(self._names, settings.init)
        circles = topology.parse(settings.topology, self._names, recipe.seed).circles()
        self._circle = {client: c for c, circle in enumerate(circles) for client in circle.members}
        self._mailbox = Mailbox(len(self._names), settings.norm_bound)
        self._servers = [Server(recipe.method, self._samples, firsts, one.sources, self._mailbox) for one in circles]
        self._patience = Patience(settings.patience)
        self._open: _Open | None = None
        self._reported = 0  # the last round whose report is out
        self._course = ""  # with noise: a digest of all that was taken in, on which what is asked next depends
        self._before = [(server.state, 0) for server in self._servers]  # the last combine that brought something
        self._packed = self._pack()

    # Checkpoints: enough to go on behind the last round that was collected.

    def checkpoint(self) -> Checkpoint | None:
        """The state after the last collected round."""
        if self._open is None:
            return None
        tensors = {f"mailbox/{name}": own for name, own in self._mailbox.uploads.items()}
        for s, (state, _) in enumerate(self._before):
            tensors |= {f"server{s}/{name}": own for name, own in state.items()}
        for s, server in enumerate(self._servers):
            tensors |= {f"reports{s}/{name}": own for name, own in server.reports.items()}
        values = {
            "sent": self._mailbox.sent,
            "samples": dict(zip(self._names, self._samples.tolist(), strict=True)),
            "open": vars(self._open),
            "patience": self._patience.state,
            "combined": [number for _, number in self._before],
            "course": self._course,
        }
        return Checkpoint(self._open.number, tensors, values)

    def restore(self, saved: Checkpoint) -> None:
        """Goes on behind a checkpoint of the same run.

        Raises:
            UserError: if it is of other sites.
        """
        if tuple(saved.values["samples"]) != self._names:
            raise UserError(f"the run was begun with the sites {', '.join(saved.values['samples'])}")

        def part(prefix: str) -> Params:
            return {name.removeprefix(prefix): own for name, own in saved.tensors.items() if name.startswith(prefix)}

        self._samples[:] = torch.tensor(list(saved.values["samples"].values()))  # servers read the same tensor
        self._mailbox.restore(part("mailbox/"), saved.values["sent"])
        opened = dict(saved.values["open"])
        refused = opened["refused"]
        if not isinstance(refused, dict):  # an earlier version wrote no reasons
            refused = dict.fromkeys(refused, "not usable")
        self._open = _Open(**opened | {"participants": tuple(opened["participants"]), "refused": refused})
        self._before = [(part(f"server{s}/"), int(number)) for s, number in enumerate(saved.values["combined"])]
        for s, server in enumerate(self._servers):
            (server.state, number), server.reports = self._before[s], part(f"reports{s}/")
            if number:
                server.combine(number)
        self._patience.state = tuple(saved.values["patience"])
        self._course = str(saved.values.get("course", ""))  # an earlier version has none
        self._reported = self._open.number - 1
        self._packed = self._pack()

    def rounds(
        self,
        collected: Callable[[], None] = lambda: None,
        asking: Callable[[int, str], bool] = lambda number, course: False,
    ) -> Iterator[Round]:
        """Runs to the end; a report for every round.

        Args:
            collected: called after each round's uploads were taken in.
            asking: with noise, called before a round's uploads are asked for, with its number and a digest of all that
                was taken in before: sites that are asked for a round again on the same course send the same bits. Says
                whether the round was asked for on another course.
        """
        settings = self._settings
        for number in range(1 if self._open is None else self._open.number + 1, settings.rounds + 1):
            if self._open is not None and settings.patience and settings.is_due(number - 1):
                yield (report := self._exchange(number))
                if self._patience.is_over(report, self._recipe.method.headline):
                    return
            if settings.noise and asking(number, self._course):
                self._say(f"round {number} is asked for again after other answers than before; ε counts it once more")
            yield from self._train(number)
            collected()
        if self._open is not None:
            yield self._exchange(settings.rounds + 1)

    def _train(self, number: int) -> Iterator[Round]:
        """A round: everyone chosen trains, and answers for the exchange before it, too."""
        began, settings, opened = time.perf_counter(), self._settings, self._open
        due, unscored = settings.is_due(number), opened is not None and self._reported < opened.number
        scores = unscored and settings.is_due(number - 1)
        chosen = choose(self._recipe.seed, settings, len(self._names), number)
        asked = range(len(self._names)) if due or scores else chosen
        answers = self._ask(number, {m: self._task(m, number, m in chosen, scores, due) for m in asked})
        sent = {m: answers[m] for m in chosen if m in answers}
        seconds = time.perf_counter() - began
        if opened is not None:
            if unscored:
                yield self._close(opened, answers)
            self._hear(sent)
        refused = self._take(sent, number)
        if refused or len(sent) < len(chosen):  # who did not answer may have trained, or not
            self._turn(secrets.token_bytes(16))
        for s, server in enumerate(self._servers):
            state, before = server.state, server.download
            if server.combine(number) is not before:
                self._before[s] = state, number
        self._packed = self._pack()
        self._open = _Open(
            number,
            tuple(self._names[m] for m in sent),
            {self._names[m]: why for m, why in refused.items()},
            self._scores(answers, "trained") if due else [],
            seconds,
            sum(answer.bytes for answer in sent.values()) // max(1, len(sent)),
            sum(wire.size(part) for m in sent for part in self._packed(m)) // max(1, len(sent)),
        )

    def _exchange(self, number: int) -> Round:
        """Scores what the last exchange brought, without training."""
        assert self._open is not None
        due = self._settings.is_due(number - 1)
        tasks = {m: self._task(m, number, False, due, False) for m in range(len(self._names))}
        return self._close(self._open, self._ask(number, tasks))

    def _close(self, opened: _Open, answers: Mapping[int, Answer]) -> Round:
        """The report of a round, now that its exchange was scored."""
        self._reported = opened.number
        scores: dict[Point, Metrics] = {}
        if opened.trained:
            scores = {"trained": opened.trained, "received": self._scores(answers, "received")}
        is_last = opened.number == self._settings.rounds
        influence = spread(self._told(answers), len(self._names), is_last)
        return Round(
            self._recipe.seed,
            opened.number,
            opened.seconds,
            opened.participants,
            scores,
            influence,
            tuple(opened.refused),
            opened.bytes_up,
            opened.bytes_down,
            opened.refused,
        )

    def _ask(self, number: int, tasks: Mapping[int, Task]) -> dict[int, Answer]:
        answers = self._collector.collect(number, tasks, lambda m: tasks[m].to_record(*self._packed(m)))
        for client in answers:
            self._samples[client] = self._fleet.sites[self._names[client]].samples["train"]
        return answers

    def _task(self, client: int, number: int, train: bool, received: bool, trained: bool) -> Task:
        server = self._servers[self._circle[client]]
        exchange = 0 if self._open is None else self._open.number
        position = server.download.position(client)
        return Task(self._run, number, exchange, position, train, received, trained, self._policy.half, self._setup)

    # Tensors in and out.

    def _hear(self, answers: Mapping[int, Answer]) -> None:
        """Servers hear what their method reads of the diagnostics."""
        for told in self._told(answers):
            server = self._servers[self._circle[told.clients[0]]]
            names = self._recipe.method.reads_reports
            said = {name: told.report[name] for name in names if name in told.report}
            server.hear(told.clients, told.received, said)

    def _is_usable(self, answer: Answer) -> bool:
        fits = _shapes(answer.upload) == self._expected
        return fits and bool(finite(stack([answer.upload])).all()) if answer.upload else fits

    def _take_late(self, client: int, answer: Answer, number: int) -> bool:
        """An upload of an earlier round, if the mailbox holds none as new."""
        newer = bool(answer.upload) and number > self._mailbox.sent[client]
        return newer and not self._take({client: answer}, number) and self._recipe.method.keeps_uploads

    def _take(self, answers: Mapping[int, Answer], number: int) -> dict[int, str]:
        """Puts uploads into the mailbox; returns the clients whose upload was refused and why, having said it."""
        if not answers:
            return {}
        fits = [client for client, answer in answers.items() if _shapes(answer.upload) == self._expected]
        wrong = {client: "of another architecture" for client in answers if client not in fits}
        broken = self._mailbox.receive(fits, stack([answers[m].upload for m in fits]), number) if fits else {}
        for client in fits:
            if client not in broken:
                self._turn(f"{number} {client} {self._samples[client]}".encode(), answers[client].upload)
        wrong |= broken
        for client, why in wrong.items():
            self._say(f"round {number}: the upload of {self._names[client]} is {why}; left out")
        return dict(sorted(wrong.items()))

    def _turn(self, what: bytes, upload: Params | None = None) -> None:
        """Adds to the course what happened."""
        if not self._settings.noise:
            return
        mixed = hashlib.sha256(self._course.encode() + what)
        for name, tensor in sorted((upload or {}).items()):
            mixed.update(f"|{name}|".encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        self._course = mixed.hexdigest()

    def _pack(self) -> Callable[[int], tuple[ArrayRecord, ArrayRecord]]:
        """What a client is sent: what a circle receives is packed once, and the same object for all in it."""
        half = self._policy.half
        shared = [wire.pack(server.download.shared, half) for server in self._servers]

        def of(client: int) -> tuple[ArrayRecord, ArrayRecord]:
            download = self._servers[self._circle[client]].download
            own = replace(download, shared={}).to(client) if download.personal else {}
            return shared[self._circle[client]], wire.pack(own, half)

        return of

    def _scores(self, answers: Mapping[int, Answer], point: Point) -> list[dict[str, float]]:
        """Of every site, nothing for those that did not answer."""
        return [dict(answers[m].metrics.get(point, {})) if m in answers else {} for m in range(len(self._names))]

    def _told(self, answers: Mapping[int, Answer]) -> list[Told]:
        """What sites say of the exchange, as far as it fits together."""
        received = {client: self._servers[self._circle[client]].download.clients for client in answers}
        return agreed({client: answer.report for client, answer in answers.items()}, received, self._classes)


def _shapes(tensors: Params) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple(sorted((name, str(own.dtype), tuple(own.shape)) for name, own in tensors.items()))
