"""Both benchmarks of the paper as small random files, and the runs of a study on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedc2i.data import digit5, office10
from fedc2i.data.catalog import DOMAINS


def write_benchmarks(folder: Path) -> None:
    """Random images in the layout of both benchmarks; of Office-10 the first two clients have validation data."""
    rng = np.random.default_rng(0)
    for domain in DOMAINS:
        side = 28 if domain.source == "digit5" else 64
        train = 30 if domain.key in ("dslr", "webcam") else 40
        (folder / domain.source).mkdir(parents=True, exist_ok=True)
        arrays = {}
        for part, count in (("train", train), ("test", 20)):
            arrays[f"x_{part}"] = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
            arrays[f"y_{part}"] = np.arange(count) % 10
        np.savez(folder / domain.source / f"{domain.key}.npz", **arrays)


@contextlib.contextmanager
def small_benchmarks(folder: Path) -> Iterator[pytest.MonkeyPatch]:
    """Both benchmarks, small, for a while: 30 training images a client, 16x16 pixels, and the smaller model."""
    write_benchmarks(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDC2I_CACHE", str(folder / "cache"))
        patch.delenv("FEDC2I_DATA", raising=False)
        patch.setattr(digit5, "IMAGE_SIZE", 16)
        patch.setattr(office10, "IMAGE_SIZE", 16)
        patch.setattr(digit5, "TRAIN", 30)
        patch.setattr(digit5, "VALIDATION", 10)
        patch.setattr(digit5, "PRESET", {**digit5.PRESET, "model": "lenet5"})
        patch.setattr(office10, "TRAIN_PER_CLASS", 3)
        patch.setattr(office10, "VALIDATION_PER_CLASS", 1)
        yield patch


def runs_below(out: Path) -> list[str]:
    """Complete runs without their keys, in order."""
    return sorted(path.parent.name.rpartition("-")[0] for path in out.glob("runs/*/summary.json"))
