"""A run between two rounds as one flat mapping of tensors and plain values, over all its seeds.

Every random draw is keyed by what it is for, so there is no generator to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fedc2i.engine.lane import Lane
from fedc2i.engine.rounds import Outcome, Round
from fedc2i.errors import UserError, one_line
from fedc2i.params import Params, prefixed, unprefixed

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


def state_of(lanes: Sequence[Lane], outcomes: Mapping[int, Outcome]) -> State:
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


def ends_of(values: Mapping[str, Any], round: int) -> dict[int, int]:
    """By seed the last round it has been through, of a state after ``round``."""
    return {int(seed): int(own.get("ended", round)) for seed, own in values.items()}


def put_back(start: Start, lanes: Sequence[Lane], device: torch.device) -> tuple[list[Lane], dict[int, Outcome]]:
    """Takes a state in; returns the seeds that go on, and what those that have ended left behind.

    Raises:
        UserError: if it is of another model or of other clients, or damaged.
    """
    running: list[Lane] = []
    outcomes: dict[int, Outcome] = {}
    for lane in lanes:
        seed = lane.recipe.seed
        own, said = unprefixed(f"seed{seed}/", start.tensors), start.values[str(seed)]
        if "ended" in said:
            trained, received = (
                {name: tensor.to(device) for name, tensor in unprefixed(part, own).items()}
                for part in ("own/", "received/")
            )
            outcomes[seed] = Outcome(trained, received, start.last[seed])
        else:
            try:
                lane.restore(own, said, start.round)
            except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError) as error:
                raise UserError(f"the checkpoint after round {start.round} is damaged ({one_line(error)})") from None
            running.append(lane)
    return running, outcomes
