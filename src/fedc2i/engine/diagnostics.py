"""What clients measure during an exchange, as arrays over the whole federation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LARGE = 2**24  # bytes; a larger array is reported for the last round only


class Diagnostics(NamedTuple):
    """What some clients measured, stacked by name ``(K, ...)``, and whose models they had received."""

    values: Mapping[str, Tensor]
    clients: tuple[int, ...]
    received: tuple[int, ...]


def over_all_clients(
    measured: Sequence[Diagnostics], clients: int, is_last: bool = True
) -> dict[str, np.ndarray[Any, Any]]:
    """Diagnostics as arrays over all M clients, nan elsewhere.

    ``(M, M, ...)`` for what a client measures of each client it received, ``(M, ...)`` for what it measures of itself.
    """
    full = {}
    for name in dict.fromkeys(name for own in measured for name in own.values):
        parts = [(own.values[name], own) for own in measured if name in own.values]
        of_others = all(values.ndim > 1 and values.shape[1] == len(own.received) for values, own in parts)
        some = parts[0][0]
        shape = (clients, clients, *some.shape[2:]) if of_others else (clients, *some.shape[1:])
        if not is_last and 4 * math.prod(shape) > LARGE:  # Λ of a thousand clients is 40 MB, every round
            continue
        array = np.full(shape, np.nan, dtype=np.float32)
        for values, own in parts:
            where = np.ix_(own.clients, own.received) if of_others else list(own.clients)
            array[where] = values.to(torch.float32).cpu().numpy()
        full[name] = array
    return full
