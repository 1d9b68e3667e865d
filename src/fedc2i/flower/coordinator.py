"""The rounds of a federation whose sites are somewhere else: ask, wait no longer than agreed, and continue.

The server's side is the simulator's `Exchange`. A site's model, data and private parts stay where they are. What an
exchange brought is evaluated when the sites do their next task, so a round's report is complete one message later.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, RecordDict
from torch import Tensor

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, finite, stack
from fedc2i.data.federation import Federation
from fedc2i.engine.checkpoint import Checkpoint
from fedc2i.engine.client import ClientData, LocalClient
from fedc2i.engine.exchange import Exchange
from fedc2i.engine.records import Diagnostics, Metrics, Point, Round, over_all_clients
from fedc2i.flower import wire
from fedc2i.flower.answer_collector import AnswerCollector, Policy
from fedc2i.flower.connections import SiteConnections
from fedc2i.flower.message_format import Answer, Task, agreed
from fedc2i.flower.secure_round import Requests, SecureRound
from fedc2i.flower.site import Assignment
from fedc2i.methods.messages import Uploads

MOST_TIMES = 10  # a site's sample count, compared with the median of the others
Shapes = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, type and shape of each tensor


class Coordinator:
    """One run with one seed over connected sites."""

    def __init__(
        self,
        connections: SiteConnections,
        federation: Federation,
        assignment: Assignment,
        policy: Policy,
        run: str,
        setup: str = "",
        say: Callable[[str], None] = lambda line: None,
        on_client: Callable[[int, int], None] | None = None,
    ) -> None:
        """Starts before the first round.

        Args:
            federation: the sites of this run in table order; those still unknown report no samples.
            run: names the run at the sites.
            setup: how a site on another machine learns the assignment.
            say: takes one line for a person.
            on_client: called with the number of answers so far and the number of sites asked.
        """
        self._names, self._policy, self._run, self._setup, self._say = federation.names, policy, run, setup, say
        self._connections = connections
        connections.forget()
        self._context, self._settings = assignment.context, assignment.settings
        policy.check(self._settings.participants(len(self._names)))
        self._classes = len(federation.classes)
        self._expected = self._expect(federation)
        self._collector = AnswerCollector(
            connections, self._names, policy, say, self._is_usable, self._take_late, on_client
        )
        samples = federation.samples()
        self._bounding: set[int] = set()  # clients whose sample counts are bounded
        self._samples = self._bounded(torch.tensor([samples[name].get("train", 0) for name in self._names]))
        first_models = self._context.first_models(self._names, self._settings.init)
        self._exchange = Exchange(self._context, self._settings, self._names, self._samples, first_models)
        self._open: Round | None = None  # the last round; its exchange may not be evaluated yet
        self._reported = 0  # the last round whose report is complete
        self._course = ""  # with noise: a digest of all accepted answers, on which the next questions depend
        self._packed = self._pack()

    def _expect(self, federation: Federation) -> Shapes:
        """The shapes of an upload; the values that it is made of here have no meaning."""
        data = ClientData.place(federation.clients[0], self._classes, torch.device("cpu"))
        first = self._context.first_model(data.name, self._settings.init)
        return _shapes(LocalClient(self._context, data).upload(first, first, {}, -1, 1))

    def checkpoint(self) -> Checkpoint | None:
        """The state after the last round whose uploads were collected."""
        if self._open is None:
            return None
        tensors, values = self._exchange.state()
        values["samples"] = dict(zip(self._names, self._samples.tolist(), strict=True))
        values["open"] = {name: value for name, value in vars(self._open).items() if name != "influence"}
        values["course"] = self._course
        return Checkpoint(self._open.round, tensors, values)

    def restore(self, saved: Checkpoint) -> None:
        """Resumes after a checkpoint; raises a `UserError` if that is of other sites."""
        values = saved.values
        if tuple(values["samples"]) != self._names:
            raise UserError(f"the run was started with the sites {', '.join(values['samples'])}")
        self._samples[:] = torch.tensor(list(values["samples"].values()))  # servers read the same tensor
        self._exchange.restore(saved.tensors, values)
        names = {name: tuple(values["open"][name]) for name in ("participants", "refused")}
        self._open = Round(**{**values["open"], **names}, influence={})
        self._reported, self._course = self._open.round - 1, str(values["course"])
        self._packed = self._pack()

    def rounds(
        self,
        collected: Callable[[], None] = lambda: None,
        asking: Callable[[int, str], bool] = lambda number, course: False,
    ) -> Iterator[Round]:
        """Runs to the end; a report for every round.

        Args:
            collected: called after each round's uploads were collected.
            asking: with noise, called before a round's uploads are asked for, with its number and a digest of all
                answers accepted before: sites that are asked for a round again with the same digest send the same
                bits. Returns whether the round was asked for before with another digest.
        """
        settings = self._settings
        for number in range(1 if self._open is None else self._open.round + 1, settings.rounds + 1):
            if self._open is not None and settings.patience and settings.is_due(number - 1):
                yield (report := self._evaluate(self._open))
                if not any(own for metrics in report.metrics.values() for own in metrics):
                    raise UserError("patience reads the sites' scores, and none leave; use --set patience=0")
                if self._exchange.should_stop(report):
                    return
            if settings.noise and asking(number, self._course):
                self._say(f"round {number} is asked for again after other answers than before; ε counts it once more")
            yield from self._train(number)
            collected()
        if self._open is not None:
            yield self._evaluate(self._open)

    def _train(self, number: int) -> Iterator[Round]:
        """A round: everyone chosen trains, and evaluates the exchange before it."""
        began, exchange, opened = time.perf_counter(), self._exchange, self._open
        due, incomplete = self._settings.is_due(number), opened is not None and self._reported < opened.round
        due_before = incomplete and self._settings.is_due(number - 1)
        chosen = exchange.choose(number)

        def tasks(trained: Collection[int]) -> dict[int, Task]:
            asked = range(len(self._names)) if due or due_before else trained
            return {m: self._task(m, number, m in trained, due_before, due) for m in asked}

        secure = self._secure_round(number) if self._policy.secure else None
        answers = self._ask(number, tasks(chosen)) if secure is None else secure.collect(chosen, tasks)
        sent = {m: answers[m] for m in chosen if m in answers and (secure is None or answers[m].upload)}
        seconds = time.perf_counter() - began
        if opened is not None:
            if incomplete:
                yield self._complete(opened, answers)
            exchange.take_reports(self._diagnostics(sent), chosen)
        rejected = self._take(sent, number)
        if rejected or len(sent) < len(chosen):  # a site that did not answer may have trained, or not
            self._extend_course(secrets.token_bytes(16))
        exchange.combine(number)
        self._packed = self._pack()
        metrics: dict[Point, Metrics] = {"trained": self._metrics(answers, "trained")} if due else {}
        bytes_up = sum(answer.bytes for answer in sent.values()) // max(1, len(sent))
        bytes_down = sum(wire.size(part) for m in sent for part in self._packed(m))
        bytes_down = (bytes_down + (0 if secure is None else secure.bytes_down)) // max(1, len(sent))
        self._open = exchange.report(number, seconds, tuple(sent), metrics, (), rejected, bytes_up, bytes_down)

    def _evaluate(self, opened: Round) -> Round:
        """Completes the report of a round without training in the next one."""
        number, due = opened.round + 1, self._settings.is_due(opened.round)
        tasks = {m: self._task(m, number, False, due, False) for m in range(len(self._names))}
        return self._complete(opened, self._ask(number, tasks))

    def _complete(self, opened: Round, answers: Mapping[int, Answer]) -> Round:
        """The report of a round, with the evaluation of its exchange."""
        self._reported = opened.round
        metrics = dict(opened.metrics)
        if metrics:
            metrics["received"] = self._metrics(answers, "received")
        is_last = opened.round == self._settings.rounds
        influence = over_all_clients(self._diagnostics(answers), len(self._names), is_last)
        return replace(opened, metrics=metrics, influence=influence)

    # Messages to and from sites.

    def _secure_round(self, number: int) -> SecureRound:
        policy = self._policy

        def weights(clients: Sequence[int]) -> list[float]:
            samples = self._samples[list(clients)]
            uploads = Uploads({}, tuple(clients), samples, torch.zeros_like(samples), number)
            return [float(own) for own in self._context.method.weights(uploads)]

        how = policy.min_sites, policy.secure_range, self._say
        return SecureRound(self._run, number, self._names, self._ask, self._expected, weights, *how)

    def _ask(
        self,
        number: int,
        tasks: Mapping[int, Task],
        requests: Requests | None = None,
        needed: int | None = None,
    ) -> dict[int, Answer]:
        """Collects answers; ``requests`` are of a stage of secure aggregation, which needs no tensors to prepare."""

        def content(m: int) -> RecordDict:
            stage = (requests or {}).get(m)
            tensors = self._packed(m) if stage is None or tasks[m].train else (wire.pack({}), wire.pack({}))
            return tasks[m].to_record(*tensors, stage)

        answers = self._collector.collect(number, tasks, content, needed)
        claimed = self._samples.clone()
        for client in answers:
            claimed[client] = self._connections.sites[self._names[client]].samples["train"]
        self._samples[:] = self._bounded(claimed)  # servers read the same tensor
        return answers

    def _bounded(self, claimed: Tensor) -> Tensor:
        """Sample counts as they weigh in averages: nobody checks them, so each is bounded by those of the others."""
        bounded = claimed.clone()
        for client in range(len(claimed)):
            others = torch.cat([claimed[:client], claimed[client + 1 :]])
            others = others[others > 0]
            if len(others) and claimed[client] > (most := MOST_TIMES * int(others.median())):
                bounded[client] = most
                if client not in self._bounding:
                    self._bounding.add(client)
                    self._say(
                        f"{self._names[client]} reports {int(claimed[client]):,} training samples; they count as "
                        f"{most:,}, {MOST_TIMES} times the median of the other sites"
                    )
        return bounded

    def _task(self, client: int, number: int, train: bool, received: bool, trained: bool) -> Task:
        exchange = 0 if self._open is None else self._open.round
        position = self._exchange.download(client).position(client)
        return Task(self._run, number, exchange, position, train, received, trained, self._policy.half, self._setup)

    def _is_usable(self, answer: Answer) -> bool:
        if self._policy.secure:  # it says nothing
            return bool(answer.upload)
        fits = _shapes(answer.upload) == self._expected
        return fits and bool(finite(stack([answer.upload])).all()) if answer.upload else fits

    def _take_late(self, client: int, answer: Answer, number: int) -> bool:
        """Takes an upload of an earlier round, unless the mailbox has a newer one."""
        newer = bool(answer.upload) and number > self._exchange.mailbox.sent[client] and not self._policy.secure
        return newer and not self._take({client: answer}, number) and self._context.method.keeps_uploads

    def _take(self, answers: Mapping[int, Answer], number: int) -> dict[int, str]:
        """Puts uploads into the mailbox; returns what was wrong with rejected ones, by client."""
        if not answers:
            return {}
        fits = [client for client, answer in answers.items() if _shapes(answer.upload) == self._expected]
        wrong = {client: "of another architecture" for client in answers if client not in fits}
        uploads = [answers[client].upload for client in fits]
        broken = self._exchange.mailbox.receive(fits, stack(uploads), number) if fits else {}
        for client in fits:
            if client not in broken:
                self._extend_course(f"{number} {client} {self._samples[client]}".encode(), answers[client].upload)
        wrong |= broken
        for client, why in wrong.items():
            self._say(f"round {number}: the upload of {self._names[client]} is {why}; ignored")
        return dict(sorted(wrong.items()))

    def _extend_course(self, what: bytes, upload: Params | None = None) -> None:
        if not self._settings.noise:
            return
        digest = hashlib.sha256(self._course.encode() + what)
        for name, tensor in sorted((upload or {}).items()):
            digest.update(f"|{name}|".encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        self._course = digest.hexdigest()

    def _pack(self) -> Callable[[int], tuple[ArrayRecord, ArrayRecord]]:
        """What a client is sent; the shared part is packed once for all that receive it."""
        half = self._policy.half
        shared = [wire.pack(server.download.shared, half) for server in self._exchange.servers]

        def of(client: int) -> tuple[ArrayRecord, ArrayRecord]:
            download = self._exchange.download(client)
            own = replace(download, shared={}).to(client) if download.personal else {}
            return shared[self._exchange.group(client)], wire.pack(own, half)

        return of

    def _metrics(self, answers: Mapping[int, Answer], point: Point) -> Metrics:
        """Of every site, empty for those that did not answer."""
        return [dict(answers[m].metrics.get(point, {})) if m in answers else {} for m in range(len(self._names))]

    def _diagnostics(self, answers: Mapping[int, Answer]) -> list[Diagnostics]:
        """What sites measured of the exchange, as far as it fits together."""
        received = {client: self._exchange.download(client).clients for client in answers}
        return agreed({client: answer.report for client, answer in answers.items()}, received, self._classes)


def _shapes(tensors: Params) -> Shapes:
    return tuple(sorted((name, str(own.dtype), tuple(own.shape)) for name, own in tensors.items()))
