"""Whether a checkpoint belongs to a run: all of it is checked before a run resumes from it.

A checksum shows that a file is as it was written, not that it belongs to this run, and run folders may come from
strangers. The clients' models must be laid out like the run's initial model, plain values must be of their type and in
range, and every tensor must have the layout that the state itself records: what a method sends may change from round to
round, so only the state knows that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params, unprefixed
from fedc2i.core.settings import EngineSettings
from fedc2i.data.federation import Federation
from fedc2i.engine.checkpoint import Layout, ResumePoint, State, layout
from fedc2i.engine.client import RunContext
from fedc2i.engine.exchange import REPORTS, audience, receiver_groups
from fedc2i.engine.records import POINTS, Outcome
from fedc2i.engine.seed_run import SeedRun
from fedc2i.methods.base import Method
from fedc2i.models.model import Model


def restore(
    point: ResumePoint, runs: Sequence[SeedRun], federation: Federation, device: torch.device
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
        _check_seed(run.context, run.settings, federation, own, values, point.round)
        if "ended" in values:
            own = {name: tensor.to(device) for name, tensor in own.items()}
            models = unprefixed("own/", own), unprefixed("received/", own)
            logits = {at: own[f"logits/{at}"] for at in POINTS if f"logits/{at}" in own}
            outcomes[seed] = Outcome(*models, point.last[seed], logits)
        else:
            run.restore(own, values, point.round)
            running.append(run)
    return running, outcomes


def _of_seed(seed: int, tensors: Params, values: Mapping[str, Any]) -> tuple[Params, Any]:
    return unprefixed(f"seed{seed}/", tensors), values.get(str(seed), {})


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
        _check_seed(context, settings, federation, *_of_seed(seed, *state), round)


def _check_seed(
    context: RunContext,
    settings: EngineSettings,
    federation: Federation,
    tensors: Params,
    values: Any,
    number: int,
) -> None:
    """`check_state` for one seed."""
    names, clients = federation.names, len(federation.names)
    first = layout(context.first_model(names[0], settings.init))
    if layout(unprefixed("own/", tensors)) != _stacked(first, clients):
        raise UserError(f"the checkpoint after round {number} is of another model or of other clients")
    try:
        if "ended" in values:
            _require(_is_whole(values["ended"], 1, min(number, settings.rounds)), f"ended={values['ended']}")
            _check_logits(unprefixed("logits/", tensors), federation)
            receivers = clients
        else:
            _require(1 <= number < settings.rounds, f"a seed that continues after round {number} of {settings.rounds}")
            _check_values(values, clients, number)
            _check_tensors(context, settings, names, tensors, values)
            receivers = len(audience(context.seed, settings, clients, number))
        received = layout(unprefixed("received/", tensors))
        _require(received == _stacked(first, receivers), "what clients received is not laid out as their models")
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the checkpoint after round {number} is damaged ({one_line(error)})") from None


def _check_logits(logits: Params, federation: Federation) -> None:
    """There are some at both points, or none: those of all seeds may have been too many."""
    shape = [sum(len(client.test) for client in federation.clients), len(federation.classes)]
    _require(logits.keys() in ({*POINTS}, set()), f"logits at the points {sorted(logits)}, expected both or none")
    for point, own in logits.items():
        found = layout({point: own})[point]
        _require(own.is_floating_point() and [*own.shape] == shape, f"logits/{point}: {found}, expected {shape}")


def _check_values(values: Any, clients: int, number: int) -> None:
    sent, (best, waited) = values["sent"], values["patience"]
    _require(len(sent) == clients, f"uploads of {len(sent)} clients, expected {clients}")
    _require(all(_is_whole(round, 0, number) for round in sent), f"sent={sent}: rounds 0 to {number}")
    sizes = values["norms"]
    _require(len(sizes) == clients and all(_is_size(size) for size in sizes), f"norms={sizes}: one for each client")
    for download in values["downloads"]:
        is_valid = isinstance(download, list | tuple) and len({*download}) == len(download)
        is_valid = is_valid and all(_is_whole(client, 0, clients - 1) for client in download)
        _require(is_valid, f"downloads of {download}: clients are 0 to {clients - 1}")
    is_number = isinstance(best, int | float) and not isinstance(best, bool) and not math.isnan(best)
    _require(is_number and _is_whole(waited, 0, number), f"patience={[best, waited]}: a score and a count of rounds")
    _require(_is_whole(values["report_bytes"], 0, 2**63), f"report_bytes={values['report_bytes']}")


def _check_tensors(
    context: RunContext, settings: EngineSettings, names: Sequence[str], tensors: Params, values: Any
) -> None:
    expected, found = values["layout"], layout(tensors)
    for name in {**expected, **found}:
        before, now = expected.get(name, "nothing"), found.get(name, "nothing")
        _require(before == now, f"{name}: {before} was saved, found {now}")
    _require({*values["on_cpu"]} <= tensors.keys(), "on_cpu names unknown tensors")
    _require_rows(unprefixed("mailbox/", tensors), [len(names)], "the latest uploads")
    groups = receiver_groups(context.seed, settings, names)
    for s, ((_, sources), download) in enumerate(zip(groups, values["downloads"], strict=True)):
        own = unprefixed(f"server{s}/", tensors)
        reports = unprefixed(REPORTS, own)
        _require_rows(unprefixed("personal/", own), [len(download)], "a download's rows")
        _require_rows(reports, [len(sources)] * 2, "reports")
        _require(all(one.dtype == torch.float32 for one in reports.values()), "reports are not float32")


def _stacked(one: Layout, count: int) -> Layout:
    return {name: [kind, count, *shape] for name, (kind, *shape) in one.items()}


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise ValueError(otherwise)


def _require_rows(tensors: Params, counts: Sequence[int], what: str) -> None:
    for name, own in tensors.items():
        _require([*own.shape[: len(counts)]] == counts, f"{what}: {name} has the shape {[*own.shape]}, of {counts}")


def _is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_size(value: Any) -> bool:
    return isinstance(value, float) and 0 <= value < math.inf
