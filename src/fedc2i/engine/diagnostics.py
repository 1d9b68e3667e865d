"""What clients say of an exchange, laid out over the whole federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGE = 2**24  # bytes of an array, in a round, that only the last round is worth


class Told(NamedTuple):
    """Diagnostics of clients, stacked, and whose models they had received."""

    report: Mapping[str, Tensor]
    clients: tuple[int, ...]
    received: tuple[int, ...]


def spread(told: Sequence[Told], clients: int, is_last: bool = True) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all clients, nan elsewhere; large ones of the last round only.

    ``(M, M, ...)`` for what a client says of each client it received, ``(M, ...)`` for what it says of itself.
    """
    full = {}
    for name in dict.fromkeys(name for one in told for name in one.report):
        parts = [(one.report[name], one) for one in told if name in one.report]
        of_others = all(values.ndim > 1 and values.shape[1] == len(one.received) for values, one in parts)
        some = parts[0][0]
        shape = (clients, clients, *some.shape[2:]) if of_others else (clients, *some.shape[1:])
        if not is_last and 4 * math.prod(shape) > LARGE:  # Λ of a thousand clients is 40 MB, every round
            continue
        array = np.full(shape, np.nan, dtype=np.float32)
        for values, one in parts:
            where = np.ix_(one.clients, one.received) if of_others else list(one.clients)
            array[where] = values.to(torch.float32).cpu().numpy()
        full[name] = array
    return full
