"""Models that are offloaded to host memory or a file: the same bits, and no more of them in memory than take part."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedc2i import Federation, Method, Model, UserError
from fedc2i.core import memory
from fedc2i.core.params import rows, size_in_bytes
from fedc2i.engine import offloaded_models
from fedc2i.engine.offloaded_models import (
    COPIES,
    HOST_SHARE,
    OFFLOADED,
    SHARE,
    OffloadedModels,
    OffloadedStore,
    choose_store,
)
from fedc2i.engine.seed_run import Store
from fedc2i.methods.fedavg import FedAvg
from support.cut_runs import assert_goes_on
from support.simulation import Run, assert_same_run, simulated

CPU = torch.device("cpu")
ODD = {"w": torch.randn(5, 3, 2), "count": torch.arange(5), "flag": torch.tensor([True, False] * 2 + [True])}
EMPTY = {"none": torch.zeros(5, 0)}


@pytest.fixture(params=["host", "file"])
def offloaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run with partial participation offloads its models."""
    monkeypatch.setattr(
        offloaded_models, "choose_store", lambda device, size, few: OffloadedStore(CPU, request.param, few)
    )


@pytest.mark.parametrize("place", ["host", "file"])
def test_rows_come_back_as_they_were_put(place: Any) -> None:
    models, given = OffloadedModels([7, 3, 5, 9, 1], CPU, place), {**ODD, **EMPTY}
    models.put([3, 9], rows(given, [1, 3]))
    models.put([7, 5, 1], rows(given, [0, 2, 4]))
    for name, tensor in models.of([1, 3, 7]).items():
        assert tensor.dtype == given[name].dtype
        assert torch.equal(tensor, given[name][[4, 1, 0]])
    assert torch.equal(models.of([3, 5, 7, 9, 1])["w"], ODD["w"][[1, 2, 0, 3, 4]])  # some follow each other, some not
    before = models.of([3])
    models.put([3], rows(given, [0]))
    assert torch.equal(before["w"], ODD["w"][[1]])  # what was fetched is a copy
    assert torch.equal(models.tensors["w"], ODD["w"][[0, 0, 2, 3, 4]])


def test_whether_models_are_offloaded_does_not_depend_on_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    room = int(COPIES * 1000 / SHARE)
    monkeypatch.setattr(memory, "total", lambda: room)
    for free in (0, room):
        monkeypatch.setattr(memory, "available", lambda free=free: free)
        assert not choose_store(CPU, 1000, 2).offloads
        assert choose_store(CPU, 1001, 2).offloads
    card = SimpleNamespace(total_memory=room // 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    cuda = torch.device("cuda")
    assert [choose_store(cuda, size, 2).offloads for size in (500, 501)] == [False, True]
    assert isinstance(choose_store(cuda, 1000, 2).new(range(3)), OffloadedModels)
    monkeypatch.setattr(memory, "available", lambda: int(OFFLOADED * 1000 / HOST_SHARE))
    assert vars(choose_store(cuda, 1000, 2))["_place"] == "host"
    assert vars(choose_store(cuda, 1001, 2))["_place"] == "file"


def test_few_models_are_on_the_device_and_many_are_computed_in_chunks() -> None:
    store = OffloadedStore(CPU, "file", 2)
    assert not isinstance(store.new([4, 5]), OffloadedModels)
    assert store.chunks([0, 2, 4, 6, 8]) == [(0, 2), (4, 6), (8,)]
    assert store.chunks([]) == Store(CPU).chunks([]) == []
    assert Store(CPU).chunks([1, 2]) == [(1, 2)]


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)$"):
        OffloadedModels([0, 1, 2, 3, 4], CPU, "file").put(range(5), ODD)
    assert list(tmp_path.iterdir()) == []


def test_a_system_that_reserves_no_room_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.posix_fallocate")
    models = OffloadedModels(range(5), CPU, "file")
    models.put(range(5), ODD)
    assert torch.equal(models.of([3])["w"], ODD["w"][[3]])


SIZES = (12, 9, 7, 8, 5)
CASES: dict[str, dict[str, Any]] = {
    "evaluated": {"rounds": 3},
    "seldom": {"rounds": 4, "evaluate_every": 2},
    "groups": {"rounds": 3, "topology": "ring"},
    "apart": {"rounds": 2, "init": "independent"},
    "attacked": {"rounds": 6, "norm_bound": 3.0, "attack": "scaled:1e4@d", "evaluate_every": 6},
}


@pytest.mark.parametrize(
    ("name", "case"), [*(("fedavg", case) for case in CASES), ("fedc2i", "evaluated"), ("ditto", "seldom")]
)
def test_a_run_has_the_same_bits(
    name: str, case: str, make_model: Callable[..., Model], make_federation: Callable[..., Federation]
) -> None:
    def run() -> Run:
        federation, model = make_federation(SIZES, validation=3), make_model(batch_norm=case != "attacked")
        how = {"clients_per_round": 2, **CASES[case]}
        return simulated(Method.registry[name](), model, federation, (0, 4), **how)

    usual = run()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloaded_models, "choose_store", lambda device, size, few: OffloadedStore(CPU, "file", few))
        own = run()
    assert_same_run(own, usual)
    # Two uploads are too few for a median: those of earlier rounds count, whose norms are all that is kept of them.
    assert any(report.refused for report in usual[1]) == (case == "attacked")


@pytest.mark.usefixtures("offloaded")
def test_it_resumes_to_the_bit(tmp_path: Path, model: Model, make_federation: Callable[..., Federation]) -> None:
    """From a state that is a copy: offloaded rows are replaced in place."""
    how = {"clients_per_round": 2, "evaluate_every": 2, "rounds": 3}
    assert_goes_on(tmp_path, FedAvg(), model, make_federation(SIZES), (0, 3), **how)


@pytest.mark.usefixtures("offloaded")
@pytest.mark.parametrize("evaluate_every", [1, 0])
def test_no_more_models_are_computed_at_once_than_take_part(
    evaluate_every: int, model: Model, make_federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedc2i.engine.executors.base import LoopedExecutor

    seen: list[int] = []
    for name in ("train", "personalise", "evaluate"):
        real = getattr(LoopedExecutor, name)

        def watched(self: Any, batches: Any, *rest: Any, real: Any = real) -> Any:
            seen.append(sum(size_in_bytes(batch.params) for batch in batches))
            return real(self, batches, *rest)

        monkeypatch.setattr(LoopedExecutor, name, watched)
    simulated(FedAvg(), model, make_federation(SIZES), rounds=2, clients_per_round=2, evaluate_every=evaluate_every)
    assert max(seen) == 2 * size_in_bytes(model.init(0))
