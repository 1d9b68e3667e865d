"""Readers of published formats: round trips on real files; damaged ones are in ``tests/faults/bad_inputs.py``."""

from __future__ import annotations

import bz2
import struct
import tracemalloc
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.data import formats
from support.published_files import digits, write_idx, write_libsvm, write_mat, write_npz, write_png_folder


def assert_same(got: formats.Labelled, want: formats.Labelled) -> None:
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    assert got[1].dtype == np.int64


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx(tmp_path: Path, suffix: str) -> None:
    images, labels = digits(30, 28, None)
    files = write_idx(tmp_path / f"images{suffix}", images), write_idx(tmp_path / f"labels{suffix}", labels)
    assert_same(formats.read_mnist(*files), (images, labels))


def test_a_file_above_the_cap_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_idx(tmp_path / "labels", np.arange(50))
    monkeypatch.setattr(formats, "MAX_BYTES", 20)
    with pytest.raises(UserError, match="58 bytes, allowed are 20"):
        formats.read_idx(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, y: (x, y[:9]), "10 images but 9 labels"),
        (lambda x, y: (x, y + 1), r"label 10 .*0\.\.9"),
        (lambda x, y: (x, y - 1), r"label -1 .*0\.\.9"),
        (lambda x, y: (x, y * 1.0), "expected integers"),
        (lambda x, y: (x * 1.0, y), "expected uint8"),
        (lambda x, y: (x[:0], y[:0]), "no images"),
        (lambda x, y: (x.repeat(65, axis=2), y), "expected uint8"),
    ],
)
def test_images_and_labels_must_belong_together(change: object, words: str) -> None:
    assert callable(change)
    with pytest.raises(UserError, match=words):
        formats.labelled(Path("file"), *change(*digits(10, 8, None)))


@pytest.mark.parametrize("compress", [True, False])
def test_mat_has_ten_for_zero(tmp_path: Path, compress: bool) -> None:
    images, labels = digits(25, 32)
    published = np.where(labels == 0, 10, labels)
    assert_same(formats.read_mat(write_mat(tmp_path / "a.mat", images, published, compress)), (images, labels))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float64])
def test_mat_agrees_with_scipy(tmp_path: Path, kind: type[np.generic]) -> None:
    path = tmp_path / "train_32x32.mat"
    images, labels = digits(7, 32)
    extra = {"note": "a text", "X": images.transpose(1, 2, 3, 0), "more": np.eye(3), "y": labels.astype(kind)}
    scipy.io.savemat(path, extra, do_compression=True)
    want = scipy.io.loadmat(path)
    assert_same(formats.read_mat(path), (want["X"].transpose(3, 0, 1, 2), want["y"].reshape(-1)))


def test_mat_that_does_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mat(tmp_path / "train_32x32.mat", *digits(4, 32))
    monkeypatch.setattr(memory, "available", lambda: 1000)
    with pytest.raises(UserError, match=r"train_32x32\.mat, X: .* 12,288 bytes, but 1,000 bytes"):
        formats.read_mat(path)


@pytest.mark.parametrize("size", [6144, 50_000_000])
def test_a_mat_is_not_unpacked_beyond_its_dimensions(tmp_path: Path, size: int) -> None:
    path = tmp_path / "train_32x32.mat"
    scipy.io.savemat(path, {"y": np.ones((2, 1), dtype=np.uint8)})
    head = struct.pack("<4I", 6, 8, 9, 0) + struct.pack("<6I", 5, 16, 32, 32, 3, 2) + struct.pack("<2H4s", 1, 1, b"X")
    matrix = head + struct.pack("<2I", 2, size) + bytes(50_000_000)  # two images by its dimensions
    element = zlib.compress(struct.pack("<2I", 14, len(matrix)) + matrix)
    path.write_bytes(path.read_bytes() + struct.pack("<2I", 15, len(element)) + element)
    tracemalloc.start()
    if size == 6144:
        assert len(formats.read_mat(path)[0]) == 2
    else:
        with pytest.raises(UserError, match=r"X is declared as .* but has 50,000,000 bytes"):
            formats.read_mat(path)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_usps(tmp_path: Path) -> None:
    images, labels = digits(12, 16, None)
    got = formats.read_usps(write_libsvm(tmp_path / "usps.bz2", images, labels))
    assert np.abs(got[0].astype(int) - images).max() <= 1  # six decimals, then rounded down
    np.testing.assert_array_equal(got[1], labels)


def test_usps_extremes_and_omitted_values(tmp_path: Path) -> None:
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(b"10 1:-1 2:1 256:0\n"))
    images, labels = formats.read_usps(path)
    assert images.reshape(-1)[[0, 1, 2, 255]].tolist() == [0, 255, 127, 127]
    assert labels.tolist() == [9]


def test_png_folder(tmp_path: Path) -> None:
    images, labels = digits(11, 32)
    assert_same(formats.read_png_folder(*write_png_folder(tmp_path / "train", images, labels)), (images, labels))


def test_npz(tmp_path: Path) -> None:
    train, test = digits(20, 28), digits(10, 28)
    path = write_npz(tmp_path / "a.npz", train, test, classes=np.array(["a", "b"]))
    for got, want in zip(formats.read_npz(path, ["a", "b"]), (train, test), strict=True):
        assert_same(got, want)
    with pytest.raises(UserError, match="its classes are"):
        formats.read_npz(path, ["b", "a"])
