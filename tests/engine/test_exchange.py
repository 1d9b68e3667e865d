"""Who takes part in a round, and when a run is over early."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fedc2i.core.settings import EngineSettings
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import Exchange, Server, choose
from fedc2i.engine.records import Point, Round
from fedc2i.methods.base import Method
from fedc2i.methods.pfedgraph import PFedGraph
from fedc2i.models.model import Model


def test_all_take_part_unless_told_otherwise() -> None:
    assert choose(0, EngineSettings(), 5, 1) == (0, 1, 2, 3, 4)


def test_a_share_is_drawn_anew_every_round_and_repeatably() -> None:
    settings = EngineSettings(clients_per_round="40%")
    drawn = [choose(3, settings, 10, number) for number in range(1, 200)]
    assert all(list(own) == sorted(set(own)) and len(own) == 4 for own in drawn)
    counts = Counter(client for own in drawn for client in own)
    assert set(counts) == set(range(10))
    assert max(counts.values()) < 2 * min(counts.values())
    assert drawn == [choose(3, settings, 10, number) for number in range(1, 200)]
    assert drawn != [choose(4, settings, 10, number) for number in range(1, 200)]


def exchange(model: Model, patience: int, point: Point = "trained") -> Exchange:
    class Headlined(Method):
        headline = point

    settings = EngineSettings(patience=patience)
    context = RunContext(Headlined(), model, settings, 9, 0)
    return Exchange(context, settings, "ab", torch.tensor([1, 1]), context.first_models("ab", "common"))


def scored(accuracy: float, point: Point = "trained") -> Round:
    metrics = [{"accuracy": 99.0, "validation_accuracy": accuracy + off} for off in (-1, 1)]
    nothing = [{"validation_accuracy": 0.0}] * 2
    return Round(0, 1, 0.0, (), {"received": nothing, "trained": nothing, point: metrics}, {}, (), 0, 0)


@pytest.mark.parametrize(
    ("patience", "accuracies", "over"),
    [
        (1, (50, 60, 60), [False, False, True]),
        (2, (50, 40, 45), [False, False, True]),
        (2, (50, 40, 51, 50, 51), [False, False, False, False, True]),
        (0, (50, 40, 30), [False, False, False]),
    ],
)
@pytest.mark.parametrize("point", ["trained", "received"])
def test_it_is_over_when_the_accuracy_at_the_methods_own_point_has_not_risen(
    patience: int, accuracies: tuple[float, ...], over: list[bool], point: Point, model: Model
) -> None:
    one = exchange(model, patience, point)
    assert [one.should_stop(scored(own, point)) for own in accuracies] == over


def test_its_state_is_enough_to_go_on(model: Model) -> None:
    first, second = exchange(model, 2), exchange(model, 2)
    assert not any(first.should_stop(scored(own)) for own in (50, 40))
    second.restore(*first.state())
    assert second.should_stop(scored(45))


def test_a_server_opens_on_the_device_of_the_models() -> None:
    device = torch.device("meta")  # stands in for a GPU: it mixes with no tensor of the CPU
    server = Server(PFedGraph(), torch.ones(3, device=device), {"w": torch.zeros(3, 4, device=device)})
    assert server.state["w"].device == device
