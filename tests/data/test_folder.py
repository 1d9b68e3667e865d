"""Folders of images; bad ones are in ``tests/faults/bad_inputs.py``."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedc2i.core.errors import UserError
from fedc2i.data import folder
from fedc2i.data.federation import DataOptions, Federation


def load(root: Path, image_size: int | None = 8) -> Federation:
    return folder.load(str(root), DataOptions(image_size=image_size))


def picture(path: Path, value: int = 0, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, value, value)).save(path)


def divided(root: Path, client: str, counts: dict[str, int]) -> None:
    for label, count in counts.items():
        for number in range(count):
            picture(root / client / label / f"{number}.png", value=number)


def values(federation: Federation) -> dict[tuple[str, str, str], list[int]]:
    """The grey values, which number the files, by client, part and class."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for client in federation.clients:
        for part in ("train", "validation", "test"):
            split = getattr(client, part)
            for x, y in zip(split.x, split.y, strict=True):
                found.setdefault((client.name, part, federation.classes[y]), []).append(int(x[0, 0, 0]))
    return found


def test_divided_layout_is_stratified_and_loses_nothing(tmp_path: Path) -> None:
    divided(tmp_path, "north", {"cat": 20, "dog": 10})
    divided(tmp_path, "south", {"dog": 30})
    federation = load(tmp_path)
    assert federation.names == ("north", "south")
    assert federation.classes == ("cat", "dog")
    found = values(federation)
    assert {key: len(value) for key, value in found.items()} == {
        ("north", "train", "cat"): 14,
        ("north", "validation", "cat"): 2,
        ("north", "test", "cat"): 4,
        ("north", "train", "dog"): 7,
        ("north", "validation", "dog"): 1,
        ("north", "test", "dog"): 2,
        ("south", "train", "dog"): 21,
        ("south", "validation", "dog"): 3,
        ("south", "test", "dog"): 6,
    }
    south = [number for part in ("train", "validation", "test") for number in found["south", part, "dog"]]
    assert sorted(south) == list(range(30))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=5).filter(lambda counts: sum(counts) > 1))
@settings(max_examples=40, deadline=None)
def test_division_of_any_counts(counts: list[int]) -> None:
    files = [(str(label), Path(f"{number}.png")) for label, count in enumerate(counts) for number in range(count)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder, "_class_files", lambda client: files)
        parts = folder._divided(Path("client"))
    assert Counter(itertools.chain(*parts.values())) == Counter(files)
    total = sum(counts)
    assert len(parts["test"]) == max(1, round(0.2 * total))
    assert len(parts["train"]) >= 1
    for label, count in enumerate(counts):
        for part, share in (("train", 0.7), ("validation", 0.1), ("test", 0.2)):
            got = sum(name == str(label) for name, _ in parts[part])
            assert abs(got - share * count) < 2


def test_division_depends_on_names_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    divided(tmp_path / "here", "a", {"x": 12, "y": 9})
    divided(tmp_path / "there", "a", {"x": 12, "y": 9})
    before = load(tmp_path / "here").checksums
    listing = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(listing(self), reverse=True)))
    assert load(tmp_path / "there").checksums == before


def test_given_splits_with_missing_classes_and_no_validation(tmp_path: Path) -> None:
    for name, part, label in [("a", "train", "9"), ("a", "test", "10"), ("b", "train", "10"), ("b", "test", "9")]:
        picture(tmp_path / name / part / label / "1.png")
    picture(tmp_path / "b" / "val" / "9" / "2.png", value=7)
    federation = load(tmp_path)
    assert federation.classes == ("9", "10")
    assert [len(client.validation) for client in federation.clients] == [0, 1]
    assert values(federation)["b", "validation", "9"] == [7]
    assert federation.clients[0].validation.x.shape == (0, 3, 8, 8)


def test_natural_order() -> None:
    names = ["10", "9", "b2", "b10", "01", "1", "a"]
    assert sorted(names, key=folder.natural_key) == ["01", "1", "9", "10", "a", "b2", "b10"]


def test_all_kinds_of_images_and_sizes(tmp_path: Path) -> None:
    place = tmp_path / "a" / "train" / "x"
    picture(tmp_path / "a" / "test" / "x" / "0.png")
    place.mkdir(parents=True)
    grey = np.full((5, 9), 128, np.uint8)
    Image.fromarray(grey).save(place / "0 grey.png")
    Image.fromarray(grey).convert("P").save(place / "1 palette.gif")
    Image.fromarray(grey.astype(np.uint16) * 257).save(place / "2 sixteen.png")
    Image.fromarray(grey.astype(np.uint16) * 257).save(place / "3 sixteen.TIFF")
    Image.new("RGBA", (40, 30), (128, 128, 128, 255)).save(place / "4 opaque.png")
    Image.new("RGBA", (40, 30), (0, 0, 0, 0)).save(place / "5 transparent.png")
    Image.fromarray(grey > 0).save(place / "6 bilevel.png")
    assert load(tmp_path, None).input.shape == (3, 32, 32)
    assert values(load(tmp_path))["a", "train", "x"] == [128, 128, 128, 128, 128, 255, 255]


def test_hidden_files_readme_and_what_windows_leaves_are_ignored(tmp_path: Path) -> None:
    divided(tmp_path, "a", {"x": 5})
    for place in (tmp_path, tmp_path / "a", tmp_path / "a" / "x"):
        (place / ".DS_Store").write_text("")
        (place / "README.md").write_text("")
        (place / "Thumbs.db").write_bytes(b"")
    assert len(load(tmp_path).clients[0].train) == 4


def test_linked_folders_elsewhere_are_followed(tmp_path: Path) -> None:
    divided(tmp_path / "store", "a", {"x": 5})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "store" / "a")
    assert load(tmp_path / "data").names == ("linked",)


def test_a_directory_is_needed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a directory is needed"):
        folder.load("", DataOptions())
    with pytest.raises(UserError, match="not a readable directory"):
        load(tmp_path / "nowhere")
