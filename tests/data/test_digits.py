from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from fedc2i.core.errors import UserError
from fedc2i.data import digits
from fedc2i.data.federation import DataOptions, Federation

NAMES = ("Scans", "Photos", "Ink", "Fonts", "Signs")


def load(argument: str = "", image_size: int | None = None) -> Federation:
    return digits.load(argument, DataOptions(image_size=image_size))


def test_shape_and_sizes() -> None:
    federation = load()
    assert federation.names == NAMES
    assert federation.classes == tuple("0123456789")
    assert federation.input.shape == (3, 28, 28)
    assert federation.preset == {"model": "lenet5", "rounds": 20}
    for client in federation.clients:
        assert (len(client.train), len(client.validation)) == (300, 50)
        assert len(client.test) in (240, 249)
        for split, least in ((client.train, 28), (client.validation, 4), (client.test, 23)):
            assert np.bincount(split.y, minlength=10).min() >= least


def test_same_bytes_in_another_process_and_whatever_the_global_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {"train": 20, "validation": 10, "test": 10}
    code = "from fedc2i.data import digits; from fedc2i.data.federation import DataOptions; "
    code += f"digits.SCANNED = {few}; digits.RENDERED = {few}; print(digits.load('', DataOptions()).checksums)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    torch.manual_seed(5)
    for name in ("SCANNED", "RENDERED"):
        monkeypatch.setattr(digits, name, dict(few))
    monkeypatch.setattr(digits, "_build", digits._build.__wrapped__)  # the cache stays
    assert other.strip() == str(load().checksums)


def test_changing_a_result_does_not_change_the_next_call() -> None:
    before = load().checksums
    spoiled = load()
    for client in spoiled.clients:
        client.train.x.zero_()
        client.train.y.zero_()
    assert load().checksums == before


def test_every_scan_is_used_exactly_once(monkeypatch: pytest.MonkeyPatch) -> None:
    used: Counter[bytes] = Counter()
    enlarge = digits._enlarge

    def record(scan: digits.Pixels) -> Image.Image:
        used[scan.tobytes()] += 1
        return enlarge(scan)

    monkeypatch.setattr(digits, "_enlarge", record)
    digits._build.__wrapped__()
    scans = np.rint(load_digits().images * (255 / 16)).astype(np.uint8)
    assert used == Counter(scan.tobytes() for scan in scans)


def test_no_image_is_in_two_splits() -> None:
    # scikit-learn's own digits hold a few equal scans, so only the drawn clients are compared.
    for client in load("photos,ink,fonts,signs").clients:
        splits = (client.train, client.validation, client.test)
        images = [image.numpy().tobytes() for split in splits for image in split.x]
        assert len(set(images)) == len(images)


def test_scans_are_white_on_black_and_ink_is_dark_on_pale() -> None:
    scans, ink = load("scans,ink").clients
    assert scans.train.x.float().mean() < 90
    assert torch.equal(scans.train.x[:, 0], scans.train.x[:, 2])
    assert ink.train.x.float().mean() > 150
    assert not torch.equal(ink.train.x[:, 0], ink.train.x[:, 2])


def test_test_faces_are_held_out_and_have_ten_different_digits() -> None:
    assert not set(digits.TRAIN_FACES) & set(digits.TEST_FACES)
    for face in digits.TRAIN_FACES + digits.TEST_FACES:
        glyphs = {bytes(digits._font(face).getmask(digit)) for digit in "0123456789"}
        assert len(glyphs) == 10


def test_clients_can_be_chosen_in_any_order() -> None:
    chosen = load("ink,scans")
    assert chosen.names == ("Ink", "Scans")
    assert chosen.name == "digits:ink,scans"
    assert chosen.checksums == {name: load().checksums[name] for name in ("Ink", "Scans")}


@pytest.mark.parametrize("argument", ["Scans", "scans,", "mnist"])
def test_unknown_client_lists_those_allowed(argument: str) -> None:
    with pytest.raises(UserError, match="allowed are scans, photos, ink, fonts, signs"):
        load(argument)


def test_repeated_client_is_refused() -> None:
    with pytest.raises(UserError, match="names must differ"):
        load("ink,ink")


@pytest.mark.parametrize("size", [8, 32])
def test_image_size(size: int) -> None:
    assert load("scans,signs", image_size=size).input.shape == (3, size, size)
