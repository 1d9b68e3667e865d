"""A model as a flat mapping of named tensors, and many models as the same mapping with a leading client axis.

``Params`` maps a name such as ``conv1.weight`` to its tensor. ``Stacked`` holds the parameters of K clients: every
tensor has one more leading axis of length K. All functions are pure and keep the order of names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

Params = dict[str, Tensor]
Stacked = dict[str, Tensor]

COUNTS = "class_counts"  # of an upload: as large as the client, so no part of a norm
_ROWS = 16  # models summed at once by `mix`: bounds its memory at _ROWS models


def stack(models: Sequence[Params]) -> Stacked:
    """K models to one mapping of ``(K, ...)`` tensors."""
    return {name: torch.stack([model[name] for model in models]) for name in (models[0] if models else {})}


def row(stacked: Stacked, index: int) -> Params:
    """Model number ``index`` as views into the stack."""
    return {name: tensor[index] for name, tensor in stacked.items()}


def rows(stacked: Stacked, index: Sequence[int]) -> Stacked:
    """The models at ``index``, in that order; the stack itself if these are all of them."""
    count = len(next(iter(stacked.values()), ()))
    if list(index) == list(range(count)):
        return stacked
    where = torch.as_tensor(index, dtype=torch.int64)
    return {name: tensor[where.to(tensor.device)] for name, tensor in stacked.items()}


def replace_rows(stacked: Stacked, index: Sequence[int], new: Stacked) -> Stacked:
    """A copy of ``stacked`` whose models at ``index`` are those of ``new``; ``new`` itself if it replaces all."""
    if list(index) == list(range(len(next(iter(stacked.values()), ())))):
        return {name: new[name].to(tensor.dtype) for name, tensor in stacked.items()}
    result = {}
    for name, tensor in stacked.items():
        where = torch.as_tensor(index, dtype=torch.int64, device=tensor.device)
        result[name] = tensor.index_copy(0, where, new[name].to(tensor.dtype))
    return result


def select(params: Params, keep: Callable[[str], bool] | Iterable[str]) -> Params:
    """The entries whose name is kept."""
    if not callable(keep):
        names = set(keep)
        keep = names.__contains__
    return {name: tensor for name, tensor in params.items() if keep(name)}


def prefixed(prefix: str, params: Params) -> Params:
    """The same tensors with ``prefix`` before every name."""
    return {prefix + name: tensor for name, tensor in params.items()}


def unprefixed(prefix: str, params: Params) -> Params:
    """The entries whose name begins with ``prefix``, without it."""
    return {name[len(prefix) :]: tensor for name, tensor in params.items() if name.startswith(prefix)}


def floating(params: Params) -> Params:
    """The entries that can be averaged, so no integer counters such as BatchNorm's number of batches."""
    return {name: tensor for name, tensor in params.items() if tensor.is_floating_point()}


def uniform(count: int, like: Tensor) -> Tensor:
    """Equal weights ``(count,)`` that sum to one."""
    return torch.full((count,), 1.0 / count, dtype=like.dtype, device=like.device)


def mix_tensor(weights: Tensor, stacked: Tensor) -> Tensor:
    """``Σ_i weights[i] · stacked[i]`` for weights ``(K,)``, or ``(K, C)`` if they differ along the second axis.

    Products are rounded before they are summed, always in the same order. So two calls that give an element the same
    weights give it the same bits, whichever shape the weights came in: FedC²I with γ = 0 is FedAvg, exactly.
    """
    weights = weights.to(stacked.dtype).reshape(*weights.shape, *[1] * (stacked.ndim - weights.ndim))
    total = (weights[:_ROWS] * stacked[:_ROWS]).sum(0)
    for low in range(_ROWS, stacked.shape[0], _ROWS):
        total = total + (weights[low : low + _ROWS] * stacked[low : low + _ROWS]).sum(0)
    return total


def mix(weights: Tensor, stacked: Stacked) -> Params:
    """The weighted mean of K models, weights ``(K,)``; see `mix_tensor`."""
    return {name: mix_tensor(weights, tensor) for name, tensor in stacked.items()}


def finite(stacked: Stacked) -> Tensor:
    """``(K,)`` booleans: which models hold only finite numbers."""
    flags = [
        tensor.reshape(len(tensor), -1).abs().amax(1)
        < torch.inf  # a nan stays in the maximum; much faster than isfinite
        for tensor in stacked.values()
        if tensor.is_floating_point() and tensor.numel()
    ]
    some = next(iter(stacked.values()))
    return torch.stack(flags).all(0) if flags else torch.ones(len(some), dtype=torch.bool, device=some.device)


def norms(stacked: Stacked) -> Tensor:
    """``(K,)`` the L2 norm of each model over its floating entries, without class counts, in double precision."""
    some = next(iter(stacked.values()))
    squares = torch.zeros(len(some), dtype=torch.float64, device=some.device)
    for name, tensor in floating(stacked).items():
        if name != COUNTS and tensor.numel():
            flat = tensor.reshape(len(tensor), -1)
            squares = squares + torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square()
    return squares.sqrt()


def zero_where_not(valid: Tensor, stacked: Stacked) -> Stacked:
    """The stack with every model that is not ``valid`` ``(K,)`` set to zero, so that it drops out of sums."""
    return {
        name: torch.where(valid.reshape(-1, *[1] * (tensor.ndim - 1)), tensor, torch.zeros_like(tensor))
        for name, tensor in stacked.items()
    }


def size_in_bytes(params: Params) -> int:
    """How much memory, or traffic, these tensors are."""
    return sum(tensor.numel() * tensor.element_size() for tensor in params.values())
