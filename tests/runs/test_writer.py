"""The thread that writes reports and checkpoints: in order, without holding up the rounds, and loud when it fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedc2i.core import memory
from fedc2i.core.errors import UserError
from fedc2i.engine import checkpoint
from fedc2i.engine.checkpoint import State, snapshot
from fedc2i.engine.records import Round
from fedc2i.runs import writer
from fedc2i.runs.folder import RunFolder
from fedc2i.runs.writer import RunWriter


def report(number: int, seed: int = 0) -> Round:
    metrics: Any = {"trained": [{"accuracy": float(number)}, {'odd "name"': float("nan")}]}
    return Round(seed, number, 0.1, ("a", 'b"'), metrics, {}, (), 1, 2)


def state(number: int) -> Callable[[], State]:
    return lambda: ({"w": torch.full((3,), float(number))}, {"0": {}})


def checkpoints(folder: Path) -> list[int]:
    return [saved.round for saved in checkpoint.sound(folder / "checkpoints")]


def test_everything_is_written_in_the_order_in_which_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    real = checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *given: (done.append(f"state {given[1]}"), real(*given)))
    monkeypatch.setattr(writer, "sync", lambda path: done.append(path.name))
    with RunWriter(RunFolder(tmp_path, ("a", 'b"')), 0) as writing:
        for number in (1, 2):
            for seed in (0, 1):
                writing.record(report(number, seed))
            writing.save(number, state(number))
    assert done[:4] == ["round000001.npz", "round000001.npz", *done[2:4]]
    assert {*done[2:4]} == {"seed0", "seed1"}
    assert done[4:7] == ["state 1", "round000002.npz", "round000002.npz"]
    assert done[-1] == "state 2"
    assert checkpoints(tmp_path) == [2, 1]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert lines[:2] == [
        '{"seed": 0, "round": 1, "client": "a", "point": "trained", "metric": "accuracy", "value": 1.0}',
        r'{"seed": 0, "round": 1, "client": "b\"", "point": "trained", "metric": "odd \"name\"", "value": null}',
    ]
    assert len(lines) == 8


def test_checkpoints_are_written_by_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 30 s, then 30 s later; where one takes 3 s of processor time, not before 60 s more: a twentieth."""
    now, cost = [100.0], [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "thread_time", lambda: cost.append(cost[-1] + 3 * (now[0] > 150)) or cost[-1])
    with RunWriter(RunFolder(tmp_path, ("a", "b")), 30) as writing:
        for number in range(1, 25):
            now[0] += 10.0
            writing.save(number, state(number))
            writing._idle.wait()
            if number in (2, 3, 5, 6, 11, 12):
                assert checkpoints(tmp_path)[:1] == {2: [], 3: [3], 5: [3], 6: [6], 11: [6], 12: [12]}[number], number


def test_rounds_do_not_wait_for_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that is due while the last one is still being written is skipped; the next one is not."""
    slow, real = threading.Event(), checkpoint.save

    def save(*given: Any) -> None:
        slow.wait()
        real(*given)

    monkeypatch.setattr(checkpoint, "save", save)
    monkeypatch.setattr(writer, "SHARE", 1e9)
    with RunWriter(RunFolder(tmp_path, ("a", "b")), 1e-9) as writing:
        writing.save(1, state(1))
        writing.save(2, state(2))
        writing.record(report(2))
        slow.set()
        writing._idle.wait()
        time.sleep(1e-3)
        writing.save(3, state(3))
    assert checkpoints(tmp_path) == [3, 1]


def write(folder: Path, rounds: int, after: BaseException | None = None) -> None:
    with RunWriter(RunFolder(folder, ("a", "b")), 0) as writing:
        for number in range(1, rounds + 1):
            writing.record(report(number))
            writing.save(number, state(number))
        if after is not None:
            raise after


@pytest.mark.parametrize("rounds", [1, 1000])
@pytest.mark.parametrize("where", ["rounds", "checkpoints", "metrics.jsonl"])
def test_what_cannot_be_written_stops_the_rounds(tmp_path: Path, where: str, rounds: int) -> None:
    (tmp_path / where).mkdir() if where == "metrics.jsonl" else (tmp_path / where).write_text("in the way")
    with pytest.raises(UserError, match=rf"{where}.*: cannot be written \([\w ]+\)$"):
        write(tmp_path, rounds, after=AssertionError("it went on") if rounds > 1 else None)


def test_an_error_of_the_rounds_lets_the_writer_end_its_work(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1, after=KeyboardInterrupt())
    assert checkpoints(tmp_path) == [1]
    assert threading.active_count() == before


def test_a_snapshot_does_not_change_and_copies_what_is_shared_once() -> None:
    w = torch.arange(6.0).reshape(2, 3)
    (tensors, values), wait = snapshot(({"a": w, "b": w, "t": w.T, "part": w[0]}, {"x": 1}))
    wait()
    w.zero_()
    assert tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors["t"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert tensors["part"].tolist() == [0, 1, 2]
    assert tensors["a"] is tensors["b"]
    assert values == {"x": 1}


def test_a_state_too_large_for_a_copy_is_on_the_disk_before_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: 4000)
    monkeypatch.setattr(checkpoint, "save", lambda *given, real=checkpoint.save: (time.sleep(0.2), real(*given)))
    w = torch.ones(300)  # 1,200 bytes are more than a quarter of 4,000
    with RunWriter(RunFolder(tmp_path, ("a",)), 0) as writing:
        writing.save(1, lambda: ({"w": w}, {"0": {}}))
        w.zero_()
    (saved,) = checkpoint.sound(tmp_path / "checkpoints")
    assert saved.tensors["w"].tolist() == [1] * 300
