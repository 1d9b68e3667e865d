"""Windows of signals from archives, split in time order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.core.errors import UserError
from fedc2i.data.signals import time_split
from fedc2i.data.sources import load


def windows(count: int = 20, seed: int = 0) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(3.0, 2.0, (count, 2, 16)).astype(np.float32)
    return {"x": x, "y": np.arange(count) % 2}


def test_each_class_is_split_in_time_order() -> None:
    train, validation, test = time_split(np.array([0] * 10 + [1] * 20))
    assert train.tolist() == [*range(7), *range(10, 24)]
    assert validation.tolist() == [7, 24, 25]
    assert test.tolist() == [8, 9, *range(26, 30)]


def test_one_file_with_a_client_array(tmp_path: Path) -> None:
    own = windows(40)
    np.savez(tmp_path / "all.npz", **own, client=np.repeat(["b10", "b9"], 20), classes=["still", "moving"])
    federation = load(f"signals:{tmp_path}/all.npz")
    assert federation.names == ("b9", "b10")
    assert federation.classes == ("still", "moving")
    assert federation.input.shape == (2, 16)
    train = federation.clients[0].train
    assert train.x.mean((0, 2)).abs().max() < 1e-5  # each channel by the client's own training windows
    assert np.allclose(train.x.numpy().std((0, 2), ddof=1), 1, atol=1e-3)


def test_a_folder_of_clients_without_scaling(tmp_path: Path) -> None:
    for name in ("ann", "bob"):
        np.savez(tmp_path / f"{name}.npz", **windows())
    federation = load(f"signals:{tmp_path}", scale="none")
    assert federation.names == ("ann", "bob")
    assert np.array_equal(federation.clients[0].train.x[0].numpy(), windows()["x"][0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": np.zeros((20, 5))}, r"shape \(20, 5\), expected is \(N, channels, time\)"),
        ({"x": np.full((20, 2, 16), np.nan)}, "sample 0 holds a number that is missing"),
        ({"y": np.arange(19) % 2}, "client has shape|20 windows but"),
        ({"client": np.array(["a"])}, "one name or number for each"),
    ],
)
def test_bad_arrays_are_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    np.savez(tmp_path / "all.npz", **({**windows(), "client": np.array(["a"] * 20)} | change))
    with pytest.raises(UserError, match=words):
        load(f"signals:{tmp_path}/all.npz")


def test_missing_array_is_named(tmp_path: Path) -> None:
    np.savez(tmp_path / "all.npz", **windows())
    with pytest.raises(UserError, match="no array client; needed are x, y, client"):
        load(f"signals:{tmp_path}/all.npz")
