"""Influence weights of several seeds as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedc2i.runs.results import Array


def mean_weights(stack: Sequence[Array] | Array, helpers: int) -> Array:
    """Of λ or Λ over the first axis, so that rows still sum to one; nan where nothing was measured.

    With partial participation a client receives other models in each seed. Where it measured anything, one that it did
    not receive has no weight; where it measured nothing, that seed does not count.

    Args:
        stack: ``(S, ..., M, M)`` of λ, ``(S, ..., M, M, C)`` of Λ.
        helpers: the axis of the clients that help.
    """
    values = np.asarray(stack, dtype=np.float64)
    there = np.isfinite(values)
    count = there.any(axis=helpers, keepdims=True).sum(0)
    total: Array = np.where(there, values, 0.0).sum(0)
    return np.where(there.any(0), total / np.maximum(count, 1), np.nan)
