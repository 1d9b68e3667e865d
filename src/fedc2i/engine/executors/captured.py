"""One client after the other on a GPU, each step of local training a CUDA graph: for models that fill the GPU alone.

Such models gain nothing from stacked clients, which need grouped kernels and padding. Here torch's own kernels run on
batches as they are, and a launch takes microseconds. Graphs are made for the shapes of a batch, not for a client: all
clients of all seeds use them in turn. Nothing between two clients waits for the GPU, so it never idles; and clients
take turns in tracks that run side by side, since a small kernel leaves a part of the GPU free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch, LoopedExecutor, OnClient
from fedc2i.engine.executors.captured_steps import CapturedSteps, sent
from fedc2i.engine.records import Scored
from fedc2i.methods.base import Site

TRACKS = 2  # a third one gained 3 %
_FREE = 0.5  # of the GPU's memory, with the first track's graphs in it, for a further track


class CapturedExecutor(LoopedExecutor):
    """`LoopedExecutor` whose steps are CUDA graphs."""

    def __init__(self, data: Sequence[ClientData], on_client: OnClient | None = None) -> None:
        super().__init__(data, on_client)
        self._device = data[0].counts.device
        self._tracks = [Track(self._device) for _ in range(TRACKS if self._device.type == "cuda" else 1)]

    def close(self) -> None:
        """Releases the CUDA graphs and their memory."""
        for track in self._tracks:
            track.steps.clear()

    def _each(self, batch: ClientBatch) -> Iterator[tuple[LocalClient, Params, Params, int]]:
        download = batch.download
        positions = [download.position(m) for m in batch.clients]
        on_device = sent(torch.tensor(positions), self._device)
        for k, m in enumerate(batch.clients):
            track = self._track(k)
            with track.entered():  # what is made for a client is then freed in the order of its track
                client = _CapturedClient(batch.context, self._data[m], on_device[k], track, self._first_alone)
                received = download.to(m)
            yield client, row(batch.params, k), received, positions[k]

    def _track(self, turn: int) -> Track:
        """Tracks take turns; a new one is used if there is surely memory for it.

        Only the first one is, if a step draws random numbers: all graphs read the generator's state in one place.
        """
        first, track = self._tracks[0], self._tracks[turn % len(self._tracks)]
        if track is first or first.draws or not first.steps:
            return first
        if track.steps:
            return track
        free, total = torch.cuda.mem_get_info(self._device)
        return track if free > _FREE * total else first

    def _first_alone(self) -> Track:
        """The first track, after memory ran out: all graphs are dropped, and the other tracks are not used again.

        Raises:
            UserError: if there is no other track.
        """
        if len(self._tracks) == 1:
            raise UserError("a single client does not fit into the device's memory; use device=cpu")
        for track in self._tracks:
            track.join()
            track.steps.clear()
        del self._tracks[1:]
        gc.collect()
        torch.cuda.empty_cache()
        return self._tracks[0]

    def _stacked(self, models: Sequence[Params]) -> Stacked:
        for track in self._tracks:
            track.join()
        return stack(models)


class Track:
    """A stream of the GPU, and the graphs that are replayed on it; on a CPU just the steps.

    Attributes:
        steps: with their graphs, by phase and shapes.
        draws: whether any of them drew random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: dict[Any, CapturedSteps] = {}
        self.draws = False
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._reads_round: set[int] = set()

    def entered(self) -> AbstractContextManager[Any]:
        """What is launched within follows all that was launched outside before."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self._stream)

    def join(self) -> None:
        """What is launched from now on follows all that is in the track."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def steps_for(
        self, context: RunContext, number: int, names: Sequence[str], params: Params, site: dict[str, Any], round: int
    ) -> CapturedSteps:
        """The steps of a phase for tensors of these shapes; of this round alone, if the loss reads its number."""
        shapes = tuple((tuple(leaf.shape), leaf.dtype) for leaf in tree_leaves((params, site["tensors"])))
        key = (number, tuple(names), shapes, round if number in self._reads_round else 0)
        if key not in self.steps:
            self.steps = {own: steps for own, steps in self.steps.items() if own[0] != number}
            gc.collect()  # graphs hold the memory of a step
            self.steps[key] = CapturedSteps(context, names, site, lambda: self._reads_round.add(number))
        return self.steps[key]


class _CapturedClient(LocalClient):
    """A client whose local training runs over `CapturedSteps`, in a track; if memory runs out, in ``on_full()``."""

    def __init__(
        self, context: RunContext, data: ClientData, position: Tensor, track: Track, on_full: Callable[[], Track]
    ) -> None:
        super().__init__(context, data)
        self._position, self._track, self._on_full = position, track, on_full

    def _site(self, received: Params, position: int | Tensor, round: int) -> Site:
        return super()._site(received, self._position, round)  # on the device already

    def personalise(
        self, own: Params, received: Params, position: int, round: int
    ) -> tuple[Params, Mapping[str, Tensor]]:
        """See `LocalClient.personalise`."""
        self._track.join()
        return super().personalise(own, received, position, round)

    def upload(self, params: Params, start: Params, received: Params, position: int, round: int) -> Params:
        """See `LocalClient.upload`."""
        with self._track.entered():
            return super().upload(params, start, received, position, round)

    def scored(self, params: Params, received: Params, position: int, round: int) -> Scored:
        """See `LocalClient.scored`."""
        self._track.join()
        return super().scored(params, received, position, round)

    def train(self, start: Params, received: Params, position: int, round: int) -> Params:
        """See `LocalClient.train`."""
        try:
            return self._trained(start, received, round)
        except torch.OutOfMemoryError:
            pass  # the error holds tensors of the step, so what follows is outside
        self._track = self._on_full()
        return self.train(start, received, position, round)

    def _trained(self, start: Params, received: Params, round: int) -> Params:
        context, params = self.context, start
        tensors = {"counts": self.data.counts, "position": self._position, "received": received, "start": start}
        for number, (phase, epochs) in enumerate(context.run_phases(context.epochs(self.data, round))):
            names = context.trainable(phase, params)
            batches = [index for epoch in epochs for index in epoch]
            if not names or not batches:
                continue
            more = {"round": round, "rounds": context.rounds, "training": phase.train != "head"}
            site = {"tensors": tensors, "more": more}
            with (
                self._track.entered(),
                seeding.isolated(self._device, context.seed, self.data.name, round, phase.train),
            ):
                steps = self._track.steps_for(context, number, names, params, site, round)
                before = seeding.state(self._device)
                params = steps.run(params, tensors, self.data.train, batches)
                self._track.draws |= not torch.equal(before, seeding.state(self._device))
        return params
