"""Work recorded once and replayed; without a GPU, the function as it is."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from fedc2i.engine.executors.stacked.stepper import GraphedFunction, capture

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda")


def nested(inputs: dict[str, Tensor], factor: Tensor, mode: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Nested in, nested out, with something that is no tensor on the way."""
    sign = -1 if mode == "minus" else 1
    return {name: sign * tensor * factor for name, tensor in inputs.items()}, [factor + 1]


def test_on_a_cpu_it_is_the_function() -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(1)
        return x + len(calls)

    recorded = GraphedFunction(count, torch.device("cpu"))
    assert [recorded(torch.zeros(())).item() for _ in range(3)] == [1, 2, 3]


@needs_cuda
@pytest.mark.parametrize("mode", ["plus", "minus"])
def test_a_replay_computes_from_its_own_inputs(mode: str) -> None:
    recorded = GraphedFunction(nested, CUDA)
    results = []
    for number in (1.0, 2.0, 3.0):
        inputs = {"a": torch.full((4,), number, device=CUDA), "b": torch.arange(6.0, device=CUDA) * number}
        factor = torch.tensor(10 * number, device=CUDA)
        results.append((recorded(inputs, factor, mode), nested(inputs, factor, mode)))
    for got, want in results:  # compared at the end: a later replay does not write into an earlier result
        assert all(torch.equal(got[0][name], want[0][name]) for name in want[0])
        assert torch.equal(got[1][0], want[1][0])
    assert recorded._graph is not None


@needs_cuda
def test_it_runs_as_a_recording_not_as_python() -> None:
    calls: list[int] = []

    def work(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2

    recorded = GraphedFunction(work, CUDA)
    for number in range(5):
        assert recorded(torch.full((3,), float(number), device=CUDA)).tolist() == [2.0 * number] * 3
    assert len(calls) == 2  # once to set things up, once to record


@needs_cuda
def test_work_that_waits_for_the_gpu_runs_unrecorded_with_a_warning() -> None:
    def impatient(x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 0 else x * 3

    recorded = GraphedFunction(impatient, CUDA)
    with pytest.warns(UserWarning, match="a step cannot be recorded and runs unrecorded, which is slower: "):
        assert recorded(torch.ones(2, device=CUDA)).tolist() == [2, 2]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        assert recorded(-torch.ones(2, device=CUDA)).tolist() == [-3, -3]


@needs_cuda
def test_nothing_to_record_is_no_warning() -> None:
    recorded = GraphedFunction(lambda x: x, CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorded(torch.ones(2, device=CUDA)).tolist() == [1, 1]
        assert recorded(torch.zeros(2, device=CUDA)).tolist() == [0, 0]


@needs_cuda
def test_running_out_of_memory_is_passed_on() -> None:
    def greedy() -> Tensor:
        return torch.empty(2**60, device=CUDA)

    with pytest.raises(torch.OutOfMemoryError):
        capture(greedy)
