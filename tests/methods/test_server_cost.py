"""What `combine` asks of a GPU: a wait for results at most once, and no swarm of tiny operations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedc2i.methods.base import Method
from fedc2i.methods.fedcalm import FedCALM
from fedc2i.methods.fedic import FedIC
from fedc2i.methods.fedpac import FedPAC
from fedc2i.methods.messages import Uploads
from fedc2i.methods.pfedgraph import PFedGraph

CLIENTS, CLASSES, DIM, LAYERS = 5, 10, 8, 8
WAITS = {"cpu", "item", "tolist", "numpy", "nonzero", "__bool__", "__float__", "__int__", "__index__", "masked_select"}


class OnDevice(Tensor):
    """Plays a tensor on a GPU: what is computed from it is there too, until it is brought to the CPU."""

    calls: list[str]  # by the name of the function

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = "cpu" if func.__name__ == "to" and "cpu" in args else func.__name__
        if name != "__get__":
            cls.calls.append(name)
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result.as_subclass(Tensor) if name == "cpu" else result


def uploads(method: Method) -> Uploads:
    """Random ones; every tensor that one of the methods asks for."""
    draw = torch.Generator().manual_seed(0)
    counts = torch.randint(0, 9, (CLIENTS, CLASSES), generator=draw)
    tensors = {f"layer{n}": torch.randn(CLIENTS, 3, 4, generator=draw) for n in range(LAYERS)}
    if isinstance(method, FedPAC):
        tensors |= {
            "head/fc.weight": torch.randn(CLIENTS, CLASSES, DIM, generator=draw),
            "head/fc.bias": torch.randn(CLIENTS, CLASSES, generator=draw),
            "prototypes": torch.randn(CLIENTS, CLASSES, DIM, generator=draw) * (counts > 0)[..., None],
            "reference": torch.randn(CLIENTS, CLASSES, DIM, generator=draw),
            "class_counts": counts,
            "variance": torch.rand((CLIENTS, CLASSES) if isinstance(method, FedIC) else (CLIENTS,), generator=draw),
        }
    return Uploads(tensors, tuple(range(CLIENTS)), counts.sum(1), torch.zeros(CLIENTS))


@pytest.mark.parametrize(
    ("method", "waits"),
    [(FedIC(), 1), (FedPAC(), 1), (FedCALM(), 1), (PFedGraph(), 0)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_round_waits_for_the_device_once_at_most(method: Method, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent, start = uploads(method), {f"layer{n}": torch.zeros(3, 4) for n in range(LAYERS)}
    want, _ = method.combine(sent, start)
    there = Uploads(
        {name: rows.as_subclass(OnDevice) for name, rows in sent.tensors.items()}, sent.clients, sent.samples, sent.ages
    )
    monkeypatch.setattr(OnDevice, "calls", [], raising=False)
    got, _ = method.combine(there, start)
    assert sum(name in WAITS for name in OnDevice.calls) == waits, OnDevice.calls
    assert len(OnDevice.calls) < 15 * (LAYERS + 2)  # most are one of a layer
    for ours, theirs in ((got.shared, want.shared), (got.personal, want.personal)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name].as_subclass(Tensor), tensor), name
