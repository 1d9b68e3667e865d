"""Arrays in memory and in npz files; bad files are in ``tests/faults/bad_inputs.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.data import arrays, npz
from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import DataOptions, Federation

Arrays = dict[str, Any]


def some(count: int = 6, shape: tuple[int, ...] = (8, 9), classes: int = 3) -> Arrays:
    rng = np.random.default_rng(count)
    return {
        "x_train": rng.integers(0, 256, (count, *shape), np.uint8),
        "y_train": np.arange(count) % classes,
        "x_test": rng.integers(0, 256, (3, *shape), np.uint8),
        "y_test": np.arange(3) % classes,
    }


def write(root: Path, name: str, content: Arrays) -> Path:
    root.mkdir(exist_ok=True)
    np.savez_compressed(root / f"{name}.npz", **content)
    return root


def load(root: Path, image_size: int | None = None) -> Federation:
    return arrays.load(str(root), DataOptions(image_size=image_size))


def test_round_trip_with_unequal_sizes_and_missing_classes(tmp_path: Path) -> None:
    first, second = some(6), some(11, classes=2)
    second |= {"x_validation": second["x_test"], "y_validation": second["y_test"].astype(np.uint8)}
    write(tmp_path, "site 10", second)
    write(tmp_path, "site 9", first)
    federation = load(tmp_path)
    assert federation.names == ("site 9", "site 10")
    assert federation.classes == ("0", "1", "2")
    assert federation.input.shape == (3, 8, 9)
    assert [len(client.train) for client in federation.clients] == [6, 11]
    assert [len(client.validation) for client in federation.clients] == [0, 3]
    for channel in range(3):
        assert np.array_equal(federation.clients[0].train.x[:, channel], first["x_train"])
    assert federation.checksums == load(tmp_path).checksums


def test_every_layout_gives_the_same_images() -> None:
    colour = some(shape=(8, 9, 3))
    grey = some(shape=(8, 9))
    want = {3: torch.from_numpy(colour["x_train"]).permute(0, 3, 1, 2)}
    want[1] = torch.from_numpy(grey["x_train"])[:, None].repeat(1, 3, 1, 1)
    for given_arrays, channels, axis in ((colour, 3, -1), (colour, 3, 1), (grey, 1, -1), (grey, 1, 1), (grey, 1, None)):
        changed = dict(given_arrays)
        for key in ("x_train", "x_test"):
            if axis is not None and channels == 1:
                changed[key] = np.expand_dims(changed[key], axis)
            elif axis == 1:
                changed[key] = np.moveaxis(changed[key], -1, 1)
        federation = from_arrays({"a": changed})
        assert torch.equal(federation.clients[0].train.x, want[channels])
        assert federation.clients[0].validation.x.shape == (0, 3, 8, 9)


@pytest.mark.parametrize("shape", [(6, 3, 32, 3), (6, 28, 28, 4), (6, 784, 1), (6, 1, 784), (6, 28, 3), (6,)])
def test_doubtful_shapes_are_refused(shape: tuple[int, ...]) -> None:
    content = some() | {"x_train": np.zeros(shape, np.uint8)}
    with pytest.raises(UserError, match=r"x_train: shape .* allowed are .*\(N, H, W\)"):
        from_arrays({"a": content})


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4), st.booleans(), st.integers(1, 5))
@settings(max_examples=25)
def test_from_arrays_keeps_every_pixel_and_label(sizes: list[int], channels_first: bool, classes: int) -> None:
    content = {f"client {n}": some(size, (8, 8, 3), classes) for n, size in enumerate(sizes)}
    passed = {
        name: {k: np.moveaxis(v, -1, 1) if channels_first and k[0] == "x" else v for k, v in client.items()}
        for name, client in content.items()
    }
    federation = from_arrays(passed)
    for client, given_arrays in zip(federation.clients, content.values(), strict=True):
        assert np.array_equal(client.train.x.permute(0, 2, 3, 1), given_arrays["x_train"])
        assert np.array_equal(client.test.y, given_arrays["y_test"])


def test_from_arrays_copies_and_takes_tuples() -> None:
    content = some(shape=(3, 8, 8))
    federation = from_arrays({"hospital A": tuple(content.values())}, classes=["a", "b", "c"])
    before = federation.checksums
    for array in content.values():
        array[:] = 0
    assert federation.checksums == before
    assert federation.classes == ("a", "b", "c")
    with pytest.raises(UserError, match="3 arrays, expected are x_train, y_train, x_test, y_test"):
        from_arrays({"a": tuple(content.values())[:3]})
    with pytest.raises(UserError, match="no clients"):
        from_arrays({})


def test_image_size_brings_unequal_clients_together(tmp_path: Path) -> None:
    write(tmp_path, "a", some(shape=(8, 9)))
    write(tmp_path, "b", some(shape=(12, 12, 3)))
    write(tmp_path, "c", some(shape=(1, 30, 30)))
    with pytest.raises(UserError, match="'b', train: images 12x12, but the first client has images 8x9"):
        load(tmp_path)
    assert load(tmp_path, image_size=16).input.shape == (3, 16, 16)


def test_one_file_may_name_the_classes_of_all(tmp_path: Path) -> None:
    write(tmp_path, "a", some() | {"classes": np.array(["cat", "dog", "cow"])})
    write(tmp_path, "b", some())
    assert load(tmp_path).classes == ("cat", "dog", "cow")


def test_zip_bomb_and_sheer_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", some() | {"x_train": np.zeros((6000, 8, 9), np.uint8), "y_train": np.zeros(6000, int)})
    assert len(load(tmp_path).clients[0].train) == 6000
    monkeypatch.setattr(npz, "RATIO_FREE_BYTES", 1000)
    with pytest.raises(UserError, match="x_train: unpacks to more than 200 times its size"):
        load(tmp_path)
    monkeypatch.setattr(npz, "RATIO_FREE_BYTES", 2**20)
    monkeypatch.setattr(memory, "available", lambda: 900_000)  # less than twice of it
    with pytest.raises(UserError, match=r"the arrays declare 4\d\d,\d\d\d bytes, but 900,000 bytes of memory are free"):
        load(tmp_path)


def test_a_directory_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a directory is needed"):
        arrays.load("", DataOptions())
    with pytest.raises(UserError, match="not a readable directory"):
        load(tmp_path / "nowhere")
