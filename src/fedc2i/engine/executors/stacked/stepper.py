"""Local training of all clients of all seeds at once: one step, lifted twice with ``torch.func.vmap``.

Everything a step reads or writes lies in tensors that keep their place in memory for the whole run. So on a GPU the
step is captured once as a CUDA graph and replayed: one launch instead of hundreds of small ones, which bound small
models. Clients with fewer samples stop early, and the padding of their short batches carries no weight.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedc2i.core.params import Params, Stacked
from fedc2i.core.settings import TrainingSettings
from fedc2i.engine.executors.stacked.padded_data import Steps
from fedc2i.training.local import Batch, Optimiser, like

_Result = TypeVar("_Result")


def capture(
    work: Callable[[], _Result], pool: Any = None, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, _Result] | None:
    """Runs ``work`` once, then captures it; returns the graph and the tensors that every replay fills.

    Graphs that are never replayed at the same time may share the memory of a ``pool``. Those that are need a ``stream``
    each for their capture, too: cuBLAS has a workspace for each stream.

    None, with a warning, if it cannot be captured because it waits for the GPU.
    """
    aside = stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside), torch.random.fork_rng([torch.cuda.current_device()]):
        work()  # libraries set up what they need; steps draw the same numbers whether or not this went before them
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # a graph of an earlier run that is collected just now would spoil this capture
    try:
        with warnings.catch_warnings(), torch.cuda.graph(graph, pool, stream, "thread_local"):
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # e.g. a method that sends all it has
            result = work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"a step cannot be captured as a CUDA graph and runs without one, which is slower: {reason}", stacklevel=2
        )
        return None
    finally:
        if collects:
            gc.enable()
    return graph, result


class GraphedFunction:
    """A function of nested tensors that always have the same shapes; on a CPU, just the function."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._plain = device.type != "cuda"
        self._inputs: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """The function's result, in new tensors."""
        if self._plain:
            return self._function(*inputs)
        if self._graph is None:
            self._inputs = tree_map(_copy, inputs)
            captured = capture(lambda: self._function(*self._inputs))
            if captured is None:
                self._plain = True
                return self._function(*inputs)
            self._graph, self._outputs = captured
        else:
            for mine, given in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given)
        self._graph.replay()
        return tree_map(_copy, self._outputs)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def _place(tensor: Tensor) -> Tensor:
    """Space for a tensor ``(S, K, ...)``; weights of convolutions have the channels last on a GPU, as they are read."""
    if tensor.ndim != 6 or not tensor.is_cuda:
        return torch.empty_like(tensor)
    seeds, clients, outputs, channels, *kernel = tensor.shape
    return tensor.new_empty(seeds, clients, outputs, *kernel, channels).permute(0, 1, 2, 5, 3, 4)


class Stepper:
    """Trains stacks of one shape, round after round."""

    def __init__(
        self,
        loss: Callable[[Params, Batch, Any], Tensor],
        trainable: Sequence[str],
        data: Batch,
        training: TrainingSettings,
        context_dims: Any,
        average: bool = False,
    ) -> None:
        """What stays the same between calls; ``average`` as in `training.train`.

        Args:
            loss: what a step of one client minimises, with the client's slice of the context as third argument.
            trainable: names that are trained.
            data: all clients' training sets padded to one length, ``x`` ``(M, N, 3, H, W)``.
            training: optimiser and its settings.
            context_dims: for each tensor of the context 0 if it has an axis for clients within a seed, else None.
        """
        self._data = data
        self._trainable = tuple(trainable)
        self._training = training
        self._context_dims = context_dims
        self._loss = loss
        self._average = average
        self._graph: torch.cuda.CUDAGraph | None = None
        self._plain = data.y.device.type != "cuda"
        self._free: Stacked = {}

    def run(self, params: Stacked, clients: Tensor, steps: Steps, context: Any) -> Stacked:
        """One optimiser's worth of steps.

        Args:
            params: the starts, every tensor ``(S, K, ...)``; they are not changed.
            clients: ``(S, K)`` whose data each trains on.
            steps: the batches.
            context: what else the loss needs, a nest of tensors.
        """
        if not self._trainable:
            return params
        if not self._free:
            self._allocate(params, clients, steps, context)
        if self._graph is None and not self._plain:
            self._fill(params, clients, steps, context)
            captured = capture(self._step)
            self._graph, self._plain = (None, True) if captured is None else (captured[0], False)
        self._fill(params, clients, steps, context)
        ends = {  # who is over after how many steps; put on the device now, so that the loop waits for nothing
            end: (steps.count >= end).to(self._at.device) for end in sorted(set(steps.count.flatten().tolist()))
        }
        finished = self._everything()
        for number in range(1, max(ends) + 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
            if number in ends:  # whoever ends here keeps this; further steps would move it on
                finished = {
                    name: torch.where(ends[number].reshape(*clients.shape, *[1] * (now.ndim - 2)), now, finished[name])
                    for name, now in (self._everything() | self._means).items()
                }
        return {name: finished[name].contiguous() for name in params}

    def _everything(self) -> Stacked:
        return {name: tensor.detach() for name, tensor in (*self._free.items(), *self._fixed.items())}

    def _allocate(self, params: Stacked, clients: Tensor, steps: Steps, context: Any) -> None:
        device = self._data.y.device
        self._free = {name: _place(params[name]).requires_grad_() for name in self._trainable}
        self._fixed = {name: _place(tensor) for name, tensor in params.items() if name not in self._free}
        self._means = {name: torch.empty_like(params[name]) for name in self._trainable if self._average}
        self._context = tree_map(torch.empty_like, context)
        self._clients = torch.empty_like(clients, device=device)
        self._index = torch.empty_like(steps.index, device=device)
        self._weight = torch.empty_like(steps.weight, device=device)
        self._shares = steps.shares().to(device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._optimiser = Optimiser(self._training, list(self._free.values()))
        names, of_all = list(params), self._loss  # not self, which would keep itself, and its CUDA graph, alive

        def loss(free: Params, fixed: Params, batch: Batch, context: Any) -> Tensor:
            mine = {name: free[name] if name in free else fixed[name] for name in names}
            return of_all(mine, batch, context)

        one_seed = vmap(loss, in_dims=(0, 0, 0, self._context_dims), randomness="different")
        self._losses = vmap(one_seed, randomness="different")

    def _fill(self, params: Stacked, clients: Tensor, steps: Steps, context: Any) -> None:
        """Puts a run's inputs where the step reads them, and starts the optimiser afresh."""
        for name, tensor in self._everything().items():
            tensor.detach().copy_(params[name])
        for name, mean in self._means.items():
            mean.copy_(params[name])  # finite, if the start is: what an earlier run left may not be
        for mine, given in zip(tree_leaves(self._context), tree_leaves(context), strict=True):
            mine.copy_(given)
        self._clients.copy_(clients)
        self._index.copy_(steps.index)
        self._weight.copy_(steps.weight)
        self._shares.copy_(steps.shares())
        self._at.zero_()
        self._optimiser.reset()

    def _step(self) -> None:
        index, weight = (part.index_select(0, self._at)[0] for part in (self._index, self._weight))
        whose = self._clients[..., None]
        batch = Batch(self._data.x[whose, index], self._data.y[whose, index], weight)
        leaves = list(self._free.values())
        with torch.enable_grad():  # a client's loss depends on its own model only: the sum's gradient is everyone's
            losses = self._losses(self._free, self._fixed, batch, self._context)
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True)
        self._optimiser.step([like(gradient, leaf) for gradient, leaf in zip(gradients, leaves, strict=True)])
        if self._means:
            self._take_into_means()
        self._at.add_(1).clamp_(max=len(self._index) - 1)  # runs before the capture must not go beyond the end

    def _take_into_means(self) -> None:
        share = self._shares.index_select(0, self._at)[0]
        for name, mean in self._means.items():
            now = self._free[name].detach()
            mean.lerp_(now, share.reshape(*share.shape, *[1] * (now.ndim - 2)).to(now.dtype))
