"""Standardisation against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedc2i.core.errors import UserError
from fedc2i.data.arrays import from_arrays
from fedc2i.data.scaling import Scaling


@given(st.integers(2, 30), st.integers(1, 4), st.sampled_from([(), (3,), (2, 2)]), st.integers(0, 100))
def test_fit_over_parts_equals_numpy_over_all(count: int, features: int, rest: tuple[int, ...], seed: int) -> None:
    x = torch.randn(count, features, *rest, generator=torch.Generator().manual_seed(seed)) * 5 + 2
    found = Scaling.fit([x[:1], x[1:]])
    flat = x.double().movedim(1, -1).reshape(-1, features).numpy()
    np.testing.assert_allclose(found.mean, flat.mean(0), rtol=1e-9)
    np.testing.assert_allclose(found.sd, flat.std(0, ddof=1), rtol=1e-6)


def test_constant_feature_becomes_zero() -> None:
    x = torch.full((5, 1), 1e6)
    assert Scaling.fit([x]).apply(x).tolist() == [[0.0]] * 5


@pytest.mark.parametrize("how", ["client", "federated", "none"])
def test_clients_are_scaled_by_themselves_by_all_or_not(how: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0, 1, (10, 2)), rng.normal(8, 3, (10, 2))
    y = np.arange(10) % 2
    federation = from_arrays({"a": (a, y, a, y), "b": (b, y, b, y)}, scale=how)  # type: ignore[arg-type]
    own = {"client": b, "federated": np.concatenate([a, b])}.get(how)
    wanted = b if own is None else (b - own.mean(0)) / own.std(0, ddof=1)
    np.testing.assert_allclose(federation.clients[1].test.x, wanted, rtol=1e-5, atol=1e-5)


def test_unknown_scale_is_refused() -> None:
    x, y = np.zeros((2, 2)), np.array([0, 1])
    with pytest.raises(UserError, match="allowed are client, federated, none"):
        from_arrays({"a": (x, y, x, y)}, scale="standard")  # type: ignore[arg-type]


def test_a_constant_feature_is_zero_in_new_samples_and_a_large_offset_is_not_constant() -> None:
    train = torch.stack([torch.zeros(5), torch.arange(5.0)], 1).double() + torch.tensor([0.0, 1e8])
    by = Scaling.fit([train])
    found = by.apply(torch.tensor([[250.0, 1e8 + 2]], dtype=torch.float64))
    assert found.tolist() == [[0, 0]]
    assert float(by.sd[1]) == pytest.approx(2.5**0.5)
