"""What a worker process does: it waits for jobs, computes for one client at a time, and answers.

Messages in: ``open`` (contexts and data of a run), ``step`` (the tensors of a step), ``job``. Tensors lie in shared
memory; messages carry only their layout.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import Tensor

from fedc2i.core.params import Params, row
from fedc2i.engine.client import ClientData, LocalClient, Piece, RunContext
from fedc2i.engine.executors.workers.shared_memory import Layout, SharedMemory
from fedc2i.methods.base import Download
from fedc2i.training.local import Batch

SPLITS = ("train", "validation", "test")


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


class _WorkerState:
    """A worker's data, contexts and present client batches."""

    def __init__(self, answers: SharedMemory, inputs: SharedMemory, data: SharedMemory) -> None:
        self._answers, self._inputs, self._data = answers, inputs, data
        self._clients: list[ClientData] = []
        self._contexts: dict[int, RunContext] = {}
        self._batches: list[tuple[PlacedBatch, Params, Params, Download]] = []

    def open(self, contexts: dict[int, RunContext], clients: list[tuple[str, Layout]], threads: int) -> None:
        """A run begins."""
        torch.set_num_threads(threads)
        self._contexts = contexts
        self._clients = [_client(name, self._data.read(layout)) for name, layout in clients]

    def step(self, batches: list[PlacedBatch]) -> None:
        """The tensors of the next jobs are in place."""
        read = self._inputs.read
        self._batches = [
            (
                batch,
                read(batch.params),
                read(batch.results),
                Download(read(batch.shared), read(batch.personal), batch.known),
            )
            for batch in batches
        ]

    def job(self, job: WorkerJob) -> Any:
        """The answer: floats, or where tensors are."""
        batch, params, results, download = self._batches[job.batch]
        number = batch.clients[job.place]
        client = LocalClient(self._contexts[batch.seed], self._clients[number])
        own, result = row(params, job.place), row(results, job.place)
        mail = download.to(number), download.position(number)
        if job.what == "score":
            assert job.piece is not None
            sums = client.score(job.piece, result if job.of_result else own, *mail, batch.round)
            return {name: float(value) for name, value in sums.items()}
        extra: Mapping[str, Tensor]
        if job.what == "train":
            made = client.train(own, *mail, batch.round)
            extra = client.upload(made, own, *mail, batch.round)
        else:
            made, extra = client.personalise(own, *mail, batch.round)
        for name, tensor in result.items():
            tensor.copy_(made[name])
        return self._answers.write(extra)[0]


def _client(name: str, tensors: Params) -> ClientData:
    splits = {split: Batch(*(tensors[f"{split}_{part}"] for part in "xyw")) for split in SPLITS}
    return ClientData(name, counts=tensors["counts"], **splits)


def describe(client: ClientData) -> Params:
    """A client's data as flat tensors, the other way round."""
    parts = {f"{split}_{part}": getattr(getattr(client, split), part) for split in SPLITS for part in "xyw"}
    return {"counts": client.counts, **parts}


def serve(line: int, answers: int, inputs: int, data: int) -> None:
    """Works until the other end of the line is closed."""
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
        kind, *content = cloudpickle.loads(message)
        answer = getattr(state, kind)(*content)
        return None if kind == "step" else bytes(cloudpickle.dumps(("answer", answer)))
    except Exception as error:
        error.add_note("In a worker process:\n" + traceback.format_exc())
        return _as_bytes(error)


def _as_bytes(error: Exception) -> bytes:
    content: bytes
    try:
        content = cloudpickle.dumps(("error", error))
        cloudpickle.loads(content)  # some exceptions can be written but not read
    except Exception:
        content = cloudpickle.dumps(("error", RuntimeError(f"{type(error).__name__}: {error}")))
    return content
