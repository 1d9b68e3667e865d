"""Work on a GPU captured once as a CUDA graph, then replayed: one launch instead of hundreds of small ones."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_Result = TypeVar("_Result")


def capture(work: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result] | None:
    """Runs ``work`` once, then captures it; returns the graph and the tensors that every replay fills.

    None, with a warning, if it cannot be captured because it waits for the GPU.
    """
    aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        work()  # libraries set up what they need
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    collects = gc.isenabled()
    gc.disable()  # a graph of an earlier run that is collected just now would spoil this capture
    try:
        with warnings.catch_warnings(), torch.cuda.graph(graph):
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # e.g. a method that sends all it has
            result = work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0]
        warnings.warn(
            f"a step cannot be captured as a CUDA graph and runs without one, which is slower: {reason}", stacklevel=2
        )
        return None
    finally:
        if collects:
            gc.enable()
    return graph, result


class GraphedFunction:
    """A function of nested tensors that always have the same shapes; on a CPU, just the function."""

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self._function = function
        self._plain = device.type != "cuda"
        self._inputs: Any = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: Any = None

    def __call__(self, *inputs: Any) -> Any:
        """The function's result, in new tensors."""
        if self._plain:
            return self._function(*inputs)
        if self._graph is None:
            self._inputs = tree_map(_copy, inputs)
            captured = capture(lambda: self._function(*self._inputs))
            if captured is None:
                self._plain = True
                return self._function(*inputs)
            self._graph, self._outputs = captured
        else:
            for mine, given in zip(tree_leaves(self._inputs), tree_leaves(inputs), strict=True):
                if isinstance(mine, Tensor):
                    mine.copy_(given)
        self._graph.replay()
        return tree_map(_copy, self._outputs)


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
