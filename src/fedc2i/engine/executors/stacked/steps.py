"""Local training of all clients of all seeds at once: one step, lifted twice with ``torch.func.vmap``.

Everything a step reads or writes lies in tensors that keep their place in memory for the whole run. So on a GPU the
step is captured once as a CUDA graph and replayed: small models are bound by the launches of their many small kernels.
Clients with fewer samples stop early, and the padding of their short batches carries no weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedc2i.core.params import Params, Stacked
from fedc2i.engine.executors.stacked.cuda_graph import capture
from fedc2i.training.local import Batch
from fedc2i.training.settings import TrainingSettings


@dataclass(frozen=True)
class Steps:
    """The batches of a local run: indices ``(T, S, K, B)``, their weights, and how many steps each client takes."""

    index: Tensor
    weight: Tensor
    count: Tensor  # (S, K)

    def shares(self) -> Tensor:
        """``(T, S, K)`` what an iterate counts in the running mean over the second half of its client's steps.

        All up to that half's first, which the mean starts with, then 1/2, 1/3, ... as in `training.train`.
        """
        number = torch.arange(1, len(self.index) + 1)[:, None, None]
        return 1 / (number - self.count // 2).clamp(min=1).to(torch.float64)


def plan_steps(batches: Sequence[Sequence[Sequence[Tensor]]], steps: int, size: int) -> Steps:
    """From every client's batches, ``batches[s][k]`` a list of index tensors, padded to ``steps`` and ``size``."""
    seeds, clients = len(batches), len(batches[0])
    index = torch.zeros(seeds, clients, steps, size, dtype=torch.int64)
    weight = torch.zeros(seeds, clients, steps, size)
    count = torch.tensor([[len(own) for own in seed] for seed in batches])
    for s, seed in enumerate(batches):
        for k, own in enumerate(seed):
            taken = torch.arange(size) < torch.tensor([len(batch) for batch in own])[:, None]
            index[s, k, : len(own)][taken] = torch.cat(list(own))
            weight[s, k, : len(own)] = taken.to(weight.dtype)
    return Steps(index.movedim(2, 0), weight.movedim(2, 0), count)


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
        """What stays the same between calls.

        Args:
            loss: what a step of one client minimises, with the client's slice of the context as third argument.
            trainable: names that are trained.
            data: all clients' training sets padded to one length, ``x`` ``(M, N, 3, H, W)``.
            training: optimiser and its settings.
            context_dims: for each tensor of the context 0 if it has an axis for clients within a seed, else None.
            average: whether results are means over the second half of each client's steps, see `training.train`.
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
        return {name: finished[name] for name in params}

    def _everything(self) -> Stacked:
        return {name: tensor.detach() for name, tensor in (*self._free.items(), *self._fixed.items())}

    def _allocate(self, params: Stacked, clients: Tensor, steps: Steps, context: Any) -> None:
        device = self._data.y.device
        self._free = {name: torch.empty_like(params[name]).requires_grad_() for name in self._trainable}
        self._fixed = {name: torch.empty_like(tensor) for name, tensor in params.items() if name not in self._free}
        self._means = {name: torch.empty_like(params[name]) for name in self._trainable if self._average}
        self._context = tree_map(torch.empty_like, context)
        self._clients = torch.empty_like(clients, device=device)
        self._index = torch.empty_like(steps.index, device=device)
        self._weight = torch.empty_like(steps.weight, device=device)
        self._shares = steps.shares().to(device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._optimiser = self._training.new_optimiser(list(self._free.values()))
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
        self._optimiser.step([None if gradient is None else gradient.contiguous() for gradient in gradients])
        if self._means:
            self._take_into_means()
        self._at.add_(1).clamp_(max=len(self._index) - 1)  # runs before the capture must not go beyond the end

    def _take_into_means(self) -> None:
        share = self._shares.index_select(0, self._at)[0]
        for name, mean in self._means.items():
            now = self._free[name].detach()
            mean.lerp_(now, share.reshape(*share.shape, *[1] * (now.ndim - 2)).to(now.dtype))
