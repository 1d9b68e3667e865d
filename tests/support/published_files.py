"""Made-up digits, and writers of the formats in which the benchmark domains are published."""

from __future__ import annotations

import bz2
import gzip
import struct
from pathlib import Path

import numpy as np
import scipy.io
from PIL import Image

from fedc2i.data.formats import Labelled


def digits(count: int, side: int, channels: int | None = 3) -> Labelled:
    generator = np.random.default_rng(count)
    shape = (count, side, side) if channels is None else (count, side, side, channels)
    return generator.integers(0, 256, shape, dtype=np.uint8), np.arange(count, dtype=np.int64) % 10


def write_idx(path: Path, array: np.ndarray) -> Path:
    content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    return path


def write_mat(path: Path, images: np.ndarray, labels: np.ndarray, compress: bool = True) -> Path:
    content = {"X": images.transpose(1, 2, 3, 0), "y": labels.reshape(-1, 1).astype(np.uint8)}
    scipy.io.savemat(path, content, do_compression=compress)
    return path


def write_libsvm(path: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    rows = images.reshape(len(images), -1) / 255 * 2 - 1
    lines = [
        f"{label + 1} " + " ".join(f"{index + 1}:{value:.6f}" for index, value in enumerate(row))
        for row, label in zip(rows, labels, strict=True)
    ]
    path.write_bytes(bz2.compress("\n".join(lines).encode() + b"\n"))
    return path


def write_usps(folder: Path, train: int, test: int) -> None:
    """USPS as LIBSVM's authors publish it."""
    write_libsvm(folder / "usps.bz2", *digits(train, 16, None))
    write_libsvm(folder / "usps.t.bz2", *digits(test, 16, None))


def write_png_folder(folder: Path, images: np.ndarray, labels: np.ndarray) -> tuple[Path, Path]:
    folder.mkdir(parents=True)
    lines = []
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / f"{row:08}.png")
        lines.append(f"{row:08}.png {label}\n")
    listing = folder.with_name(f"{folder.name}_labels.txt")
    listing.write_text("".join(lines))
    return folder, listing


def write_npz(path: Path, train: Labelled, test: Labelled, **more: np.ndarray) -> Path:
    np.savez_compressed(path, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1], **more)
    return path
