"""What tests of our own GPU kernels share; without a GPU they run in Triton's interpreter, if it is on."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
needs_kernels = pytest.mark.skipif(
    not CUDA and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a CUDA device, or TRITON_INTERPRET=1"
)


def noise(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def distance(got: Tensor, want: Tensor) -> float:
    """How far a result is from the one wanted, relative to that."""
    return float(torch.dist(got.double(), want.double()).detach() / want.double().norm().detach())
