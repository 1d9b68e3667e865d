"""A run between two rounds as one flat mapping of tensors and plain values, over all its seeds.

Every random draw is keyed by what it is for, so there is no generator to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fedc2i.core.params import Params, prefixed, size_in_bytes, unprefixed
from fedc2i.data.federation import Federation
from fedc2i.engine import state_check
from fedc2i.engine.client import RunContext
from fedc2i.engine.records import Outcome, Round
from fedc2i.engine.seed_run import SeedRun
from fedc2i.engine.settings import EngineSettings
from fedc2i.methods.base import Method
from fedc2i.models.model import Model

State = tuple[Params, dict[str, Any]]
Keep = Callable[[int, bool, Callable[[], State]], None]  # the round, whether it was the last, and how to get the state


class Start(NamedTuple):
    """Where a run that was cut off goes on.

    Attributes:
        round: the last round that counts.
        tensors: of the state after it.
        values: of the state after it.
        last: every seed's last report so far.
    """

    round: int
    tensors: Params
    values: Mapping[str, Any]
    last: Mapping[int, Round]


def state_of(lanes: Sequence[SeedRun], outcomes: Mapping[int, Outcome]) -> State:
    """Of the seeds that go on, and of those that have ended."""
    tensors: Params = {}
    values: dict[str, Any] = {}
    for lane in lanes:
        own, said = lane.state()
        tensors |= prefixed(f"seed{lane.recipe.seed}/", own)
        values[str(lane.recipe.seed)] = said
    for seed, outcome in outcomes.items():
        tensors |= prefixed(f"seed{seed}/own/", outcome.trained) | prefixed(f"seed{seed}/received/", outcome.received)
        values[str(seed)] = {"ended": outcome.last.round}
    return tensors, values


def size_of_state(
    method: Method, model: Model, federation: Federation, settings: EngineSettings, seeds: Sequence[int]
) -> int:
    """About how many bytes of tensors a checkpoint has.

    Every client's own model and what it received; its upload, taken for a model as well, unless all take part and
    send their own, which is written once. What only the server has is not counted: mostly one model.
    """
    recipe, clients = RunContext(method, model, settings, settings.rounds, 0), len(federation.clients)
    some = settings.participants(clients)
    received = clients if settings.evaluate_every == 1 else some
    uploads = clients if settings.clip or settings.attack or some < clients else 0
    own = recipe.first_model(federation.names[0], settings.init)  # with private parts, which are not sent
    sent = {name: own[name] for name in (*model.body_names, *model.head_names) if name in own}
    return len(seeds) * ((clients + received) * size_in_bytes(own) + uploads * size_in_bytes(sent))


def ends_of(values: Mapping[str, Any], round: int) -> dict[int, int]:
    """By seed the last round it has been through, of a state after ``round``."""
    return {int(seed): int(own.get("ended", round)) for seed, own in values.items()}


def require_fit(
    method: Method,
    model: Model,
    federation: Federation,
    settings: EngineSettings,
    seeds: Sequence[int],
    state: State,
    round: int,
) -> None:
    """Refuses a state after ``round`` that `put_back` would refuse, at the cost of a model.

    Raises:
        UserError: if it is of another model or of other clients, or damaged.
    """
    tensors, values = state
    for seed in seeds:
        recipe = RunContext(method, model, settings, settings.rounds, seed)
        own, said = unprefixed(f"seed{seed}/", tensors), values.get(str(seed), {})
        state_check.check(recipe, settings, federation.names, own, said, round)


def put_back(start: Start, lanes: Sequence[SeedRun], device: torch.device) -> tuple[list[SeedRun], dict[int, Outcome]]:
    """Takes a state in; returns the seeds that go on, and what those that have ended left behind.

    Raises:
        UserError: if it is of another model or of other clients, or damaged.
    """
    running: list[SeedRun] = []
    outcomes: dict[int, Outcome] = {}
    for lane in lanes:
        seed = lane.recipe.seed
        own, said = unprefixed(f"seed{seed}/", start.tensors), start.values.get(str(seed), {})
        lane.check(own, said, start.round)
        if "ended" in said:
            trained, received = (
                {name: tensor.to(device) for name, tensor in unprefixed(part, own).items()}
                for part in ("own/", "received/")
            )
            outcomes[seed] = Outcome(trained, received, start.last[seed])
        else:
            lane.restore(own, said, start.round)
            running.append(lane)
    return running, outcomes
