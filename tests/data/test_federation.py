"""What a user is told about the data that was read."""

from __future__ import annotations

import numpy as np

import fedc2i
from fedc2i.data.arrays import from_arrays
from fedc2i.data.federation import MOST_NAMED, Federation
from fedc2i.data.sources import load
from fedc2i.report.comparison import comparison_table
from fedc2i.runs.results import summary


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
    assert lines[1:] == ["warning: tested on classes without a training sample of them: c0 (1)"]


def test_a_client_with_one_class() -> None:
    lines = federation([[1, 1], [0, 1]], [[1], [0]]).describe()
    assert lines[1:] == ["warning: samples of one class only: c0 (1)"]


def test_a_class_that_a_client_neither_trains_nor_is_tested_on() -> None:
    data = federation([[0, 1], [0, 1, 2], [2, 1, 0]], [[0], [0, 2], [1]])
    line = "neither training nor test samples of classes that others have: c0 (2)"
    assert data.describe()[1:] == [f"warning: {line}"]
    assert data.all_notes == (f"N{line[1:]}.",)
    assert data.notes == ()
    result = fedc2i.run("local", data, model="logistic", rounds=1)
    assert result.federation.all_notes[0] in summary(result)["notes"]
    assert result.federation.all_notes[0] in comparison_table([result]).notes
    assert federation([[0, 1], [0, 1]], [[0], [1]]).all_notes == ()


def test_many_clients_stay_readable() -> None:
    lines = federation([[0, 1, 0]] * 30, [[0]] * 30).describe()
    assert len(lines) == 1
    assert lines[0].endswith("c7 3/0/1, and 22 more")
    lines = federation([[0, 0]] * 29 + [[0, 1]], [[1]] * 30).describe()
    assert len(lines) == 2
    assert lines[1].endswith(f"c6 (1), c7 (1), and {29 - MOST_NAMED} more clients")


def test_counts_of_every_split() -> None:
    assert load("digits:fonts").samples() == {"Fonts": {"train": 300, "validation": 50, "test": 240}}
