"""How numbers get into a page: two bytes each, only as many rounds as the page can hold, and safe inside a script."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from fedc2i.runs.results import Array

STEPS = 65534  # between the lowest and the highest number; one more stands for nan
MOST_VALUES = 1_200_000  # of λ, and as many of Λ, in a page: 3.2 MB each


def pack(values: Array) -> dict[str, Any]:
    """Numbers as ``low + step * q`` with 16-bit ``q``, base64; nan stays nan."""
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    step = (high - low) / STEPS
    whole = np.round((np.where(np.isfinite(values), values, low) - low) / (step or 1.0))
    coded = np.where(np.isfinite(values), whole, STEPS + 1).astype("<u2")
    return {"shape": list(values.shape), "low": low, "step": step, "data": base64.b64encode(coded.tobytes()).decode()}


def rounds_to_keep(values: Array, views: int, most: int) -> tuple[list[int], bool]:
    """Which rounds of ``(seeds, rounds, ...)`` a page keeps, from 0, and whether it keeps single seeds as well.

    Rounds in which nobody measured anything are skipped. If the others are more than ``most`` values, only the mean
    over seeds is kept, and of it rounds spread evenly from the first to the last; empty if one round is too large.
    """
    measured = np.flatnonzero(np.isfinite(values).any(axis=(0, *range(2, values.ndim))))
    size = int(np.prod(values.shape[2:]))
    if len(measured) * size * views <= most:
        return [int(number) for number in measured], True
    return [int(measured[k]) for k in spread(len(measured), most // size)], False


def spread(count: int, most: int) -> list[int]:
    """Numbers from 0 to ``count`` - 1: all, or ``most`` of them, evenly from the first to the last; of one the last."""
    if most < 2:
        return list(range(count))[count - most :] if most else []
    return [int(k) for k in np.round(np.linspace(0, count - 1, min(most, count)))]


def to_script(value: Any) -> str:
    """JSON that can stand inside a script element whatever the names in it are."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
