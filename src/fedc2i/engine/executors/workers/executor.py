"""Clients over worker processes, one per core with a single thread each: the fastest way on a CPU.

Small models gain little from two threads inside an operation, and lose it all when another program runs. Here every
client's work stays on one core, tensors lie in memory that all processes share, and a worker that has no client left
to train scores those already trained.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedc2i.core.params import Params, Stacked, stack
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.executors.workers.pool import Pool, Worker
from fedc2i.engine.executors.workers.process import PlacedBatch, WorkerJob, describe
from fedc2i.engine.executors.workers.shared_memory import Layout
from fedc2i.engine.records import Metrics

_Place = tuple[int, int]  # a batch and a client's place in it


class WorkersExecutor:
    """`Executor` over the processes of a pool; its numbers are those of `LoopedExecutor`, bit for bit."""

    def __init__(
        self,
        pool: Pool,
        contexts: Sequence[RunContext],
        data: Sequence[ClientData],
        threads: int = 1,
        on_client: Callable[[int, int], None] | None = None,
    ) -> None:
        """Opens a run over a pool that was taken for it, and that `close` gives back."""
        self._pool = pool
        self._data = data
        self._on_client = on_client
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
            layout, end = self._pool.data.write(describe(own), end)
            clients.append((own.name, layout))
        return clients

    def train(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Trained]:
        """Local runs, uploads, and scores of the trained models if asked for."""
        done = self._step("train", batches, evaluate)
        return [Trained(*own) for own in zip(done.results, done.extras, done.metrics, strict=True)]

    def personalise(self, batches: Sequence[ClientBatch], evaluate: bool) -> list[Personalised]:
        """Starts of the next round, diagnostics, and scores of the starts if asked for."""
        done = self._step("personalise", batches, evaluate)
        return [Personalised(*own) for own in zip(done.results, done.extras, done.metrics, strict=True)]

    def evaluate(self, batches: Sequence[ClientBatch]) -> list[Metrics]:
        """Metrics of every client on its own data."""
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
            known = batch.download.clients
            placed.append(
                PlacedBatch(batch.context.seed, batch.clients, params, results, shared, personal, known, batch.round)
            )
        return placed


class _Step:
    """The jobs of a step: first the clients' own, the largest first, then scores of what is there already."""

    def __init__(
        self,
        what: str,
        batches: Sequence[ClientBatch],
        evaluate: bool,
        data: Sequence[ClientData],
        on_client: Callable[[int, int], None] | None,
    ) -> None:
        self._what, self._batches, self._evaluate, self._data, self._on_client = (
            what,
            batches,
            evaluate,
            data,
            on_client,
        )
        places = [(t, k) for t, batch in enumerate(batches) for k in range(len(batch.clients))]
        places.sort(key=lambda place: -data[batches[place[0]].clients[place[1]]].samples)
        self._jobs = deque(WorkerJob(what, *place) for place in places if what != "score")
        self._scores: deque[WorkerJob] = deque()
        self._extras: dict[_Place, Params] = {}
        self._sums: dict[_Place, dict[Any, Mapping[str, Tensor]]] = {place: {} for place in places}
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
            self._sums[place][job.piece] = {
                name: torch.tensor(value, dtype=torch.float64) for name, value in answer.items()
            }
            return
        self._extras[place] = {name: tensor.clone() for name, tensor in worker.answers.read(answer).items()}
        if self._evaluate:
            self._queue_scores(place)
        if self._on_client is not None:
            self._on_client(len(self._extras), len(self._sums))

    def _client(self, place: _Place) -> LocalClient:
        batch = self._batches[place[0]]
        return LocalClient(batch.context, self._data[batch.clients[place[1]]])

    def _queue_scores(self, place: _Place) -> None:
        pieces = self._client(place).pieces()
        self._scores.extend(WorkerJob("score", *place, piece, self._what != "score") for piece in pieces)

    @property
    def extras(self) -> list[Stacked]:
        """Uploads or diagnostics."""
        return [stack([self._extras[t, k] for k in range(len(batch.clients))]) for t, batch in enumerate(self._batches)]

    @property
    def metrics(self) -> list[Metrics]:
        """Scores, if any were asked for."""
        return [
            [self._metrics_of((t, k)) for k in range(len(batch.clients))] if self._evaluate else []
            for t, batch in enumerate(self._batches)
        ]

    def _metrics_of(self, place: _Place) -> dict[str, float]:
        client = self._client(place)
        means = client.metrics([self._sums[place][piece] for piece in client.pieces()])
        return {name: float(value) for name, value in means.items()}
