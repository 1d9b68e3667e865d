"""Slow, obvious re-implementations to compare the package with."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.testing import assert_close


def assert_same_model(got: Mapping[str, Tensor], want: Mapping[str, Tensor], rtol: float, atol: float = 1e-12) -> None:
    """Two models have the same names and, to this tolerance (0, 0: bit for bit), the same numbers."""
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert_close(
            got[name].double(), tensor.double(), rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )
