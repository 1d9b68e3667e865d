"""One seed, the same bits: random numbers without global state, and torch's flags for the time of a run.

Every draw comes from a generator keyed by what it is for.

Keys are ``(seed, client name, round, purpose)``. Since the key, not the order of calls, decides the numbers, a run does
not depend on the order in which clients are processed, nor on which engine or machine processes them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from fedc2i.core.settings import EngineSettings

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
        number = key(seed, *parts)
        torch.default_generator.manual_seed(number)  # torch.manual_seed formats the stack where CUDA is not in use
        if device.type == "cuda":
            torch.cuda.manual_seed_all(number)
        yield


def state(device: torch.device) -> torch.Tensor:
    """The state of the global generator for a device, which every draw changes."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


class _Flags(NamedTuple):
    """Torch's flags that decide the bits of a result; all threads share them.

    Where torch's older flags contradict the newer ones, it refuses to export or compile any model, so both are set.
    """

    deterministic: bool
    benchmark: bool
    conv: str
    rnn: str
    matmul: str
    matmul_on_cpu: str
    allow_tf32: bool  # older, for convolutions
    products: str  # older, for matrices

    @classmethod
    def read(cls) -> _Flags:
        cudnn, matmul, matmul_on_cpu = _backends()
        conv, product = cudnn.conv.fp32_precision, matmul.fp32_precision
        new = conv, cudnn.rnn.fp32_precision, product, matmul_on_cpu.fp32_precision
        try:
            products = torch.get_float32_matmul_precision()
        except RuntimeError:
            products = "high" if _allows(matmul, product) else "highest"
        return cls(cudnn.deterministic, cudnn.benchmark, *new, _allows(cudnn, conv), products)

    def write(self) -> None:
        cudnn, matmul, matmul_on_cpu = _backends()
        cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32 = self.deterministic, self.benchmark, self.allow_tf32
        torch.set_float32_matmul_precision(self.products)  # the older ones first, since they set the newer as well
        cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = self.conv, self.rnn
        matmul.fp32_precision, matmul_on_cpu.fp32_precision = self.matmul, self.matmul_on_cpu


def _backends() -> tuple[Any, Any, Any]:
    return torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


def _allows(backend: Any, precision: str) -> bool:
    """The older flag; torch refuses to tell one that contradicts the newer, which is then its opposite."""
    try:
        return bool(backend.allow_tf32)
    except RuntimeError:
        return precision != "tf32"


_flags_lock = threading.Lock()
_flags_wanted: dict[object, _Flags] = {}  # by run, in the order of their starts; runs in several threads overlap
_flags_before: list[_Flags] = []  # those of the user, while a run lasts


@contextmanager
def repeatable(settings: EngineSettings) -> Iterator[None]:
    """A fixed number of CPU threads, the precision asked for and repeatable convolutions: one seed, the same bits.

    When the last of several overlapping runs ends, the flags are as they were before the first.
    """
    kind, products = ("ieee", "highest") if settings.precision == "ieee" else ("tf32", "high")
    wanted = _Flags(True, False, kind, kind, kind, "ieee", kind == "tf32", products)
    run, threads = object(), torch.get_num_threads()
    with _flags_lock:
        if not _flags_wanted:
            _flags_before[:] = [_Flags.read()]
        _flags_wanted[run] = wanted
        wanted.write()
    torch.set_num_threads(settings.threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        with _flags_lock:
            del _flags_wanted[run]
            [*_flags_before, *_flags_wanted.values()][-1].write()
