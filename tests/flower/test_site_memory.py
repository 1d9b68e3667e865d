"""What a site keeps of its own models: enough to do any of the last rounds again, in files or in the node's state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr.app")
from flwr.app import ConfigRecord, RecordDict
from safetensors.torch import load_file

from fedc2i.core.errors import UserError
from fedc2i.core.params import Params
from fedc2i.flower.site import KEPT, ContextMemory, FolderMemory, Memory

Make = Callable[[str], Memory]


@pytest.fixture(params=["folder", "context"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """A run's memory; the same run's again when it is called again, as after a restart."""
    if request.param == "folder":
        return lambda run: FolderMemory(tmp_path / "state", run)
    state = RecordDict({"other": ConfigRecord({"a": 1})})
    return lambda run: ContextMemory(state, run)


def model(round: int) -> Params:
    return {"w": torch.full((2, 3), float(round)), "n": torch.tensor(round)}


def known(memory: Memory, before: int) -> int | None:
    """The round of the model that a round would start from."""
    found = memory.load(before)
    if found is None:
        return None
    assert found["w"].tolist() == model(int(found["n"]))["w"].tolist()
    return int(found["n"])


def fill(memory: Memory, *rounds: int) -> None:
    for number in rounds:
        memory.save(number, model(number))


def test_a_round_starts_from_the_latest_model_before_it(make: Make) -> None:
    assert make("run").load(10**6) is None
    fill(make("run"), 2, 5, 7)
    again = make("run")
    assert [known(again, number) for number in (1, 2, 3, 5, 6, 7, 8, 100)] == [None, None, 2, 2, 5, 5, 7, 7]


def test_the_last_three_are_kept(make: Make) -> None:
    fill(make("run"), *range(1, 13))  # across a digit
    assert [known(make("run"), number) for number in (10, 11, 12, 13)] == [None, 10, 11, 12]
    assert KEPT == 3


def test_a_round_done_again_replaces_the_model_and_drops_later_ones(make: Make) -> None:
    memory = make("run")
    fill(memory, 4, 5, 6)
    memory.save(5, {"n": torch.tensor(50), "w": torch.full((2, 3), 50.0)})
    assert [known(memory, number) for number in (5, 6, 7, 99)] == [4, 50, 50, 50]


def test_runs_are_kept_apart(make: Make) -> None:
    fill(make("run"), 1)
    fill(make("run-seed1"), 8)
    fill(make("run-seed10"), 9)
    assert [known(make(run), 99) for run in ("run", "run-seed1", "run-seed10", "ru")] == [1, 8, 9, None]


def test_one_tensor_under_two_names_is_kept_twice(make: Make) -> None:
    tied = torch.arange(4.0)
    make("run").save(1, {"encoder": tied, "decoder": tied, "turned": tied.reshape(2, 2).T})
    found = make("run").load(2)
    assert found is not None
    assert {name: own.tolist() for name, own in found.items()} == {
        "encoder": [0, 1, 2, 3],
        "decoder": [0, 1, 2, 3],
        "turned": [[0, 2], [1, 3]],
    }


def test_other_state_of_the_node_is_left_alone() -> None:
    state = RecordDict({"other": ConfigRecord({"a": 1}), "run.note": ConfigRecord({"b": 2})})
    memory = ContextMemory(state, "run")
    fill(memory, *range(1, 6))
    memory.finish({"trained": model(5)})
    assert sorted(state) == ["other", "run.3", "run.4", "run.5", "run.note"]


# Files.


@pytest.mark.parametrize("damage", [b"", b"noise" * 50, None])
def test_a_damaged_file_counts_as_absent(tmp_path: Path, damage: bytes | None) -> None:
    memory = FolderMemory(tmp_path, "run")
    fill(memory, 1, 2)
    path = tmp_path / "run" / "round000002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] if damage is None else damage)
    assert known(memory, 3) == 1
    memory.save(2, model(2))
    assert known(memory, 3) == 2


def test_files_of_other_names_are_not_in_the_way(tmp_path: Path) -> None:
    memory = FolderMemory(tmp_path, "run")
    fill(memory, 1)
    others = [tmp_path / "run" / name for name in ("round1 (copy).safetensors", "round2.txt", "rounds.safetensors")]
    for path in others:
        path.write_bytes(b"a user's own")
    fill(memory, 2, 3, 4)
    assert known(memory, 9) == 4
    assert all(path.read_bytes() == b"a user's own" for path in others)


def test_the_last_models_are_left_for_the_site(tmp_path: Path) -> None:
    memory = FolderMemory(tmp_path, "run")
    fill(memory, 6)
    memory.finish({"received": model(1), "trained": model(2)})
    for number, point in enumerate(("received", "trained"), 1):
        assert load_file(tmp_path / "run" / f"{point}.safetensors")["n"] == number
    assert known(memory, 9) == 6


@pytest.mark.parametrize(
    "run", ["", ".", "..", "../up", "a/b", "/abs", "a\\b", ".hidden", "-x", "a\nb", "a\n", "ä", "x" * 101, "a\0b"]
)
def test_a_run_cannot_be_named_out_of_the_folder(run: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot name a run"):
        FolderMemory(tmp_path, run)
    FolderMemory(tmp_path, "20260101-120000-abcdef-seed3")
    FolderMemory(tmp_path, "x" * 100)


def test_a_folder_that_cannot_be_written_is_named_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(UserError, match=r"round000001.safetensors: cannot be written \(Not a directory\)$"):
        fill(FolderMemory(tmp_path / "state", "run"), 1)
