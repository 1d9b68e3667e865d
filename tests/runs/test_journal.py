"""Reports of finished rounds on disk: what is read is what was written, or a line says which file is not."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedc2i.core import files
from fedc2i.core.errors import UserError
from fedc2i.engine.records import Round
from fedc2i.runs.folder import ask, asked, read_reports, write_report


def report(number: int, **more: Any) -> Round:
    metrics: Any = {"received": [{"accuracy": 1 / 3, "loss": float("nan")}, {}], "trained": [{"accuracy": 50.0}, {}]}
    influence = {"influence_vector": np.array([[1 / 3, np.nan], [np.inf, number]], dtype=np.float32)}
    values = {"metrics": metrics, "influence": influence, **more}
    return Round(7, number, 0.25, ("a", "ü\n"), refused=("b",), bytes_up=10, bytes_down=2**40, **values)


def assert_same(got: Round, want: Round) -> None:
    plain = ("seed", "round", "seconds", "participants", "refused", "bytes_up", "bytes_down", "why")
    assert [getattr(got, name) for name in plain] == [getattr(want, name) for name in plain]
    assert repr(got.metrics) == repr(want.metrics)  # nan is not equal to itself
    assert set(got.influence) == set(want.influence)
    for name, array in want.influence.items():
        assert got.influence[name].dtype == array.dtype
        np.testing.assert_array_equal(got.influence[name], array)


def test_reports_come_back_in_order_and_exactly(tmp_path: Path) -> None:
    reports = [report(n, **({"why": {"b": "not finite"}} if n % 2 else {})) for n in range(1, 12)]
    for own in reversed(reports):
        write_report(tmp_path / "deep" / "seed7", own)
    for got, want in zip(read_reports(tmp_path / "deep" / "seed7", 12), reports, strict=True):
        assert_same(got, want)


def test_a_round_without_scores_and_diagnostics_comes_back(tmp_path: Path) -> None:
    write_report(tmp_path, report(1, metrics={}, influence={}))
    assert_same(read_reports(tmp_path, 2)[0], report(1, metrics={}, influence={}))


def test_only_rounds_before_are_read(tmp_path: Path) -> None:
    assert read_reports(tmp_path / "nowhere", 1) == []
    for number in (1, 2, 3):
        write_report(tmp_path, report(number))
    (tmp_path / "round000003.npz").write_bytes(b"")
    assert [own.round for own in read_reports(tmp_path, 3)] == [1, 2]


def test_a_round_done_again_takes_the_place_of_the_first(tmp_path: Path) -> None:
    write_report(tmp_path, report(1))
    write_report(tmp_path, report(1, metrics={}))
    assert read_reports(tmp_path, 2)[0].metrics == {}


def test_reports_and_marks_are_on_the_disk_when_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda path: synced.append(path.name.lstrip(".").split(".")[0]))
    write_report(tmp_path, report(1))
    assert synced == ["round000001", tmp_path.name]
    ask(tmp_path, 2, "ab")
    assert synced[2:] == ["asked000002-ab", tmp_path.name]


def test_uploads_asked_for_on_another_course_are_one_release_more(tmp_path: Path) -> None:
    assert asked(tmp_path / "nowhere") == {}
    one, two = "ab" * 32, "ab" * 15 + "cd" * 17
    for number, course, more in ((1, "", False), (1, "", False), (2, one, False), (2, one, False), (2, two, True)):
        assert ask(tmp_path, number, course) is more
    assert ask(tmp_path, 2, two) is False
    assert ask(tmp_path, 3, two) is False
    for name in ("asked000003-ab.bak", "asked000004-xy", "asked", ".asked000004-ab.7.part"):
        (tmp_path / name).touch()
    assert asked(tmp_path) == {1: 1, 2: 2, 3: 1}


def test_a_missing_report_is_named(tmp_path: Path) -> None:
    write_report(tmp_path, report(1))
    write_report(tmp_path, report(3))
    with pytest.raises(UserError, match=r"round000002\.npz: not a round's report \(.*No such file"):
        read_reports(tmp_path, 4)


def archive(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def one_array() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def text(value: Any) -> Any:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"noise" * 99,
        b"PK\x03\x04" + b"\0" * 99,
        one_array(),
        archive(other=np.zeros(1)),
        archive(plain=text([1])),
        archive(plain=text({"seed": 1})),
        archive(plain=text({"participants": [], "refused": [], "unknown": 1})),
        archive(plain=np.array([1, 2], dtype=np.uint8)),
        archive(plain=np.array([{}], dtype=object)),
    ],
    ids=range(10),
)
def test_another_file_is_refused_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "round000001.npz").write_bytes(content)
    with pytest.raises(UserError, match=r"round000001\.npz: not a round's report \(.+\)$") as refused:
        read_reports(tmp_path, 2)
    assert "\n" not in str(refused.value)


def test_a_report_damaged_anywhere_is_refused_or_the_same(tmp_path: Path) -> None:
    write_report(tmp_path, report(1))
    path = tmp_path / "round000001.npz"
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 255]) + whole[place + 1 :])
        try:
            found = read_reports(tmp_path, 2)
        except UserError:
            refused += 1
        else:  # a byte that means nothing, such as a time
            assert_same(found[0], report(1))
    assert refused > len(whole) / 5 / 2
    for end in range(0, len(whole), 25):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match="not a round's report"):
            read_reports(tmp_path, 2)
