"""How many clients fit into memory at once on a CPU, where a process that takes too much is killed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fedc2i.core import memory, seeding
from fedc2i.core.errors import UserError
from fedc2i.core.params import size_in_bytes
from fedc2i.engine.executors.stacked.vmap_rules import VmapRules
from fedc2i.models.model import Model

_MEASURED = 2, 4  # samples
_COPIES = 8  # of a client's parameters: the model, its start and end, a gradient, the optimiser's state, an upload
_IN_PASSING = 1.5  # what comes and goes beside what is kept
_SHARE = 0.7  # of the free memory


def clients_that_fit(model: Model, image: Sequence[int], samples: int) -> int:
    """How many clients can take a step together in the memory that is free on this machine.

    Args:
        model: what they train.
        image: ``(3, H, W)``.
        samples: in a batch.

    Raises:
        UserError: if not even one fits.
    """
    needed, free = bytes_of_a_step(model, image, samples), memory.available()
    if needed > free:
        raise UserError(
            f"executor=stacked: a step of one client needs about {needed / 2**30:.1f} GiB of memory, and "
            f"{free / 2**30:.1f} GiB are free; use executor=looped or a smaller batch_size"
        )
    return max(1, int(_SHARE * free / needed))


def bytes_of_a_step(model: Model, image: Sequence[int], samples: int) -> int:
    """About what one client's step holds in memory when clients are stacked: tensors kept for the way back, and models.

    Args:
        model: what is trained.
        image: ``(3, H, W)``.
        samples: in a batch.
    """
    few, more = (_kept(model, image, count) for count in _MEASURED)
    each = (more - few) / (_MEASURED[1] - _MEASURED[0])
    fixed = max(0.0, few - _MEASURED[0] * each)  # e.g. weights in another order
    return int(_COPIES * size_in_bytes(model.init(0, "memory")) + fixed + _IN_PASSING * each * samples)


def _kept(model: Model, image: Sequence[int], samples: int) -> int:
    """Bytes that a forward pass keeps for the way back, beside the parameters."""
    params = model.init(0, "memory")
    for name in model.trainable:
        params[name].requires_grad_()
    kept = dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    images = torch.zeros(samples, *image, dtype=torch.uint8)
    counting = saved_tensors_hooks(keep, lambda tensor: tensor)
    with (
        seeding.isolated(torch.device("cpu"), 0, "memory"),
        torch.enable_grad(),
        counting,
        VmapRules(torch.ones(samples)),
    ):
        logits = model.head(params, model.features(params, images, training=True))
    own = {tensor.untyped_storage().data_ptr() for tensor in params.values()}
    del logits  # held until here, so that no place was counted for two tensors
    return sum(size for place, size in kept.items() if place not in own)
