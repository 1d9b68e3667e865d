"""What a user is told about the data that was read."""

from __future__ import annotations

import numpy as np

from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import MOST_NAMED, Federation
from fedc2i.data.sources import load


def federation(train: list[list[int]], test: list[list[int]]) -> Federation:
    def images(labels: list[int]) -> np.ndarray:
        return np.zeros((len(labels), 16, 16), dtype=np.uint8)

    clients = {
        f"c{k}": (images(own), np.array(own), images(seen), np.array(seen))
        for k, (own, seen) in enumerate(zip(train, test, strict=True))
    }
    return from_arrays(clients)


def test_one_line_when_all_is_well() -> None:
    (line,) = load("digits:scans,ink").describe()
    assert line.startswith("digits:scans,ink: 2 clients, 10 classes, images 28x28; train/validation/test: ")
    assert line.endswith(": Scans 300/50/249, Ink 300/50/249")


def test_labels_with_gaps_are_probably_a_slip() -> None:
    lines = federation([[0, 1000], [0, 1000]], [[0], [1000]]).describe()
    assert lines[1].startswith("warning: 999 of 1001 classes have no training sample (1, 2, 3,")
    assert lines[1].endswith(", ...)")
    assert len(lines) == 2


def test_classes_that_are_only_tested() -> None:
    lines = federation([[0, 1], [0, 1]], [[0, 1], [0]]).describe()
    assert len(lines) == 1
    lines = federation([[0, 0], [0, 1]], [[1, 0], [0]]).describe()
    assert lines[1:] == ["warning: c0 is tested on classes it has no training sample of (1)"]


def test_a_client_with_one_class() -> None:
    lines = federation([[1, 1], [0, 1]], [[1], [0]]).describe()
    assert lines[1:] == ["warning: c0 has samples of one class only (1)"]


def test_many_clients_stay_readable() -> None:
    lines = federation([[0, 1, 0]] * 30, [[0]] * 30).describe()
    assert len(lines) == 1
    assert lines[0].endswith("c7 3/0/1, and 22 more")
    lines = federation([[0, 0]] * 29 + [[0, 1]], [[1]] * 30).describe()
    assert len(lines) == MOST_NAMED + 1
    assert lines[-1] == f"({30 - MOST_NAMED} more warnings)"


def test_counts_of_every_split() -> None:
    assert load("digits:fonts").samples() == {"Fonts": {"train": 300, "validation": 50, "test": 240}}
