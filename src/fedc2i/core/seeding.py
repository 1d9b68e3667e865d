"""Random numbers without global state: every draw comes from a generator keyed by what it is for.

Keys are ``(seed, client name, round, purpose)``. Since the key, not the order of calls, decides the numbers, a run does
not depend on the order in which clients are processed, nor on which engine or machine processes them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_one_at_a_time = threading.RLock()  # all threads share torch's global generators


def key(seed: int, *parts: str | int) -> int:
    """A 63-bit number that depends on the seed and on every part; stable across machines and Python versions."""
    text = "\x1f".join(str(part) for part in (seed, *parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *parts: str | int) -> torch.Generator:
    """A CPU generator for one purpose, e.g. ``generator(seed, client.name, round, "batches")``."""
    return torch.Generator().manual_seed(key(seed, *parts))


@contextmanager
def isolated(device: torch.device, seed: int, *parts: str | int) -> Iterator[None]:
    """Runs code that can only draw from torch's global generators (dropout, module initialisation) under a keyed seed.

    The global state is restored afterwards, so the caller's own random numbers are not touched.
    """
    with _one_at_a_time, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(key(seed, *parts))
        yield
