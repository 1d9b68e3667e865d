"""The clients of all seeds in chunks that can be stacked and fit into memory, and their results joined again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedc2i.core import memory, seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import size_in_bytes
from fedc2i.data.federation import InputSpec
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from fedc2i.models.model import Model

Result = TypeVar("Result", Trained, Personalised)
Compute = Callable[[list[ClientBatch]], list[Result]]
_MEASURED = 2, 4  # samples
_COPIES = 8  # of a client's parameters: the model, its start and end, a gradient, the optimiser's state, an upload
_IN_PASSING = 1.5  # what comes and goes beside what is kept
_SHARE = 0.7  # of the free memory


def in_chunks(batches: Sequence[ClientBatch], at_once: int, compute: Compute[Result]) -> list[Result]:
    """The results of ``batches`` in their order, at most ``at_once`` clients computed at a time.

    ``compute`` gets batches with equally many clients and downloads of the same shapes.
    """
    pieces: list[list[Result]] = [[] for _ in batches]
    for numbers, chunk in _chunks(batches, at_once):
        for number, result in zip(numbers, compute(chunk), strict=True):
            pieces[number].append(result)
    return [_join(own) for own in pieces]


def _chunks(batches: Sequence[ClientBatch], at_once: int) -> Iterator[tuple[list[int], list[ClientBatch]]]:
    """Batches that can be stacked, with their numbers; whole batches while they fit, else some of the clients."""
    groups: dict[Any, list[int]] = {}
    for number, batch in enumerate(batches):
        tensors = {**batch.download.shared, **batch.download.personal}
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors.items())
        draws = batch.context.seed if batch.context.model.has_dropout else None  # masks must be the seed's own
        groups.setdefault((len(batch.clients), shapes, draws), []).append(number)
    for (clients, _, _), numbers in groups.items():
        count = max(1, at_once // clients)
        for low in range(0, len(numbers), count):
            some = numbers[low : low + count]
            for first in range(0, clients, at_once):
                yield some, [_slice(batches[number], first, min(first + at_once, clients)) for number in some]


def _slice(batch: ClientBatch, low: int, high: int) -> ClientBatch:
    params = {name: tensor[low:high] for name, tensor in batch.params.items()}
    return replace(batch, clients=batch.clients[low:high], params=params)


def _join(pieces: list[Result]) -> Result:
    """The result of a batch that was computed in pieces."""
    if len(pieces) == 1:
        return pieces[0]

    def joined(values: list[Any]) -> Any:
        if isinstance(values[0], list):
            return [own for value in values for own in value]
        return {name: torch.cat([value[name] for value in values]) for name in values[0]}

    parts = {part.name: joined([getattr(own, part.name) for own in pieces]) for part in fields(pieces[0])}
    return type(pieces[0])(**parts)


def clients_that_fit(model: Model, sample: InputSpec, samples: int) -> int:
    """How many clients can take a step of ``samples`` samples together in this machine's free memory.

    On a CPU, a process that takes too much is killed.

    Raises:
        UserError: if not even one fits.
    """
    needed, free = bytes_of_a_step(model, sample, samples), memory.available()
    if needed > free:
        raise UserError(
            f"executor=stacked: a step of one client needs about {needed / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free; use executor=looped or a smaller batch_size"
        )
    return max(1, int(_SHARE * free / needed))


def bytes_of_a_step(model: Model, sample: InputSpec, samples: int) -> int:
    """About what a stacked client's step holds in memory: tensors kept for the backward pass, and models."""
    kept = bytes_kept(model, sample, samples, _IN_PASSING)
    return _COPIES * size_in_bytes(model.init(0, "memory")) + kept


def bytes_kept(model: Model, sample: InputSpec, samples: int, factor: float = 1.0) -> int:
    """About what a step of ``samples`` samples keeps for the backward pass, of each sample ``factor`` times that."""
    few, more = (_kept(model, sample, count) for count in _MEASURED)
    each = (more - few) / (_MEASURED[1] - _MEASURED[0])
    fixed = max(0.0, few - _MEASURED[0] * each)  # e.g. weights in another order
    return int(fixed + factor * each * samples)


def _kept(model: Model, sample: InputSpec, samples: int) -> int:
    """Bytes that a forward pass keeps for the backward pass, beside the parameters."""
    params = model.init(0, "memory")
    for name in model.trainable:
        params[name].requires_grad_()
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    blank = sample.zeros(samples)
    counting = saved_tensors_hooks(keep, lambda tensor: tensor)
    drawing = seeding.isolated(torch.device("cpu"), 0, "memory")
    with drawing, torch.enable_grad(), counting, VmapRules(torch.ones(samples)):
        logits = model.head(params, model.features(params, blank, training=True))
    own = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
    del logits  # held until here, so that no place was counted for two tensors
    return sum(size for place, size in kept.items() if place not in own)
