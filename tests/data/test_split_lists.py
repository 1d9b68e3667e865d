"""Split lists: what is admitted, and that nothing in a pickle is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedc2i.core.errors import UserError
from fedc2i.data import split_lists

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
PATHS = ["../data/office_caltech_10/amazon/bike/frame_0001.jpg", "../data/office_caltech_10/amazon/mug/frame_0002.jpg"]
LABELS = ["bike", "mug"]
fuzzing = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def dump(path: Path, content: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "content",
    [
        (PATHS, LABELS),
        [PATHS, LABELS],
        (tuple(PATHS), tuple(LABELS)),
        (np.array(PATHS), np.array(LABELS)),
        (np.array(PATHS, dtype=object), [np.str_(label) for label in LABELS]),
        np.array([PATHS, LABELS]),
    ],
    ids=["tuple", "list", "tuples", "arrays", "objects", "matrix"],
)
def test_pairs_of_strings(tmp_path: Path, content: Any, protocol: int) -> None:
    assert split_lists.read(dump(tmp_path / "list.pkl", content, protocol)) == list(zip(PATHS, LABELS, strict=True))


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("labels", [[1, 8], np.array([1, 8]), np.array([1, 8], dtype=">i4")], ids=["list", "i8", "big"])
def test_whole_numbers_as_labels(tmp_path: Path, labels: Any, protocol: int) -> None:
    assert split_lists.read(dump(tmp_path / "list.pkl", (PATHS, labels), protocol)) == list(
        zip(PATHS, [1, 8], strict=True)
    )


@settings(fuzzing, max_examples=40)
@given(
    entries=st.lists(st.tuples(st.text(), st.text() | st.integers(0, 2**31 - 1))), protocol=st.sampled_from(PROTOCOLS)
)
def test_agrees_with_pickle(tmp_path: Path, entries: list[tuple[str, str | int]], protocol: int) -> None:
    content = ([path for path, _ in entries], [label for _, label in entries])
    assert split_lists.read(dump(tmp_path / "list.pkl", content, protocol)) == entries


@pytest.mark.parametrize("order", ["<", ">"])
def test_letters_that_do_not_exist_are_refused(tmp_path: Path, order: str) -> None:
    for letter in (0x10FFFF, 0x110000):
        labels = np.array([65, letter], dtype=f"{order}u4").view(f"{order}U1")
        path = dump(tmp_path / "list.pkl", (PATHS, labels), 4)
        if letter == 0x10FFFF:
            assert [label for _, label in split_lists.read(path)] == ["A", chr(letter)]
        else:
            with pytest.raises(UserError, match="text with letters that do not exist"):
                split_lists.read(path)


def test_arrays_made_of_the_same_bytes_are_counted_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_lists._Stack, "left", 1000)
    path, labels = tmp_path / "list.pkl", np.arange(75, dtype="i8")
    assert len(split_lists.read(dump(path, (["a/b"] * 75, labels), 4))) == 75
    with pytest.raises(UserError, match="it unpacks to more than"):
        split_lists.read(dump(path, (labels, labels.copy()), 4))


class Call:
    """Pickles as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_call_is_refused_and_not_made(tmp_path: Path, protocol: int) -> None:
    trap = tmp_path / "trap"
    path = dump(tmp_path / "list.pkl", (PATHS, [Call(os.system, f"touch '{trap}'")]), protocol)
    with pytest.raises(UserError, match=r"list\.pkl: refused \(the name '\w+ system' is not allowed\)"):
        split_lists.read(path)
    assert not trap.exists()
    with path.open("rb") as stream:
        pickle.load(stream)
    assert trap.exists(), "the file would have run, had it been unpickled"


@pytest.mark.parametrize(
    "content",
    [
        (PATHS,),
        (PATHS, LABELS, LABELS),
        (PATHS, LABELS[:1]),
        (PATHS, [1.5, 2.5]),
        (PATHS, [True, False]),
        (PATHS, [None, None]),
        (PATHS, [-1, 2]),
        (PATHS, [2**31, 2]),
        (PATHS, [10**4000, 2]),
        ([1, 2], LABELS),
        (PATHS, [["bike"], ["mug"]]),
        (PATHS, np.array([1.5, 2.5])),
        (PATHS, np.array([Call(print)] * 2)),
        (PATHS, {"bike": 1}),
        "text",
        7,
        Call(eval, "1"),
        Path("x"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_other_content_is_refused(tmp_path: Path, content: Any, protocol: int) -> None:
    with pytest.raises(UserError, match=r"list\.pkl: refused .* expected a pickled pair") as caught:
        split_lists.read(dump(tmp_path / "list.pkl", content, protocol))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b".",
        b"]].",
        pickle.dumps((["a/b"], [1]), 2)[:-1] + b"].",  # the pair, and something on top of it
        b"e.",
        b"]h\x05.",
        b"]q\x00h\x00a.",  # a list that holds itself
        b"cnumpy\nndarray\n(tR.",
        b"cnumpy\ndtype\n(VU99999999\nI00\nI01\ntR.",
        b"(lp0\n" * 5000,
        pickle.dumps((PATHS, LABELS))[:-20],
    ],
)
def test_crafted_and_cut_off(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "list.pkl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"list\.pkl: refused"):
        split_lists.read(path)


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "list.pkl"
    path.write_bytes(bytes(split_lists.MAX_BYTES + 1))
    with pytest.raises(UserError, match="allowed are"):
        split_lists.read(path)
    with pytest.raises(UserError, match=r"absent\.pkl"):
        split_lists.read(tmp_path / "absent.pkl")


@fuzzing
@given(data=st.data())
def test_damage_never_ends_in_another_exception(tmp_path: Path, data: st.DataObject) -> None:
    protocol = data.draw(st.sampled_from(PROTOCOLS))
    labels = data.draw(st.sampled_from([LABELS, np.array(LABELS), np.array([1, 2])]))
    content = bytearray(pickle.dumps((PATHS, labels), protocol))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "list.pkl"
    path.write_bytes(content)
    with contextlib.suppress(UserError):
        split_lists.read(path)


@pytest.mark.parametrize(
    ("entry", "want"),
    [
        (PATHS[0], ("bike", "frame_0001.jpg")),
        ("../../../etc/bike/x.jpg", ("bike", "x.jpg")),
        ("C:\\data\\bike\\x.jpg", ("bike", "x.jpg")),
        ("bike/./x.jpg", ("bike", "x.jpg")),
    ],
)
def test_only_the_last_two_components_count(entry: str, want: tuple[str, str]) -> None:
    assert split_lists.class_and_file(Path("list.pkl"), entry) == want


@pytest.mark.parametrize(
    "entry", ["", "x.jpg", "/x.jpg", "../x.jpg", "bike/..", "a/../x.jpg", "bike\\..", "bike/x\0.jpg"]
)
def test_entries_without_class_and_file(entry: str) -> None:
    with pytest.raises(UserError, match=r"^list\.pkl: .*does not end in <class>/<file>"):
        split_lists.class_and_file(Path("list.pkl"), entry)
