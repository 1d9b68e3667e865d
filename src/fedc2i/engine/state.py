"""A run between two rounds as one flat mapping of tensors and plain values, over all its seeds.

Every random draw is keyed by its purpose, so there are no generators to save.
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
OnState = Callable[[int, bool, Callable[[], State]], None]  # the round, whether it was the last, and its state


class ResumePoint(NamedTuple):
    """Where an interrupted run continues: the state after ``round``, and every seed's last report so far."""

    round: int
    tensors: Params
    values: Mapping[str, Any]
    last: Mapping[int, Round]


def state_of(runs: Sequence[SeedRun], outcomes: Mapping[int, Outcome]) -> State:
    """The state of the seeds that continue, and of those that have ended."""
    tensors: Params = {}
    values: dict[str, Any] = {}
    for run in runs:
        own, own_values = run.state()
        tensors |= prefixed(f"seed{run.context.seed}/", own)
        values[str(run.context.seed)] = {**own_values, "layout": state_check.layout(own)}
    for seed, outcome in outcomes.items():
        tensors |= prefixed(f"seed{seed}/own/", outcome.trained) | prefixed(f"seed{seed}/received/", outcome.received)
        values[str(seed)] = {"ended": outcome.last.round}
    return tensors, values


def last_rounds(values: Mapping[str, Any], round: int) -> dict[int, int]:
    """By seed the last round it finished, from the values of a state after ``round``."""
    return {int(seed): int(own.get("ended", round)) for seed, own in values.items()}


def check_state(
    method: Method,
    model: Model,
    federation: Federation,
    settings: EngineSettings,
    seeds: Sequence[int],
    state: State,
    round: int,
) -> None:
    """Rejects a state after ``round`` that `restore` would reject, at the cost of one model.

    Raises:
        UserError: if it is of another model or of other clients, or damaged.
    """
    for seed in seeds:
        context = RunContext(method, model, settings, settings.rounds, seed)
        state_check.check(context, settings, federation.names, *_of_seed(seed, *state), round)


def restore(
    point: ResumePoint, runs: Sequence[SeedRun], device: torch.device
) -> tuple[list[SeedRun], dict[int, Outcome]]:
    """Returns the seeds that continue, and the outcomes of those that have ended.

    Raises:
        UserError: if the state is of another model or of other clients, or damaged.
    """
    running: list[SeedRun] = []
    outcomes: dict[int, Outcome] = {}
    for run in runs:
        seed = run.context.seed
        own, values = _of_seed(seed, point.tensors, point.values)
        state_check.check(run.context, run.settings, run.names, own, values, point.round)
        if "ended" in values:
            own = {name: tensor.to(device) for name, tensor in own.items()}
            outcomes[seed] = Outcome(unprefixed("own/", own), unprefixed("received/", own), point.last[seed])
        else:
            run.restore(own, values, point.round)
            running.append(run)
    return running, outcomes


def _of_seed(seed: int, tensors: Params, values: Mapping[str, Any]) -> tuple[Params, Any]:
    return unprefixed(f"seed{seed}/", tensors), values.get(str(seed), {})


def state_size(
    method: Method, model: Model, federation: Federation, settings: EngineSettings, seeds: Sequence[int]
) -> int:
    """About how many bytes of tensors a state has.

    Every client's own model and what it received; its upload, taken for a model as well, unless all take part and
    send their own, which is written once. What only the server has is not counted: mostly one model.
    """
    context, clients = RunContext(method, model, settings, settings.rounds, 0), len(federation.clients)
    some = settings.participants(clients)
    received = clients if settings.evaluate_every == 1 else some
    uploads = clients if settings.clip or settings.attack or some < clients else 0
    own = context.first_model(federation.names[0], settings.init)  # with private parts, which are not sent
    sent = {name: own[name] for name in (*model.body_names, *model.head_names) if name in own}
    return len(seeds) * ((clients + received) * size_in_bytes(own) + uploads * size_in_bytes(sent))
