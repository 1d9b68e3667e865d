"""Office-10: the preset on the real data, and folders with and without the images of FedBN's split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedc2i.core.errors import UserError
from fedc2i.data import converted_files, office10
from fedc2i.data.catalog import OFFICE_CLASSES
from fedc2i.data.federation import DataOptions
from support.real_data import SHARED, needs

SIZES = {"amazon": (766, 192), "caltech": (898, 225), "dslr": (125, 32), "webcam": (236, 59)}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDC2I_CACHE", str(tmp_path / "cache"))


@needs("office10")
def test_preset_on_the_real_data() -> None:
    federation = office10.load("", DataOptions(SHARED))
    assert federation.names == ("Amazon", "Caltech", "DSLR", "WebCam")
    assert federation.input.shape == (3, 64, 64)
    assert federation.classes == OFFICE_CLASSES
    assert (federation.preset["model"], federation.preset["rounds"]) == ("lenet5", 40)
    assert federation.notes == ()
    sizes = [(len(client.train), len(client.validation), len(client.test)) for client in federation.clients]
    assert sizes == [(250, 100, 192), (250, 100, 225), (125, 0, 32), (227, 9, 59)]
    assert federation.clients[3].train.y.bincount().tolist() == [23, 17, 25, 21, 22, 24, 25, 24, 22, 24]


@needs("office10")
def test_training_and_validation_do_not_overlap_on_the_real_data() -> None:
    federation = office10.load("amazon", DataOptions(SHARED, image_size=64))
    stored = np.load(SHARED / "office10" / "amazon.npz")
    y = stored["y_train"]
    rank = np.array([(y[:row] == y[row]).sum() for row in range(len(y))])
    for split, rows in (
        (federation.clients[0].train, rank < 25),
        (federation.clients[0].validation, (rank >= 25) & (rank < 35)),
    ):
        np.testing.assert_array_equal(split.x.numpy().transpose(0, 2, 3, 1), stored["x_train"][rows])
        np.testing.assert_array_equal(split.y.numpy(), y[rows])


@pytest.mark.parametrize("domain", SIZES)
def test_split_names_are_disjoint_files_of_the_ten_classes(domain: str) -> None:
    train, test = office10.split_names(domain)
    assert (len(train), len(test)) == SIZES[domain]
    assert len({*train, *test}) == len(train) + len(test)
    assert {name.split("/")[0] for name in train} == set(OFFICE_CLASSES)
    assert all(len(Path(name).parts) == 2 and name.endswith(".jpg") for name in (*train, *test))


@needs("office10")
@pytest.mark.parametrize("domain", SIZES)
def test_split_names_are_those_of_the_real_data(domain: str) -> None:
    stored = np.load(SHARED / "office10" / f"{domain}.npz")
    for part, names in zip(("train", "test"), office10.split_names(domain), strict=True):
        assert stored[f"names_{part}"].tolist() == names


@needs("office10/images/webcam")
def test_the_original_images_give_the_published_arrays(tmp_path: Path) -> None:
    stored = np.load(SHARED / "office10" / "webcam.npz")
    (tmp_path / "webcam").symlink_to(SHARED / "office10" / "images" / "webcam", target_is_directory=True)
    assert office10.load("webcam", DataOptions(tmp_path)).notes == ()
    written = np.load(converted_files.file_of("office10", "webcam"))
    for key in ("x_train", "y_train", "x_test", "y_test"):
        np.testing.assert_array_equal(written[key], stored[key])


def write_folder(folder: Path, per_class: int = 5) -> Path:
    """A domain's folder of small images of unequal sizes, one grey."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(OFFICE_CLASSES):
        (folder / name).mkdir(parents=True)
        for row in range(per_class):
            image = Image.fromarray(generator.integers(0, 256, (10 + label, 12 + row, 3), dtype=np.uint8))
            (image.convert("L") if row == 0 else image).save(folder / name / f"frame_{row:04}.jpg")
    return folder


def test_the_split_names_set_members_and_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "dslr")
    train = [f"{name}/frame_{row:04}.jpg" for row in (3, 0) for name in reversed(OFFICE_CLASSES)]
    monkeypatch.setattr(office10, "split_names", lambda domain: (train, ["mug/frame_0001.jpg"]))
    federation = office10.load("dslr", DataOptions(tmp_path))
    assert federation.clients[0].train.y.tolist() == [*range(9, -1, -1)] * 2
    assert federation.clients[0].test.y.tolist() == [8]
    with Image.open(folder / "mug" / "frame_0001.jpg") as image:
        want = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(federation.clients[0].test.x[0].numpy().transpose(1, 2, 0), want)


def test_a_folder_of_other_images_gets_a_stratified_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "office" / "dslr")
    federation = office10.load("dslr", DataOptions(tmp_path))
    missing = next(name for name in office10.split_names("dslr")[0] if int(name[-8:-4]) > 4)
    (note,) = federation.notes
    assert missing in note
    assert "stratified 80/20" in note
    assert federation.clients[0].train.y.bincount().tolist() == [4] * 10
    assert federation.clients[0].test.y.bincount().tolist() == [1] * 10
    again = office10.load("dslr", DataOptions(tmp_path))
    assert (again.checksums, again.notes) == (federation.checksums, federation.notes)


def test_other_classes_are_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "caltech")
    (folder / "mug").rename(folder / "041.coffee-mug")
    with pytest.raises(UserError, match=r"'041\.coffee-mug' is not known, allowed are back_pack, bike"):
        office10.load("caltech", DataOptions(tmp_path))
    (folder / "041.coffee-mug").rename(tmp_path / "aside")
    with pytest.raises(UserError, match="'mug' is missing"):
        office10.load("caltech", DataOptions(tmp_path))


def test_damaged_image_too_few_and_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = write_folder(tmp_path / "dslr") / "mug" / "frame_0001.jpg"
    image.write_bytes(image.read_bytes()[:300])
    with pytest.raises(UserError, match=r"frame_0001\.jpg: cannot be read as an image"):
        office10.load("dslr", DataOptions(tmp_path))
    write_folder(tmp_path / "webcam", per_class=1)
    with pytest.raises(UserError, match="webcam: cannot be split"):
        office10.load("webcam", DataOptions(tmp_path))
    monkeypatch.setattr(office10, "MAX_IMAGES", 3)
    with pytest.raises(UserError, match="40 images, allowed are 3"):
        office10.load("dslr", DataOptions(tmp_path))


def test_npz_with_classes_in_another_order(tmp_path: Path) -> None:
    x, y = np.zeros((10, 64, 64, 3), dtype=np.uint8), np.arange(10)
    np.savez(tmp_path / "dslr.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=np.array(OFFICE_CLASSES[::-1]))
    with pytest.raises(UserError, match=r"dslr\.npz: .*its classes are"):
        office10.load("dslr", DataOptions(tmp_path))
