"""Digit-5: the preset on the real data, and conversion of every published format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedShuffleSplit

from fedc2i.core.errors import UserError
from fedc2i.data import benchmark_cut, catalog, converted_files, digit5, images
from fedc2i.data.federation import DataOptions
from support.published_files import digits, write_idx, write_mat, write_npz, write_png_folder, write_usps
from support.real_data import SHARED, needs

# class counts of the first 743 of FedBN's split, as these files hold them
COUNTS = {
    "MNIST": [73, 80, 70, 75, 78, 62, 86, 60, 84, 75],
    "SVHN": [55, 141, 102, 74, 76, 73, 59, 71, 45, 47],
    "USPS": [135, 101, 73, 56, 68, 45, 72, 74, 46, 73],
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@needs("digit5")
def test_preset_on_the_real_data() -> None:
    federation = digit5.load("", DataOptions(SHARED))
    assert federation.name == "digit5"
    assert federation.names == ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")
    assert federation.input.shape == (3, 32, 32)
    assert federation.classes == tuple("0123456789")
    assert (federation.preset["model"], federation.preset["rounds"]) == ("lenet-wide", 20)
    assert federation.averages == {"Avg-4": ("MNIST", "SVHN", "USPS", "MNIST-M")}
    assert federation.notes == (digit5.RECUT_NOTE, digit5.STAND_IN_NOTE, digit5.MEMBERS_NOTE)
    for client in federation.clients:
        assert (len(client.train), len(client.validation)) == (743, 74)
        assert len(client.test) == (1860 if client.name == "USPS" else 2000)
        if client.name != "USPS":
            assert client.test.y.bincount().tolist() == [200] * 10
        if client.name in COUNTS:
            assert client.train.y.bincount().tolist() == COUNTS[client.name]


@needs("digit5")
def test_choice_of_domains_and_size_on_the_real_data() -> None:
    federation = digit5.load("usps,mnist", DataOptions(SHARED, image_size=28))
    assert (federation.name, federation.names, federation.notes) == ("digit5:usps,mnist", ("USPS", "MNIST"), ())
    stored = np.load(SHARED / "digit5" / "mnist.npz")
    train, validation = federation.clients[1].train, federation.clients[1].validation
    np.testing.assert_array_equal(train.x.numpy().transpose(0, 2, 3, 1), stored["x_train"][:743])
    np.testing.assert_array_equal(validation.y.numpy(), stored["y_train"][743:817])
    y = stored["y_test"]
    first = [row for row in range(len(y)) if (y[:row] == y[row]).sum() < 200]
    np.testing.assert_array_equal(federation.clients[1].test.y.numpy(), y[first])


def write_published(folder: Path, key: str) -> None:
    """1200 + 150 images in the format of ``key``."""
    folder.mkdir(parents=True, exist_ok=True)
    side, channels = {"mnist": (28, None), "usps": (16, None)}.get(key, (32, 3))
    train, test = digits(1200, side, channels), digits(150, side, channels)
    if key == "mnist":
        for part, (x, y) in (("train", train), ("t10k", test)):
            write_idx(folder / f"{part}-images-idx3-ubyte.gz", x)
            write_idx(folder / f"{part}-labels-idx1-ubyte.gz", y)
    elif key == "usps":
        write_usps(folder, 1200, 150)
    elif key == "mnistm":
        write_png_folder(folder / "mnist_m_train", *train)
        write_png_folder(folder / "mnist_m_test", *test)
    else:
        prefix = "synth_" if key == "synth" else ""
        write_mat(folder / f"{prefix}train_32x32.mat", *train)
        write_mat(folder / f"{prefix}test_32x32.mat", *test)


FOLDERS = {"mnist": "MNIST/raw", "svhn": "svhn", "usps": "digit5/usps", "synth": "SynthDigits", "mnistm": "a/b/mnist_m"}


def test_every_published_format_is_found_and_converted_once(tmp_path: Path, own_cache: Path) -> None:
    data = tmp_path / "data"
    for key, folder in FOLDERS.items():
        write_published(data / folder, key)
    assert {entry.state for entry in catalog.locate(catalog.select("digit5"), data)} == {"raw"}
    first = digit5.load("", DataOptions(data))
    assert first.names == ("MNIST", "SVHN", "USPS", "SynthDigits", "MNIST-M")
    assert first.notes == (digit5.MEMBERS_NOTE,), "neither a stand-in nor a re-cut"
    assert sorted(path.name for path in own_cache.rglob("*.npz")) == sorted(f"{key}.npz" for key in FOLDERS)
    (tmp_path / "empty").mkdir()
    again = digit5.load("", DataOptions(tmp_path / "empty"))
    assert again.checksums == first.checksums
    assert again.notes == first.notes


def test_conversion_is_fedbn_s_cut(tmp_path: Path) -> None:
    write_published(tmp_path / "svhn", "svhn")
    digit5.load("svhn", DataOptions(tmp_path))
    stored = np.load(converted_files.file_of("digit5", "svhn"))
    x = np.concatenate([digits(count, 32)[0] for count in (1200, 150)])
    y = np.concatenate([digits(count, 32)[1] for count in (1200, 150)])
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    train, test = next(splitter.split(x, y))
    for part, rows in (("train", train), ("test", test)):
        np.testing.assert_array_equal(stored[f"x_{part}"], images.resize(x[rows], 28))
        np.testing.assert_array_equal(stored[f"y_{part}"], y[rows])


def test_numbers_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(digit5, "KEPT_TRAIN", 900)
    monkeypatch.setattr(digit5, "KEPT_TEST", 50)
    for key, kept in (("mnist", 270), ("usps", 270), ("svhn", 50)):
        write_published(tmp_path / key, key)
        digit5.load(key, DataOptions(tmp_path))
        stored = np.load(converted_files.file_of("digit5", key))
        assert (len(stored["y_train"]), len(stored["y_test"])) == (900, kept)


def test_mnistm_as_npz(tmp_path: Path) -> None:
    write_npz(tmp_path / "mnist_m.npz", digits(1200, 28), digits(150, 28))
    assert digit5.load("mnistm", DataOptions(tmp_path)).names == ("MNIST-M",)


def test_files_of_fashion_mnist_are_not_taken_for_mnist(tmp_path: Path) -> None:
    write_published(tmp_path / "FashionMNIST" / "raw", "mnist")
    with pytest.raises(UserError, match="no data for MNIST"):
        digit5.load("mnist", DataOptions(tmp_path))


def test_npz_comes_first_and_a_synth_npz_is_a_stand_in(tmp_path: Path) -> None:
    write_published(tmp_path / "SynthDigits", "synth")
    write_npz(tmp_path / "synth.npz", digits(900, 28), digits(2500, 28))
    federation = digit5.load("synth", DataOptions(tmp_path))
    assert federation.notes == (digit5.STAND_IN_NOTE,)
    assert federation.clients[0].test.y.bincount().tolist() == [200] * 10


def test_a_test_list_with_too_few_of_a_class_is_used_whole(tmp_path: Path) -> None:
    write_npz(tmp_path / "usps.npz", digits(900, 28), digits(1860, 28))
    federation = digit5.load("usps", DataOptions(tmp_path))
    assert len(federation.clients[0].test) == 1860


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_npz(tmp_path / "usps.npz", digits(900, 28), digits(100, 28))
    with pytest.raises(UserError, match=r"no data for MNIST, SVHN, SynthDigits, MNIST-M in .*`fedc2i data ls`"):
        digit5.load("", DataOptions(tmp_path))
    with pytest.raises(UserError, match="absent: no such folder"):
        digit5.load("", DataOptions(tmp_path / "absent"))
    monkeypatch.setenv("FEDC2I_DATA", str(tmp_path))
    assert digit5.load("usps", DataOptions()).names == ("USPS",)
    monkeypatch.delenv("FEDC2I_DATA")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no data for USPS in 'data'"):
        digit5.load("usps", DataOptions())


def test_too_few_training_images(tmp_path: Path) -> None:
    write_npz(tmp_path / "usps.npz", digits(800, 28), digits(100, 28))
    with pytest.raises(UserError, match="USPS has 800 training images, the benchmark takes 817"):
        digit5.load("usps", DataOptions(tmp_path))
    write_usps(tmp_path, 10, 5)
    (tmp_path / "usps.npz").unlink()
    with pytest.raises(UserError, match=r"usps\.bz2: cannot be split"):
        digit5.load("usps", DataOptions(tmp_path))


@pytest.mark.parametrize("argument", ["mnist,mnist", "cifar", "mnist,", ",", "MNIST"])
def test_bad_choice_of_domains(tmp_path: Path, argument: str) -> None:
    with pytest.raises(UserError, match="allowed are mnist, svhn, usps, synth, mnistm, each once"):
        digit5.load(argument, DataOptions(tmp_path))


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(1, 5), st.integers(0, 5))
def test_first_per_class(labels: list[int], count: int, skip: int) -> None:
    rows = benchmark_cut.first_per_class(np.array(labels), count, skip).tolist()
    want = [row for row, label in enumerate(labels) if skip <= labels[:row].count(label) < skip + count]
    assert rows == want
