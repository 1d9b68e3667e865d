"""Office-10: the preset on the real data, folders with and without split lists, and hostile lists."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedc2i.core.errors import UserError
from fedc2i.data import converted, office10
from fedc2i.data.catalog import OFFICE_CLASSES

SHARED = Path(os.environ.get("FEDC2I_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
real_data = pytest.mark.skipif(not (SHARED / "office10").is_dir(), reason="the benchmark's data is not on this machine")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))


@real_data
def test_preset_on_the_real_data() -> None:
    federation = office10.load("", data_dir=SHARED, image_size=None)
    assert federation.names == ("Amazon", "Caltech", "DSLR", "WebCam")
    assert federation.image_shape == (3, 64, 64)
    assert federation.classes == OFFICE_CLASSES
    assert (federation.preset["model"], federation.preset["rounds"]) == ("lenet5", 40)
    assert federation.notes == ()
    sizes = [(len(client.train), len(client.validation), len(client.test)) for client in federation.clients]
    assert sizes == [(250, 100, 192), (250, 100, 225), (125, 0, 32), (227, 9, 59)]
    assert federation.clients[3].train.y.bincount().tolist() == [23, 17, 25, 21, 22, 24, 25, 24, 22, 24]


@real_data
def test_training_and_validation_do_not_overlap_on_the_real_data() -> None:
    federation = office10.load("amazon", data_dir=SHARED, image_size=64)
    stored = np.load(SHARED / "office10" / "amazon.npz")
    y = stored["y_train"]
    rank = np.array([(y[:row] == y[row]).sum() for row in range(len(y))])
    for split, rows in (
        (federation.clients[0].train, rank < 25),
        (federation.clients[0].validation, (rank >= 25) & (rank < 35)),
    ):
        np.testing.assert_array_equal(split.x.numpy().transpose(0, 2, 3, 1), stored["x_train"][rows])
        np.testing.assert_array_equal(split.y.numpy(), y[rows])


@pytest.mark.skipif(not (SHARED / "office10" / "images" / "webcam").is_dir(), reason="no original images here")
def test_originals_with_lists_give_the_published_arrays(tmp_path: Path) -> None:
    stored = np.load(SHARED / "office10" / "webcam.npz")
    (tmp_path / "webcam").symlink_to(SHARED / "office10" / "images" / "webcam", target_is_directory=True)
    for part in ("train", "test"):
        names = [str(name) for name in stored[f"names_{part}"]]
        content = (
            [f"../data/office_caltech_10/webcam/{name}" for name in names],
            [name.split("/")[0] for name in names],
        )
        (tmp_path / f"webcam_{part}.pkl").write_bytes(pickle.dumps(content))
    federation = office10.load("webcam", data_dir=tmp_path, image_size=None)
    assert federation.notes == ()
    stored_file = np.load(converted.file_of("office10", "webcam"))
    for key in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(stored_file[key], stored[key])


def write_folder(folder: Path, per_class: int = 5) -> Path:
    """A domain's folder of small images of unequal sizes, one grey."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(OFFICE_CLASSES):
        (folder / name).mkdir(parents=True)
        for row in range(per_class):
            image = Image.fromarray(generator.integers(0, 256, (10 + label, 12 + row, 3), dtype=np.uint8))
            (image.convert("L") if row == 0 else image).save(folder / name / f"frame_{row:04}.jpg")
    return folder


def write_lists(folder: Path, train: list[str], test: list[str], labels: list[str | int] | None = None) -> None:
    for part, entries in (("train", train), ("test", test)):
        content = (entries, labels or [entry.split("/")[-2] for entry in entries])
        folder.with_name(f"{folder.name}_{part}.pkl").write_bytes(pickle.dumps(content))


def test_folder_without_lists(tmp_path: Path) -> None:
    write_folder(tmp_path / "office" / "dslr")
    federation = office10.load("dslr", data_dir=tmp_path, image_size=None)
    assert federation.notes == ("DSLR has no split lists, so its split is a stratified 80/20 one, not FedBN's.",)
    assert federation.clients[0].train.y.bincount().tolist() == [4] * 10
    assert federation.clients[0].test.y.bincount().tolist() == [1] * 10
    again = office10.load("dslr", data_dir=tmp_path, image_size=None)
    assert again.checksums == federation.checksums
    assert again.notes == federation.notes


def test_split_lists_set_members_and_order(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dslr")
    train = [f"../data/dslr/{name}/frame_{row:04}.jpg" for row in (3, 0) for name in reversed(OFFICE_CLASSES)]
    write_lists(folder, train, ["/elsewhere/dslr/mug/frame_0001.jpg"])
    federation = office10.load("dslr", data_dir=tmp_path, image_size=None)
    assert federation.clients[0].train.y.tolist() == [*range(9, -1, -1)] * 2
    assert federation.clients[0].test.y.tolist() == [8]
    with Image.open(folder / "mug" / "frame_0001.jpg") as image:
        want = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(federation.clients[0].test.x[0].numpy().transpose(1, 2, 0), want)


def test_numbers_as_labels(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dslr")
    write_lists(folder, ["mug/frame_0000.jpg"], ["mug/frame_0001.jpg"], [8])
    assert office10.load("dslr", data_dir=tmp_path, image_size=16).clients[0].train.y.tolist() == [8]


@pytest.mark.parametrize(
    ("entry", "label", "message"),
    [
        ("../../mug/../secret.jpg", "mug", "does not end in"),
        ("..", "mug", "does not end in"),
        ("dslr/secret/secret.jpg", "secret", "class 'secret' labelled 'secret', allowed are back_pack"),
        ("mug/frame_0000.jpg", "bike", "class 'mug' labelled 'bike'"),
        ("mug/frame_0000.jpg", 3, "class 'mug' labelled '3'"),
        ("mug/absent.jpg", "mug", "is not a file inside"),
        ("mug/link.jpg", "mug", "is not a file inside"),
    ],
)
def test_lists_that_lead_elsewhere(tmp_path: Path, entry: str, label: str | int, message: str) -> None:
    folder = write_folder(tmp_path / "data" / "dslr")
    secret = tmp_path / "secret.jpg"
    Image.new("RGB", (9, 9)).save(secret)
    (folder / "mug" / "link.jpg").symlink_to(secret)
    write_lists(folder, [entry], ["mug/frame_0001.jpg"], [label])
    with pytest.raises(UserError, match=message):
        office10.load("dslr", data_dir=tmp_path / "data", image_size=None)


def test_half_a_pair_of_lists_and_empty_lists(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dslr")
    write_lists(folder, [], [])
    with pytest.raises(UserError, match=r"dslr_train\.pkl: the list is empty"):
        office10.load("dslr", data_dir=tmp_path, image_size=None)
    (tmp_path / "dslr_test.pkl").unlink()
    with pytest.raises(UserError, match=r"dslr_train\.pkl: the other of"):
        office10.load("dslr", data_dir=tmp_path, image_size=None)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "caltech")
    (folder / "mug").rename(folder / "041.coffee-mug")
    with pytest.raises(UserError, match=r"class folder '041\.coffee-mug' is not known, allowed are back_pack, bike"):
        office10.load("caltech", data_dir=tmp_path, image_size=None)
    (folder / "041.coffee-mug").rename(tmp_path / "aside")
    with pytest.raises(UserError, match="class folder 'mug' is missing"):
        office10.load("caltech", data_dir=tmp_path, image_size=None)


def test_damaged_image_and_too_few_images(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "dslr")
    image = folder / "mug" / "frame_0001.jpg"
    image.write_bytes(image.read_bytes()[:300])
    with pytest.raises(UserError, match=r"frame_0001\.jpg: cannot be read as an image"):
        office10.load("dslr", data_dir=tmp_path, image_size=None)
    write_folder(tmp_path / "webcam", per_class=1)
    with pytest.raises(UserError, match="webcam: cannot be split"):
        office10.load("webcam", data_dir=tmp_path, image_size=None)


def test_too_many_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(tmp_path / "dslr")
    monkeypatch.setattr(office10, "_MAX_IMAGES", 3)
    with pytest.raises(UserError, match="40 images, allowed are 3"):
        office10.load("dslr", data_dir=tmp_path, image_size=None)


def test_npz_with_classes_in_another_order(tmp_path: Path) -> None:
    x, y = np.zeros((10, 64, 64, 3), dtype=np.uint8), np.arange(10)
    np.savez(tmp_path / "dslr.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(OFFICE_CLASSES[::-1]))
    with pytest.raises(UserError, match=r"dslr\.npz: .*its classes are"):
        office10.load("dslr", data_dir=tmp_path, image_size=None)
