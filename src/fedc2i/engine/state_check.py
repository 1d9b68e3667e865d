"""Whether a run can go on from a kept state: looked at as a whole, before anything is computed with it.

A checksum says that a file is what was written, not that it is of this run. The clients' models must be laid out as the
run's first model is, plain values must be of their kind and in range, and every tensor must be what the state itself
says of it: what a method sends up and down may change from round to round, so only the state knows that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, float32

from fedc2i.core.errors import UserError, one_line
from fedc2i.core.params import Params, unprefixed
from fedc2i.engine import topology
from fedc2i.engine.client import RunContext
from fedc2i.engine.participation import choose
from fedc2i.engine.server import REPORTS
from fedc2i.engine.settings import EngineSettings

Layout = dict[str, list[Any]]  # by name the type of its numbers, then its shape


def layout(tensors: Mapping[str, Tensor]) -> Layout:
    """What is to be said of tensors beside their numbers, in plain values."""
    return {name: [str(own.dtype).removeprefix("torch."), *own.shape] for name, own in tensors.items()}


def check(
    recipe: RunContext, settings: EngineSettings, names: Sequence[str], tensors: Params, values: Any, number: int
) -> None:
    """Refuses the state of one seed after a round, unless the run can go on from it.

    Args:
        recipe: the seed's.
        settings: of the run.
        names: the clients.
        tensors: what `SeedRun.state` gave, or the models of a seed that has ended.
        values: what belongs to them.
        number: the round.

    Raises:
        UserError: if it is of another model or of other clients, or damaged.
    """
    first = layout(recipe.first_model(names[0], settings.init))
    if layout(unprefixed("own/", tensors)) != _stacked(first, len(names)):
        raise UserError(f"the checkpoint after round {number} is of another model or of other clients")
    try:
        if "ended" in values:
            _require(_is_whole(values["ended"], 1, min(number, settings.rounds)), f"ended={values['ended']}")
            audience: Sequence[int] = range(len(names))
        else:
            _check_values(recipe, settings, names, values, number)
            _check_tensors(recipe, settings, names, tensors, values)
            audience = values["audience"]
        received = layout(unprefixed("received/", tensors))
        _require(received == _stacked(first, len(audience)), "what clients received is not laid out as their models")
    except (LookupError, ArithmeticError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"the checkpoint after round {number} is damaged ({one_line(error)})") from None


def _check_values(recipe: RunContext, settings: EngineSettings, names: Sequence[str], values: Any, number: int) -> None:
    clients = len(names)
    _require(1 <= number < settings.rounds, f"a seed that goes on behind round {number} of {settings.rounds}")
    sent, audience, (best, waited) = values["sent"], values["audience"], values["patience"]
    _require(len(sent) == clients, f"uploads of {len(sent)} clients, there are {clients}")
    _require(all(_is_whole(round, 0, number) for round in sent), f"sent={sent}: rounds 0 to {number}")
    _require(_are_clients(audience, clients), f"audience={audience}: there are {clients} clients")
    _require({*choose(recipe.seed, settings, clients, number + 1)} <= {*audience}, f"audience={audience}: too few")
    for download in values["downloads"]:
        _require(_are_clients(download, clients), f"downloads of {download}: there are {clients} clients")
    is_number = isinstance(best, int | float) and not isinstance(best, bool) and not math.isnan(best)
    _require(is_number and _is_whole(waited, 0, number), f"patience={[best, waited]}: a score and a count of rounds")
    _require(_is_whole(values["bytes_told"], 0, 2**63), f"bytes_told={values['bytes_told']}")


def _check_tensors(
    recipe: RunContext, settings: EngineSettings, names: Sequence[str], tensors: Params, values: Any
) -> None:
    found = layout(tensors)
    said = values.get("layout", found)  # an earlier version has none
    for name in {**said, **found}:
        was, now = said.get(name, "nothing"), found.get(name, "nothing")
        _require(was == now, f"{name}: {was} was kept, {now} is there")
    _require({*values["on_cpu"]} <= tensors.keys(), "on_cpu names what is not there")
    _require_rows(unprefixed("mailbox/", tensors), [len(names)], "the latest uploads")
    circles = topology.parse(settings.topology, names, recipe.seed).circles()
    for s, (circle, download) in enumerate(zip(circles, values["downloads"], strict=True)):
        own, sources = unprefixed(f"server{s}/", tensors), len(circle.sources)
        reports = unprefixed(REPORTS, own)
        _require_rows(unprefixed("personal/", own), [len(download)], "a download's rows")
        _require_rows(reports, [sources, sources], "reports")
        _require(all(one.dtype == float32 for one in reports.values()), "reports are not float32")


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


def _are_clients(value: Any, clients: int) -> bool:
    """Whether it is a list of different clients' numbers."""
    return (
        isinstance(value, list | tuple)
        and all(_is_whole(client, 0, clients - 1) for client in value)
        and len({*value}) == len(value)
    )
