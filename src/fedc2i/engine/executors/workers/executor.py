"""Clients over worker processes, one per core with a single thread each: the fastest way on a CPU.

Small models gain little from two threads inside an operation, and lose it all when another program runs. Here every
client's work stays on one core, tensors lie in memory that all processes share, and a worker that has no client left
to train scores those already trained. The first half of this module runs in the main process, the second in a worker.

Messages to a worker: ``open`` (contexts and data of a run), ``step`` (the tensors of a step), ``job``. They carry only
the layout of tensors.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.engine.client import ClientData, LocalClient, Piece, RunContext
from fedc2i.engine.executors.base import ClientBatch, OnClient, Personalised, Trained
from fedc2i.engine.executors.workers.pool import Layout, Pool, SharedMemory, Worker
from fedc2i.engine.records import Scored
from fedc2i.methods.messages import Download
from fedc2i.training.local import Batch
from fedc2i.training.metrics import defined

_Place = tuple[int, int]  # a batch and a client's place in it
_SPLITS = ("train", "validation", "test")


class PlacedBatch(NamedTuple):
    """A `ClientBatch` whose tensors lie in shared memory, with space for one result per client."""

    seed: int
    clients: tuple[int, ...]
    params: Layout
    results: Layout
    shared: Layout
    personal: Layout
    known: tuple[int, ...]  # the clients whose rows `personal` holds
    round: int


class WorkerJob(NamedTuple):
    """Something to do for one client: ``train``, ``personalise``, or ``score`` a piece of its data."""

    what: str
    batch: int
    place: int
    piece: Piece | None = None
    of_result: bool = True


class WorkersExecutor:
    """`Executor` over the processes of a pool; its numbers are those of `LoopedExecutor`, bit for bit."""

    def __init__(
        self,
        pool: Pool,
        contexts: Sequence[RunContext],
        data: Sequence[ClientData],
        threads: int = 1,
        on_client: OnClient | None = None,
    ) -> None:
        """Opens a run over a pool that was taken for it, and that `close` gives back."""
        self._pool, self._data, self._on_client = pool, data, on_client
        try:
            pool.is_ready(patient=True)
            pool.broadcast(("open", {context.seed: context for context in contexts}, self._share(data), threads))
            for worker in pool.workers:
                worker.receive()  # what cannot be read there, e.g. a class of a module that is not on its path
        except BaseException:
            pool.discard()
            raise

    def _share(self, data: Sequence[ClientData]) -> list[tuple[str, Layout]]:
        """Where the clients' data lies in shared memory, copied again: tensors of the last run may have changed."""
        clients, end = [], 0
        for own in data:
            parts = {f"{split}_{part}": getattr(getattr(own, split), part) for split in _SPLITS for part in "xyw"}
            layout, end = self._pool.data.write({"counts": own.counts, **parts}, end)
            clients.append((own.name, layout))
        return clients

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """See `Executor.train`."""
        done = self._step("train", batches, evaluate)
        return [Trained(*own) for own in zip(done.results, done.extras, done.metrics, strict=True)]

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """See `Executor.personalise`."""
        done = self._step("personalise", batches, evaluate)
        return [Personalised(*own) for own in zip(done.results, done.extras, done.metrics, strict=True)]

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[list[Scored]]:
        """See `Executor.evaluate`."""
        return self._step("score", batches, evaluate=True).metrics

    def close(self) -> None:
        """The workers stay for the next run."""
        self._pool.give_back()

    def _step(self, what: str, batches: Sequence[ClientBatch], evaluate: bool) -> _Step:
        step = _Step(what, batches, evaluate, self._data, self._on_client if what == "train" else None)
        try:
            placed = self._place(batches, with_results=what != "score")
            self._pool.broadcast(("step", placed))
            self._pool.work(step.next_job, step.take)
        except BaseException:
            self._pool.discard()
            raise
        step.results = [
            {name: tensor.clone() for name, tensor in self._pool.inputs.read(batch.results).items()} for batch in placed
        ]
        return step

    def _place(self, batches: Sequence[ClientBatch], with_results: bool) -> list[PlacedBatch]:
        """Puts a step's tensors into shared memory."""
        inputs, end, placed = self._pool.inputs, 0, []
        for batch in batches:
            params, end = inputs.write(batch.params, end)
            results, end = inputs.place(batch.params if with_results else {}, end)
            shared, end = inputs.write(batch.download.shared, end)
            personal, end = inputs.write(batch.download.personal, end)
            layouts = params, results, shared, personal
            placed.append(PlacedBatch(batch.context.seed, batch.clients, *layouts, batch.download.clients, batch.round))
        return placed


class _Step:
    """The jobs of a step: first the clients' own, the largest first, then scores of what is there already."""

    def __init__(
        self,
        what: str,
        batches: Sequence[ClientBatch],
        evaluate: bool,
        data: Sequence[ClientData],
        on_client: OnClient | None,
    ) -> None:
        self._what, self._evaluate, self._on_client = what, evaluate, on_client
        self._clients = {
            (t, k): LocalClient(batch.context, data[m])
            for t, batch in enumerate(batches)
            for k, m in enumerate(batch.clients)
        }
        places = sorted(self._clients, key=lambda place: -self._clients[place].data.samples)
        self._jobs = deque(WorkerJob(what, *place) for place in places if what != "score")
        self._scores: deque[WorkerJob] = deque()
        self._extras: dict[_Place, Params] = {}
        self._sums: dict[_Place, dict[Any, Mapping[str, Tensor]]] = {place: {} for place in places}
        self._counts = [len(batch.clients) for batch in batches]
        self.results: list[Stacked] = []
        if what == "score":
            for place in places:
                self._queue_scores(place)

    def next_job(self) -> WorkerJob | None:
        """What a worker should do now, if anything."""
        queue = self._jobs or self._scores
        return queue.popleft() if queue else None

    def take(self, job: WorkerJob, answer: Any, worker: Worker) -> None:
        """A worker's answer."""
        place = job.batch, job.place
        if job.what == "score":
            sums = {name: torch.tensor(value, dtype=torch.float64) for name, value in answer.items()}
            self._sums[place][job.piece] = sums
            return
        self._extras[place] = {name: tensor.clone() for name, tensor in worker.answers.read(answer).items()}
        if self._evaluate:
            self._queue_scores(place)
        if self._on_client is not None:
            self._on_client(len(self._extras), len(self._sums))

    def _queue_scores(self, place: _Place) -> None:
        pieces = self._clients[place].pieces()
        self._scores.extend(WorkerJob("score", *place, piece, self._what != "score") for piece in pieces)

    @property
    def extras(self) -> list[Stacked]:
        """Uploads or diagnostics."""
        return [stack([self._extras[t, k] for k in range(count)]) for t, count in enumerate(self._counts)]

    @property
    def metrics(self) -> list[list[Scored]]:
        """Scores, if any were asked for."""
        return [
            [self._metrics_of((t, k)) for k in range(count)] if self._evaluate else []
            for t, count in enumerate(self._counts)
        ]

    def _metrics_of(self, place: _Place) -> Scored:
        client = self._clients[place]
        sums = [self._sums[place][piece] for piece in client.pieces()]
        found = defined({name: float(value) for name, value in client.metrics(sums).items()})
        return Scored(found, torch.cat(client.test_logits(sums)))


class _WorkerState:
    """In a worker: its data, contexts and present client batches."""

    def __init__(self, answers: SharedMemory, inputs: SharedMemory, data: SharedMemory) -> None:
        self._answers, self._inputs, self._data = answers, inputs, data
        self._clients: list[ClientData] = []
        self._contexts: dict[int, RunContext] = {}
        self._batches: list[tuple[PlacedBatch, Params, Params, Download]] = []

    def open(self, contexts: dict[int, RunContext], clients: list[tuple[str, Layout]], threads: int) -> None:
        """A run begins."""
        torch.set_num_threads(threads)
        self._contexts, self._clients = contexts, []
        for name, layout in clients:
            tensors = self._data.read(layout)
            splits = {split: Batch(*(tensors[f"{split}_{part}"] for part in "xyw")) for split in _SPLITS}
            self._clients.append(ClientData(name, counts=tensors["counts"], **splits))

    def step(self, batches: list[PlacedBatch]) -> None:
        """The tensors of the next jobs are in place."""
        self._batches = []
        for batch in batches:
            layouts = batch.params, batch.results, batch.shared, batch.personal
            params, results, shared, personal = (self._inputs.read(layout) for layout in layouts)
            self._batches.append((batch, params, results, Download(shared, personal, batch.known)))

    def job(self, job: WorkerJob) -> Any:
        """The answer: floats, or where tensors are."""
        batch, params, results, download = self._batches[job.batch]
        number = batch.clients[job.place]
        client = LocalClient(self._contexts[batch.seed], self._clients[number])
        own, result = row(params, job.place), row(results, job.place)
        mail = download.to(number), download.position(number)
        if job.piece is not None:
            sums = client.score(job.piece, result if job.of_result else own, *mail, batch.round)
            return {name: value.numpy() for name, value in sums.items()}
        extra: Mapping[str, Tensor]
        if job.what == "train":
            made = client.train(own, *mail, batch.round)
            extra = client.upload(made, own, *mail, batch.round)
        else:
            made, extra = client.personalise(own, *mail, batch.round)
        for name, tensor in result.items():
            tensor.copy_(made[name])
        return self._answers.write(extra)[0]


def serve(line: int, answers: int, inputs: int, data: int) -> None:
    """Works in a worker process until the other end of the line is closed."""
    torch.set_num_threads(1)
    state = _WorkerState(SharedMemory(answers), SharedMemory(inputs), SharedMemory(data))
    connection = Connection(line)
    with contextlib.suppress(EOFError, OSError):  # of the line: the other end is gone
        connection.send_bytes(cloudpickle.dumps(("ready", None)))
        while True:
            answer = _answer(state, connection.recv_bytes())
            if answer is not None:
                connection.send_bytes(answer)


def _answer(state: _WorkerState, message: bytes) -> bytes | None:
    """What a message is answered with: only a ``step`` that went well needs nothing."""
    try:
        kind, *rest = cloudpickle.loads(message)
        answer = getattr(state, kind)(*rest)
        return None if kind == "step" else bytes(cloudpickle.dumps(("answer", answer)))
    except Exception as error:
        from fedc2i.engine.executors.workers.sent_error import sent_error

        return sent_error(error)
