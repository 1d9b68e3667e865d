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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedc2i.core import seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import Params, Stacked, row, stack
from fedc2i.engine.client import ClientData, LocalClient, RunContext
from fedc2i.engine.executors.base import ClientBatch, LoopedExecutor, OnClient
from fedc2i.engine.executors.own_layers import OwnLayers
from fedc2i.engine.executors.stacked.stepper import capture
from fedc2i.engine.executors.stacked.watched_site import WatchedSite
from fedc2i.engine.records import Scored
from fedc2i.methods.base import Site
from fedc2i.training.local import Batch, Optimiser, like

_MOST_SIZES = 8  # batch sizes with a graph; others, such as the last of very different clients, run without
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
                client, received = _CapturedClient(batch.context, self._data[m], on_device[k], track), download.to(m)
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
    """A client whose local training runs over `CapturedSteps`, in a track."""

    def __init__(self, context: RunContext, data: ClientData, position: Tensor, track: Track) -> None:
        super().__init__(context, data)
        self._position, self._track = position, track

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
                try:
                    params = steps.run(params, tensors, self.data.train, batches)
                except torch.OutOfMemoryError:
                    raise UserError("a single client does not fit into the device's memory; use device=cpu") from None
                self._track.draws |= not torch.equal(before, seeding.state(self._device))
        return params


class _Captured(NamedTuple):
    """A batch's place in memory, and the graph of a step on it; none if the step cannot be captured."""

    batch: Batch
    graph: torch.cuda.CUDAGraph | None


class CapturedSteps:
    """Local training with a fresh optimiser, from any start of the same shapes; see `fedc2i.training.local.train`."""

    def __init__(
        self, context: RunContext, names: Sequence[str], site: dict[str, Any], on_round: Callable[[], None]
    ) -> None:
        self._context, self._names = context, list(names)
        self._more, self._on_round = site["more"], on_round
        self._free: Params = {}
        self._graphs: dict[int, _Captured] = {}
        self._pool: Any = None

    def run(self, params: Params, tensors: Mapping[str, Any], data: Batch, batches: Sequence[Tensor]) -> Params:
        """Takes a step for each of ``batches``; ``params`` are not changed."""
        if not self._free:
            self._allocate(params, tensors)
        for size in dict.fromkeys(map(len, batches)):
            if size not in self._graphs and len(self._graphs) < _MOST_SIZES:
                self._graphs[size] = self._capture(size, data, params, tensors)
        self._fill(params, tensors)
        index = sent(torch.cat(list(batches)), data.y.device)
        means = {name: own.detach().clone() for name, own in self._free.items() if self._context.method.average}
        for number, where in enumerate(torch.split(index, [len(batch) for batch in batches]), 1):
            captured = self._graphs.get(len(where))
            if captured is None or captured.graph is None:
                self._step(data.take(where))
            else:
                for place, given in zip(captured.batch, data, strict=True):
                    torch.index_select(given, 0, where, out=place)
                captured.graph.replay()
            if number > len(batches) // 2:
                for name, mean in means.items():
                    mean.lerp_(self._free[name].detach(), 1 / (number - len(batches) // 2))
        found = [means.get(name, own.detach()) for name, own in self._everything.items()]
        copies = [torch.empty(own.shape, dtype=own.dtype, device=own.device) for own in found]
        copy_all(copies, found)
        return dict(zip(self._everything, copies, strict=True))

    def _allocate(self, params: Params, tensors: Mapping[str, Any]) -> None:
        self._free = {name: self._like(params[name]).requires_grad_() for name in self._names}
        fixed = {name: self._like(own) for name, own in params.items() if name not in self._free}
        self._everything = {name: self._free[name] if name in self._free else fixed[name] for name in params}
        self._tensors = tree_map(torch.empty_like, tensors)
        self._optimiser = Optimiser(self._context.training, list(self._free.values()))

    def _like(self, tensor: Tensor) -> Tensor:
        """Space for a tensor; images and the weights of convolutions with the channels last, which is mostly faster."""
        format = torch.channels_last if tensor.ndim == 4 else torch.contiguous_format
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, memory_format=format)

    def _fill(self, params: Params, tensors: Mapping[str, Any]) -> None:
        mine = [*(own.detach() for own in self._everything.values()), *tree_leaves(self._tensors)]
        copy_all(mine, [*(params[name] for name in self._everything), *tree_leaves(tensors)])
        self._optimiser.reset()

    def _capture(self, size: int, data: Batch, params: Params, tensors: Mapping[str, Any]) -> _Captured:
        self._fill(params, tensors)
        batch = Batch(*(self._like(part[:1].expand(size, *part.shape[1:])) for part in data))
        for place, given in zip(batch, data, strict=True):
            place.copy_(given[torch.arange(size, device=given.device) % len(given)])
        if data.y.device.type != "cuda":
            return _Captured(batch, None)
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        captured = capture(lambda: self._step(batch), self._pool, torch.cuda.current_stream())
        return _Captured(batch, None if captured is None else captured[0])

    def _step(self, batch: Batch) -> None:
        context = self._context
        site = WatchedSite(context.model, **self._tensors, **self._more, on_round=self._on_round)
        leaves = list(self._free.values())
        with torch.enable_grad(), OwnLayers():
            loss = context.loss(self._everything, batch, site, self._names)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        self._optimiser.step([like(own, leaf) for own, leaf in zip(gradients, leaves, strict=True)])


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the CPU on the device; does not wait for what the device computes."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def copy_all(places: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    """Copies many tensors by few launches: one for a type, and one for each tensor with numbers in another order."""
    alike: dict[Any, tuple[list[Tensor], list[Tensor]]] = {}
    for place, own in zip(places, given, strict=True):
        if place.stride() != own.stride():
            place.copy_(own)
        else:
            of_type = alike.setdefault((place.dtype, own.dtype), ([], []))
            of_type[0].append(place)
            of_type[1].append(own)
    for mine, theirs in alike.values():
        torch._foreach_copy_(mine, theirs)
