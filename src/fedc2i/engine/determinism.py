"""The switches of torch that make a run repeat bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def repeatable(threads: int) -> Iterator[None]:
    """A fixed number of CPU threads, full single precision and repeatable convolutions: one seed, the same bits."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    conv = cudnn.conv  # type: ignore[attr-defined]
    before = cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision
    before_threads = torch.get_num_threads()
    cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision = True, False, "ieee", "ieee"
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        cudnn.deterministic, cudnn.benchmark, conv.fp32_precision, matmul.fp32_precision = before
        torch.set_num_threads(before_threads)
