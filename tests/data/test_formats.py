"""Readers of published formats: round trips on real files, and damaged or hostile ones."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedc2i.core.errors import UserError
from fedc2i.data import formats

fuzzing = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def digits(count: int, side: int, channels: int | None = 3) -> formats.Labelled:
    generator = np.random.default_rng(count)
    shape = (count, side, side) if channels is None else (count, side, side, channels)
    return generator.integers(0, 256, shape, dtype=np.uint8), np.arange(count, dtype=np.int64) % 10


def write_idx(path: Path, array: np.ndarray) -> Path:
    content = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
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


def write_h5(path: Path, **parts: formats.Labelled) -> Path:
    with h5py.File(path, "w") as file:
        for part, (images, labels) in parts.items():
            file[f"{part}/data"] = (images.reshape(len(images), -1) / 255).astype(np.float32)
            file[f"{part}/target"] = labels.astype(np.int32)
    return path


def write_png_folder(folder: Path, images: np.ndarray, labels: np.ndarray) -> tuple[Path, Path]:
    folder.mkdir(parents=True)
    lines = []
    for row, (image, label) in enumerate(zip(images, labels, strict=True)):
        Image.fromarray(image).save(folder / f"{row:08}.png")
        lines.append(f"{row:08}.png {label}\n")
    listing = folder.with_name(f"{folder.name}_labels.txt")
    listing.write_text("".join(lines))
    return folder, listing


def write_npz(path: Path, train: formats.Labelled, test: formats.Labelled, **more: np.ndarray) -> Path:
    np.savez_compressed(path, x_train=train[0], y_train=train[1], x_test=test[0], y_test=test[1], **more)
    return path


def refused(call: Callable[[], object], *words: str) -> None:
    """The call ends in a one-line `UserError` that has all the words."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path: Path, suffix: str) -> None:
    images, labels = digits(30, 28, None)
    got = formats.read_mnist(
        write_idx(tmp_path / f"images{suffix}", images), write_idx(tmp_path / f"labels{suffix}", labels)
    )
    np.testing.assert_array_equal(got[0], images)
    np.testing.assert_array_equal(got[1], labels)
    assert got[1].dtype == np.int64


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_damaged(tmp_path: Path, suffix: str) -> None:
    path = write_idx(tmp_path / f"images{suffix}", digits(30, 28, None)[0])
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    refused(lambda: formats.read_idx(path), path.name, "expected an idx file")
    path.write_bytes(b"")
    refused(lambda: formats.read_idx(path), path.name, "expected an idx file")


@pytest.mark.parametrize("side", [2**32 - 1, 1000])
def test_idx_declares_more_than_the_file_can_hold(tmp_path: Path, side: int) -> None:
    path = tmp_path / "images"
    path.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, side, side, side))
    refused(lambda: formats.read_idx(path), "images", "more than the file can hold")
    packed = tmp_path / "images.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    refused(lambda: formats.read_idx(packed), "images.gz", "more than the file can hold")


def test_idx_trailing_bytes(tmp_path: Path) -> None:
    path = write_idx(tmp_path / "labels", np.arange(5))
    path.write_bytes(path.read_bytes() + b"x")
    refused(lambda: formats.read_idx(path), "more than the 5 bytes")


def test_missing_file_is_named(tmp_path: Path) -> None:
    refused(lambda: formats.read_idx(tmp_path / "absent"), "absent", "no such file")


def test_file_above_the_cap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_idx(tmp_path / "labels", np.arange(50))
    monkeypatch.setattr(formats, "MAX_BYTES", 20)
    refused(lambda: formats.read_idx(path), "58 bytes, allowed are 20")


def test_counts_and_labels_must_fit(tmp_path: Path) -> None:
    images, labels = digits(10, 8, None)
    refused(lambda: formats.labelled(tmp_path, images, labels[:9]), "10 images but 9 labels")
    refused(lambda: formats.labelled(tmp_path, images, labels + 1), "label 10", "0..9")
    refused(lambda: formats.labelled(tmp_path, images, labels - 1), "label -1", "0..9")
    refused(lambda: formats.labelled(tmp_path, images, labels * 1.0), "expected integers")
    refused(lambda: formats.labelled(tmp_path, images * 1.0, labels), "expected uint8")
    refused(lambda: formats.labelled(tmp_path, images[:0], labels[:0]), "no images")


@pytest.mark.parametrize("compress", [True, False])
def test_mat_round_trip(tmp_path: Path, compress: bool) -> None:
    images, labels = digits(25, 32)
    published = np.where(labels == 0, 10, labels)
    got = formats.read_mat(write_mat(tmp_path / "train_32x32.mat", images, published, compress))
    np.testing.assert_array_equal(got[0], images)
    np.testing.assert_array_equal(got[1], labels)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.float64])
def test_mat_agrees_with_scipy(tmp_path: Path, kind: type[np.generic]) -> None:
    path = tmp_path / "train_32x32.mat"
    images, labels = digits(7, 32)
    extra = {"note": "a text", "X": images.transpose(1, 2, 3, 0), "more": np.eye(3), "y": labels.astype(kind)}
    scipy.io.savemat(path, extra, do_compression=True)
    got, want = formats.read_mat(path), scipy.io.loadmat(path)
    np.testing.assert_array_equal(got[0], want["X"].transpose(3, 0, 1, 2))
    np.testing.assert_array_equal(got[1], want["y"].reshape(-1))


def test_mat_with_other_content(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    for content, word in (
        ({"A": np.zeros(3)}, "it holds neither"),
        ({"X": np.zeros((32, 32, 3, 4)), "y": np.zeros((4, 1))}, "images are float64"),
        ({"X": np.zeros((5, 5), dtype=np.uint8), "y": np.zeros((4, 1))}, "it holds X uint8 (5, 5)"),
        ({"X": np.zeros((32, 32, 3, 4), dtype=np.uint8), "y": np.zeros((3, 1))}, "4 images but 3 labels"),
        ({"X": np.zeros((32, 32, 3, 2), dtype=np.uint8), "y": np.array([[1.5], [2]])}, "not whole"),
        ({"X": np.array([{}], dtype=object), "y": np.zeros((3, 1))}, "expected a MATLAB 5 file"),
    ):
        scipy.io.savemat(path, content)
        refused(lambda: formats.read_mat(path), "train_32x32.mat", word)
    path.write_bytes(path.read_bytes()[:-7])
    refused(lambda: formats.read_mat(path), "train_32x32.mat", "expected a MATLAB 5 file")
    path.write_bytes(b"MATLAB 7.3 MAT-file".ljust(200))
    refused(lambda: formats.read_mat(path), "not that of MATLAB 5")


def test_mat_that_does_not_fit_into_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_mat(tmp_path / "train_32x32.mat", *digits(4, 32))
    monkeypatch.setattr(formats.memory, "available", lambda: 1000)
    with pytest.raises(UserError, match=r"train_32x32\.mat, X: the arrays declare 12,288 bytes, but 1,000 bytes"):
        formats.read_mat(path)


def test_mat_damaged_type_code_does_not_crash(tmp_path: Path) -> None:
    path = write_mat(tmp_path / "train_32x32.mat", *digits(2, 32), compress=False)
    content = bytearray(path.read_bytes())
    content[content.rindex(b"y\0\0\0") + 4] = 89  # scipy.io.loadmat ends the interpreter on this file
    path.write_bytes(content)
    refused(lambda: formats.read_mat(path), "train_32x32.mat")


@pytest.mark.parametrize("size", [6144, 50_000_000])
def test_mat_bomb_is_not_unpacked(tmp_path: Path, size: int) -> None:
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
        refused(lambda: formats.read_mat(path), "X is declared as (32, 32, 3, 2) of uint8 but has 50,000,000 bytes")
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()


def test_libsvm_round_trip(tmp_path: Path) -> None:
    images, labels = digits(12, 16, None)
    got = formats.read_usps_libsvm(write_libsvm(tmp_path / "usps.bz2", images, labels))
    assert np.abs(got[0].astype(int) - images).max() <= 1  # six decimals, then cut
    np.testing.assert_array_equal(got[1], labels)


def test_libsvm_extremes_and_sparse_values(tmp_path: Path) -> None:
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(b"10 1:-1 2:1 256:0\n"))
    images, labels = formats.read_usps_libsvm(path)
    assert images.reshape(-1)[[0, 1, 2, 255]].tolist() == [0, 255, 127, 127]
    assert labels.tolist() == [9]


@pytest.mark.parametrize(
    "line", [b"1 257:0", b"1 0:0", b"1 1:2", b"1 1:nan", b"11 1:0", b"x 1:0", b"1 1", b"\n", b"1 " + b"1:0 " * 9000]
)
def test_libsvm_bad_lines(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "usps.bz2"
    path.write_bytes(bz2.compress(line + b"\n"))
    refused(lambda: formats.read_usps_libsvm(path), "usps.bz2")


def test_h5_round_trip(tmp_path: Path) -> None:
    train, test = digits(20, 16, None), digits(10, 16, None)
    path = write_h5(tmp_path / "usps.h5", train=train, test=test)
    for part, (images, labels) in (("train", train), ("test", test)):
        got = formats.read_usps_h5(path, part)
        assert np.abs(got[0].astype(int) - images).max() <= 1
        np.testing.assert_array_equal(got[1], labels)


def test_h5_with_other_content(tmp_path: Path) -> None:
    path = tmp_path / "usps.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("train/data", shape=(10**9, 256), dtype="f4", chunks=(1, 256))
        file["train/target"] = np.zeros(3, dtype=int)
        file["test/data"] = np.full((3, 256), 2.0)
        file["test/target"] = np.zeros(3, dtype=int)
    refused(lambda: formats.read_usps_h5(path, "train"), "usps.h5", "train/data is float32 (1000000000, 256)")
    refused(lambda: formats.read_usps_h5(path, "test"), "outside 0..1")
    for value in (-0.01, np.nan):
        with h5py.File(path, "a") as file:
            file["test/data"][:] = value
        refused(lambda: formats.read_usps_h5(path, "test"), "outside 0..1")
    path.write_bytes(path.read_bytes()[:100])
    refused(lambda: formats.read_usps_h5(path, "train"), "usps.h5", "expected USPS as HDF5")


@pytest.mark.parametrize("how", ["external", "virtual", "link to a file", "soft link"])
def test_h5_numbers_of_another_file_are_not_read(tmp_path: Path, how: str) -> None:
    """All of them are fit to be read: nothing but where they lie is wrong."""
    path, other, raw = tmp_path / "usps.h5", tmp_path / "other.h5", tmp_path / "raw"
    raw.write_bytes(bytes(3 * 256 * 4))
    with h5py.File(other, "w") as file:
        file["data"] = np.zeros((3, 256), dtype="f4")
    with h5py.File(path, "w") as file:
        file["train/target"] = np.zeros(3, dtype=int)
        if how == "external":
            file.create_dataset("train/data", (3, 256), "f4", external=[(str(raw), 0, h5py.h5f.UNLIMITED)])
        elif how == "virtual":
            layout = h5py.VirtualLayout((3, 256), "f4")
            layout[:] = h5py.VirtualSource(str(other), "data", (3, 256))
            file["train"].create_virtual_dataset("data", layout)
        else:
            file["here"] = np.zeros((3, 256), dtype="f4")
            file["train/data"] = (
                h5py.SoftLink("/here") if how == "soft link" else h5py.ExternalLink(str(other), "/data")
            )
    where = "is a link to elsewhere" if "link" in how else "lies in another file"
    refused(lambda: formats.read_usps_h5(path, "train"), "usps.h5", f"train/data {where}")


def test_png_folder_round_trip(tmp_path: Path) -> None:
    images, labels = digits(11, 32)
    got = formats.read_png_folder(*write_png_folder(tmp_path / "mnist_m_train", images, labels))
    np.testing.assert_array_equal(got[0], images)
    np.testing.assert_array_equal(got[1], labels)


@pytest.mark.parametrize(
    "lines", ["", "../../secret.png 3\n", "/etc/passwd 3\n", "00000000.png\n", "00000000.png x\n", "00000000.png 10\n"]
)
def test_png_listing_refused(tmp_path: Path, lines: str) -> None:
    folder, listing = write_png_folder(tmp_path / "mnist_m_train", *digits(2, 32))
    listing.write_text(lines)
    refused(lambda: formats.read_png_folder(folder, listing), "mnist_m_train")


def test_png_of_a_folder_below_is_refused(tmp_path: Path) -> None:
    folder, listing = write_png_folder(tmp_path / "mnist_m_train", *digits(2, 32))
    (folder / "below").mkdir()
    (folder / "00000000.png").rename(folder / "below" / "x.png")
    listing.write_text("below/x.png 3\n")
    refused(lambda: formats.read_png_folder(folder, listing), "name 'below/x.png' with label '3' in line 1")


def test_png_of_another_size_or_cut_off(tmp_path: Path) -> None:
    folder, listing = write_png_folder(tmp_path / "mnist_m_train", *digits(3, 32))
    Image.new("RGB", (5, 5)).save(folder / "00000001.png")
    refused(lambda: formats.read_png_folder(folder, listing), "00000001.png", "5x5")
    (folder / "00000001.png").write_bytes((folder / "00000002.png").read_bytes()[:200])
    refused(lambda: formats.read_png_folder(folder, listing), "00000001.png")


def test_npz_round_trip(tmp_path: Path) -> None:
    train, test = digits(20, 28), digits(10, 28)
    path = write_npz(tmp_path / "a.npz", train, test, classes=np.array(["a", "b"]))
    for got, want in zip(formats.read_npz(path, ["a", "b"]), (train, test), strict=True):
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    refused(lambda: formats.read_npz(path, ["b", "a"]), "a.npz", "its classes are")


def test_npz_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[Path]]:
            return Path.touch, (trap,)

    train, test = digits(10, 8), digits(10, 8)
    path = write_npz(tmp_path / "a.npz", (np.array([Trap()] * 10), train[1]), test)
    refused(lambda: formats.read_npz(path), "a.npz, x_train: an array of Python objects")
    assert not trap.exists()


def test_npz_declares_more_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    header = str({"descr": "|u1", "fortran_order": False, "shape": (10**12, 28, 28)}).encode().ljust(118) + b"\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x_train.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        for name in ("y_train", "x_test", "y_test"):
            archive.writestr(f"{name}.npy", b"")
    refused(lambda: formats.read_npz(path), "a.npz, x_train: the header declares 784,000,000,000,000 bytes")


def test_npz_wrong_or_incomplete(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, x_train=np.zeros(3))
    refused(lambda: formats.read_npz(path), "a.npz", "y_train", "expected an npz with x_train")
    path.write_bytes(b"not a zip")
    refused(lambda: formats.read_npz(path), "a.npz")
    write_npz(path, digits(10, 28), digits(10, 32))
    refused(lambda: formats.read_npz(path), "a.npz", "training images are (28, 28, 3)")


READERS: dict[str, Callable[[Path], object]] = {
    "idx": formats.read_idx,
    "idx.gz": formats.read_idx,
    "mat": formats.read_mat,
    "bz2": formats.read_usps_libsvm,
    "npz": formats.read_npz,
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("sound")
    files = {
        "idx": write_idx(folder / "a.idx", digits(3, 8, None)[0]),
        "idx.gz": write_idx(folder / "a.idx.gz", digits(3, 8, None)[0]),
        "mat": write_mat(folder / "a.mat", *digits(2, 32)),
        "bz2": write_libsvm(folder / "a.bz2", *digits(2, 16, None)),
        "npz": write_npz(folder / "a.npz", digits(3, 8), digits(2, 8)),
    }
    return {kind: path.read_bytes() for kind, path in files.items()}


@fuzzing
@given(kind=st.sampled_from(sorted(READERS)), data=st.data())
def test_damage_never_ends_in_another_exception(
    sound: dict[str, bytes], tmp_path: Path, kind: str, data: st.DataObject
) -> None:
    content = bytearray(sound[kind])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f"damaged.{kind}"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(UserError):
        READERS[kind](path)
