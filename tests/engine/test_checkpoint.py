"""Checkpoints: whole or not there, whatever happens while one is written."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fedc2i.core import files
from fedc2i.core.errors import UserError
from fedc2i.engine import checkpoint

INFINITE = float("inf")


def save(folder: Path, *rounds: int) -> None:
    for number in rounds:
        checkpoint.save(folder, number, {"w": torch.full((3,), float(number))}, {"round": number, "sent": [number, 0]})


def latest(folder: Path) -> int | None:
    """The round that would be gone on with; its tensors and values belong to it."""
    found = checkpoint.load(folder)
    if found is None:
        return None
    assert found.tensors["w"].tolist() == [found.round] * 3
    assert found.values == {"round": found.round, "sent": [found.round, 0]}
    return found.round


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_and_back(tmp_path: Path) -> None:
    tied = torch.arange(6, dtype=torch.float64).reshape(2, 3)
    tensors = {
        "a/x": tied.T,
        "a/y": tied,
        "a/z": tied,
        "b": torch.tensor(3),
        "c": torch.tensor([torch.nan, -0.0]),
        "d": tied[:0],
    }
    values = {"sent": [0, 2], "patience": [-INFINITE, 0], "names": {"ä\n": None}, "open": {"trained": [{"loss": 0.1}]}}
    checkpoint.save(tmp_path / "deep" / "er", 12, tensors, values)
    found = checkpoint.load(tmp_path / "deep" / "er")
    assert found is not None
    assert (found.round, found.values) == (12, values)
    assert set(found.tensors) == set(tensors)
    for name, own in tensors.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (own.dtype, own.shape)
        assert torch.equal(found.tensors[name].nan_to_num(7), own.nan_to_num(7))


def test_a_damaged_later_one_is_none_of_the_two(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    (tmp_path / "round000010.safetensors").write_bytes(b"damaged")
    assert latest(tmp_path) == 5
    save(tmp_path, 6, 7)
    (tmp_path / "round000007.safetensors").write_bytes(b"damaged")
    assert latest(tmp_path) == 6


def test_a_later_one_that_the_run_did_not_go_on_from_is_gone(tmp_path: Path) -> None:
    save(tmp_path, 5, 10, 6)
    assert latest(tmp_path) == 6
    assert {name.partition(".")[0] for name in names(tmp_path)} == {"round000005", "round000006"}


def test_each_file_is_on_the_disk_before_its_name_and_what_makes_it_count_comes_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, rename = list[str](), Path.replace
    monkeypatch.setattr(files, "sync", lambda path: done.append("folder" if path == tmp_path else path.suffixes[0]))
    monkeypatch.setattr(Path, "replace", lambda own, to: (done.append(f"to {to.suffix}"), rename(own, to))[1])
    save(tmp_path, 1)
    tensors, values = ".safetensors", ".json"
    assert done == [tensors, f"to {tensors}", "folder", values, f"to {values}", "folder"]


def test_the_same_bits_are_written_once_and_names_keep_their_order(tmp_path: Path) -> None:
    """By bits: -0 is not 0, nan is itself, and the same bytes of another type or shape are something else."""
    zeros, nans = torch.zeros(1000), torch.full((1000,), torch.nan)
    late = torch.zeros(1000)
    late[-1] = -0.0
    tensors = {
        **{"z": nans, "y": zeros, "x": nans.clone(), "w": -zeros, "v": zeros.clone(), "u": late},
        **{"t": zeros.reshape(10, 100), "s": zeros.to(torch.int32)},
    }
    checkpoint.save(tmp_path, 1, tensors, {})
    size = (tmp_path / "round000001.safetensors").stat().st_size
    assert 6 * 4000 < size < 6 * 4000 + 1000
    found = checkpoint.load(tmp_path)
    assert found is not None
    assert list(found.tensors) == list(tensors)
    for name, own in tensors.items():
        assert (found.tensors[name].dtype, found.tensors[name].shape) == (own.dtype, own.shape)
        assert found.tensors[name].numpy().tobytes() == own.numpy().tobytes(), name


def test_none_is_there_at_first(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path / "nowhere") is None
    assert checkpoint.load(tmp_path) is None


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 8, 9, 10)
    assert names(tmp_path) == [f"round{n:06d}.{kind}" for n in (9, 10) for kind in ("json", "safetensors")]
    assert latest(tmp_path) == 10


def test_files_of_other_names_are_not_in_the_way(tmp_path: Path) -> None:
    for name in ("round3 (copy).json", "round1-old.json", "rounds.json", "round9.txt"):
        (tmp_path / name).write_text("a user's own")
    assert checkpoint.load(tmp_path) is None
    save(tmp_path, 1, 2, 3)
    assert latest(tmp_path) == 3
    assert len(names(tmp_path)) == 4 + 4


# Damage.


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def other_round(path: Path) -> None:
    path.write_bytes(path.with_name(path.name.replace("2.", "1.")).read_bytes())


def another_value(path: Path) -> None:
    path.write_text(path.read_text().replace('"sent": [2, 0]', '"sent": [1, 0]'))


DAMAGES = [
    *(("safetensors", how) for how in (flip, cut, lambda path: path.write_bytes(b""), Path.unlink, other_round)),
    *(("json", how) for how in (cut, other_round, lambda path: path.write_text("[1, 2]"), another_value)),
]


@pytest.mark.parametrize(("kind", "how"), DAMAGES)
def test_a_damaged_newest_one_is_passed_over(tmp_path: Path, kind: str, how: object) -> None:
    save(tmp_path, 1, 2)
    assert callable(how)
    how(tmp_path / f"round000002.{kind}")
    assert latest(tmp_path) == 1
    save(tmp_path, 2)  # the round is done again
    assert latest(tmp_path) == 2


def test_a_copy_under_another_rounds_name_is_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for kind in ("json", "safetensors"):
        (tmp_path / f"round000002.{kind}").write_bytes((tmp_path / f"round000001.{kind}").read_bytes())
    assert latest(tmp_path) == 1


def test_if_all_are_damaged_a_line_says_which(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    flip(tmp_path / "round000001.safetensors")
    cut(tmp_path / "round000002.json")
    with pytest.raises(UserError, match=r"all checkpoints are damaged \(rounds 2, 1\)$"):
        checkpoint.load(tmp_path)


# A process that is killed, a disk that is full.


class Killed(BaseException):
    """Nothing in the package catches it."""


@contextmanager
def stopping(monkeypatch: pytest.MonkeyPatch, action: str, at: int, error: BaseException) -> Iterator[None]:
    """The ``at``-th call of a file operation does not happen any more."""
    real, calls = getattr(Path, action), []

    def operate(self: Path, *rest: object, **more: object) -> object:
        calls.append(self)
        if len(calls) >= at:
            raise error
        return real(self, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, action, operate)
        yield
    assert len(calls) >= at, "it was never reached"


@pytest.mark.parametrize(
    ("action", "at", "left"),
    [
        ("open", 1, 2),  # before the tensors are written
        ("replace", 1, 2),
        ("open", 2, 2),  # between the two files
        ("replace", 2, 2),
        ("unlink", 1, 2),  # each file's temporary one is removed before and after it is written
        ("unlink", 2, 2),
        ("unlink", 3, 2),
        ("unlink", 4, 3),  # both in place
        ("unlink", 5, 3),  # while old ones are removed
        ("unlink", 6, 3),
    ],
)
def test_killed_at_any_moment_one_of_the_last_two_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, at: int, left: int
) -> None:
    save(tmp_path, 1, 2)
    with stopping(monkeypatch, action, at, Killed()), pytest.raises(Killed):
        save(tmp_path, 3)
    assert latest(tmp_path) == left
    save(tmp_path, 3, 4)
    assert latest(tmp_path) == 4
    flip(tmp_path / "round000004.safetensors")
    assert latest(tmp_path) == 3


@pytest.mark.parametrize("at", [1, 2])
def test_a_full_disk_is_a_line_and_leaves_the_earlier_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    save(tmp_path, 1, 2)
    full = OSError(errno.ENOSPC, "No space left on device")
    line = r"round000003\.\w+: cannot be written \(No space left on device\)$"
    with stopping(monkeypatch, "open", at, full), pytest.raises(UserError, match=line):
        save(tmp_path, 3)
    assert latest(tmp_path) == 2
    assert not list(tmp_path.glob(".*"))
    assert {"round000001.json", "round000001.safetensors"} <= set(names(tmp_path))


def test_a_folder_that_cannot_be_made_is_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"round000001\.safetensors: cannot be written \(Not a directory\)$"):
        save(tmp_path / "file" / "checkpoints", 1)


def test_a_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (tmp_path / "round000001.safetensors").open("r+b") as file:
        file.truncate(2**43)  # takes no room on the disk
    with pytest.raises(UserError, match=r"round000001\.safetensors: its contents declare 8,796,093,022,208 bytes"):
        checkpoint.load(tmp_path)
