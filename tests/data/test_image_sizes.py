"""Many arrays are resized in few calls, to the pixels that PIL gives one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedc2i.data import images


def one_by_one(pixels: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    resized = [Image.fromarray(one).resize((size, size), Image.Resampling.BILINEAR) for one in pixels]
    return np.stack([np.asarray(one) for one in resized])


@settings(deadline=None, max_examples=60)
@given(
    count=st.integers(1, 7),
    sides=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    square=st.booleans(),
    channels=st.sampled_from([(), (3,)]),
    size=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_the_pixels_of_pil(
    count: int, sides: tuple[int, int], square: bool, channels: tuple[int, ...], size: int, seed: int
) -> None:
    shape = (sides[0], sides[0]) if square else sides
    pixels = np.random.default_rng(seed).integers(0, 256, (count, *shape, *channels), dtype=np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(images, "AT_ONCE", 3 * shape[0] * shape[1])
        found = images.resize(pixels, size)
    np.testing.assert_array_equal(found, one_by_one(pixels, size))
    assert found.dtype == np.uint8


def test_no_images() -> None:
    assert images.resize(np.zeros((0, 9, 9, 3), dtype=np.uint8), 5).shape == (0, 5, 5, 3)
