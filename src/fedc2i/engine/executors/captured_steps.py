"""The steps of a client's local training, each a CUDA graph, for clients that run one after the other on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from fedc2i.core.params import Params
from fedc2i.engine.client import RunContext
from fedc2i.engine.executors.own_layers import OwnLayers
from fedc2i.engine.executors.stacked.stepper import capture
from fedc2i.engine.executors.stacked.watched_site import WatchedSite
from fedc2i.training.local import Batch, Optimiser, like

_MOST_SIZES = 8  # batch sizes with a graph; others, such as the last of very different clients, run without


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
