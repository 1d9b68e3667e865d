"""Clients of all seeds cut into parts and put together again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fedc2i.core.settings import TrainingSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.executors.base import ClientBatch, Personalised, Trained
from fedc2i.engine.executors.stacked.chunks import in_chunks
from fedc2i.engine.records import Scored
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.messages import Download
from fedc2i.models.model import Model


def turn(model: Model, seed: int, clients: Sequence[int], shared: Tensor | None = None) -> ClientBatch:
    """A turn whose clients' models are ``100·seed + client``."""
    recipe = RunContext(FedAvg(), model, TrainingSettings(), rounds=1, seed=seed)
    params = {"w": torch.tensor([[100.0 * seed + m] for m in clients])}
    return ClientBatch(recipe, tuple(clients), params, Download({} if shared is None else {"s": shared}), 1)


def scored(client: int) -> Scored:
    return Scored({"accuracy": float(client)}, torch.tensor([[float(client)]]))


def double(seen: list[list[tuple[int, tuple[int, ...]]]]) -> Callable[[list[ClientBatch]], list[Trained]]:
    """Doubles every model, and notes which clients of which seeds came together."""

    def compute(part: list[ClientBatch]) -> list[Trained]:
        seen.append([(own.context.seed, own.clients) for own in part])
        for own in part:
            assert own.params["w"].flatten().tolist() == [100.0 * own.context.seed + m for m in own.clients]
        return [
            Trained({"w": 2 * own.params["w"]}, {"u": -own.params["w"]}, [scored(m) for m in own.clients])
            for own in part
        ]

    return compute


@pytest.mark.parametrize(
    ("at_once", "want"),
    [
        (10**9, [[(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2))]]),
        (9, [[(0, (0, 1, 2)), (1, (0, 1, 2)), (2, (0, 1, 2))]]),
        (8, [[(0, (0, 1, 2)), (1, (0, 1, 2))], [(2, (0, 1, 2))]]),
        (3, [[(0, (0, 1, 2))], [(1, (0, 1, 2))], [(2, (0, 1, 2))]]),
        (2, [[(s, part)] for s in range(3) for part in ((0, 1), (2,))]),
        (1, [[(s, (m,))] for s in range(3) for m in range(3)]),
    ],
)
def test_whole_seeds_while_they_fit_else_some_clients(
    at_once: int, want: list[list[tuple[int, tuple[int, ...]]]], model: Model
) -> None:
    seen: list[list[tuple[int, tuple[int, ...]]]] = []
    results = in_chunks([turn(model, s, (0, 1, 2)) for s in range(3)], at_once, double(seen))
    assert seen == want
    assert max(sum(len(clients) for _, clients in part) for part in seen) <= at_once
    for s, result in enumerate(results):
        assert result.params["w"].flatten().tolist() == [2 * (100.0 * s + m) for m in range(3)]
        assert result.uploads["u"].flatten().tolist() == [-(100.0 * s + m) for m in range(3)]
        assert result.metrics == [{"accuracy": 0.0}, {"accuracy": 1.0}, {"accuracy": 2.0}]


@pytest.mark.parametrize("at_once", [1, 2, 3, 10**9])
def test_only_what_can_be_stacked_comes_together(at_once: int, model: Model) -> None:
    """Seeds with other numbers of clients, or downloads of other shapes; results keep the order of the turns."""
    turns = [
        turn(model, 0, (0, 2)),
        turn(model, 1, (0, 1, 2)),
        turn(model, 2, (1, 2)),
        turn(model, 3, (0, 1), torch.zeros(2)),
        turn(model, 4, (0, 1), torch.zeros(3)),
        turn(model, 5, (1, 2), torch.zeros(2)),
    ]
    seen: list[list[tuple[int, tuple[int, ...]]]] = []
    results = in_chunks(turns, at_once, double(seen))
    for own, result in zip(turns, results, strict=True):
        assert torch.equal(result.params["w"], 2 * own.params["w"])
        assert result.metrics == [{"accuracy": float(m)} for m in own.clients]
    if at_once == 10**9:
        assert [[seed for seed, _ in part] for part in seen] == [[0, 2], [1], [3, 5], [4]]


def test_seeds_of_a_model_that_draws_random_numbers_stay_apart(make_model: Callable[..., Model]) -> None:
    seen: list[list[tuple[int, tuple[int, ...]]]] = []
    model = make_model(dropout=0.5)
    in_chunks([turn(model, s, (0, 1)) for s in range(2)], 10**9, double(seen))
    assert seen == [[(0, (0, 1))], [(1, (0, 1))]]


def test_diagnostics_and_scores_are_joined(model: Model) -> None:
    def compute(part: list[ClientBatch]) -> list[Personalised]:
        return [Personalised(own.params, {"d": own.params["w"].expand(-1, 2)}, []) for own in part]

    (result,) = in_chunks([turn(model, 1, (0, 1, 2))], 2, compute)
    assert result.diagnostics["d"].tolist() == [[100, 100], [101, 101], [102, 102]]
    assert result.metrics == []


def test_a_result_of_one_piece_is_not_copied(model: Model) -> None:
    own = turn(model, 0, (0, 1))
    (result,) = in_chunks([own], 10**9, lambda part: [Trained(part[0].params, {}, [])])
    assert result.params["w"].data_ptr() == own.params["w"].data_ptr()
