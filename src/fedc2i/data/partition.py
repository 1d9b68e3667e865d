"""Splits the clients of a federation further, with a chosen kind of heterogeneity.

One client becomes one data set over many clients. Several clients are split one by one, which combines domain shift
with label or quantity skew.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedc2i.core.errors import UserError
from fedc2i.core.seeding import key
from fedc2i.data.federation import Client, Federation, Split

FORMS = (
    "iid:K, dirichlet:K:ALPHA, shards:K:S or quantity:K:ALPHA "
    "(K and S are whole numbers from 1, ALPHA a number from 0.001 to 1000000)"
)
REDRAWS = 100

Indices = np.ndarray[Any, np.dtype[np.int64]]
_WHOLE = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


@dataclass(frozen=True)
class _Spec:
    """A parsed spec: ``kind`` over ``count`` clients, with ALPHA or S in ``setting`` (0 for iid)."""

    text: str
    kind: str
    count: int
    setting: float


def partition(federation: Federation, spec: str, seed: int = 0, *, min_samples: int = 2) -> Federation:
    """Splits every client into K clients named ``<client>/1`` to ``<client>/K``.

    Args:
        federation: what to split.
        spec: ``iid:K`` (at random, equal sizes), ``dirichlet:K:ALPHA`` (label skew: the shares of each class
            over the K clients are drawn from Dirichlet(ALPHA)), ``shards:K:S`` (sorted by label, cut into K*S
            shards, S to each) or ``quantity:K:ALPHA`` (sizes from Dirichlet(ALPHA), labels at random).
        seed: the only source of randomness, with the client's name; other clients do not matter.
        min_samples: training samples a new client must have, from 1; BatchNorm needs two.

    Returns:
        The new federation. Every sample is in exactly one new client. Validation and test are divided by each
        new client's share of every training class, so that a client is tested on its own distribution; each
        has at least one test sample, but may have no validation sample.

    Raises:
        UserError: for a malformed spec, an impossible setting, or one that fails in 100 redraws.
    """
    parsed = _parse(spec)
    clients = [
        part
        for client in federation.clients
        for part in _split(client, parsed, len(federation.classes), seed, min_samples)
    ]
    note = f"Every client is split by {spec} with seed {seed}; tests follow each new client's own class shares."
    return replace(
        federation,
        name=f"{federation.name} [{spec}]",
        clients=tuple(clients),
        notes=(*federation.notes, note),
        averages={
            title: tuple(f"{member}/{k + 1}" for member in members for k in range(parsed.count))
            for title, members in federation.averages.items()
        },
    )


def _parse(spec: str) -> _Spec:
    kind, *numbers = spec.split(":")
    arity = {"iid": 1, "dirichlet": 2, "shards": 2, "quantity": 2}
    valid = arity.get(kind) == len(numbers) and _WHOLE.fullmatch(numbers[0]) is not None
    setting = 0.0
    if valid and kind == "shards":
        valid = _WHOLE.fullmatch(numbers[1]) is not None
        setting = float(numbers[1]) if valid else setting
    elif valid and kind != "iid":
        try:
            setting = float(numbers[1])
        except ValueError:
            valid = False
        valid = valid and 1e-3 <= setting <= 1e6
    if not valid:
        raise UserError(f"partition '{spec}' is not understood, allowed are {FORMS}")
    return _Spec(spec, kind, int(numbers[0]), setting)


def _split(client: Client, spec: _Spec, classes: int, seed: int, min_samples: int) -> list[Client]:
    where = f"partition {spec.text}: client '{client.name}'"
    fewer = "use a smaller K or S" if spec.kind == "shards" else "use a smaller K"
    needed = spec.count * max(min_samples, int(spec.setting) if spec.kind == "shards" else 1)
    for part, have, least in (
        ("training", len(client.train), needed),
        ("test", len(client.test), spec.count),
    ):
        if have < least:
            raise UserError(f"{where} has {have} {part} samples but at least {least} are needed; {fewer}")
    rng = np.random.default_rng(key(seed, client.name, "partition"))
    labels = client.train.y.numpy()
    for _ in range(1 + REDRAWS):
        train = _DRAWS[spec.kind](labels, spec, rng)
        counts = np.stack([np.bincount(labels[rows], minlength=classes) for rows in train])
        test = _follow(counts, client.test.y.numpy(), rng)
        if min(map(len, train)) >= min_samples and min(map(len, test)) >= 1:
            break
    else:
        remedy = f"{fewer} or a larger ALPHA" if spec.kind in ("dirichlet", "quantity") else fewer
        raise UserError(
            f"{where}: after {REDRAWS} redraws some new client still has fewer than {min_samples} training "
            f"samples or no test sample; {remedy}"
        )
    validation = _follow(counts, client.validation.y.numpy(), rng)
    return [
        replace(
            client,
            name=f"{client.name}/{k + 1}",
            train=_take(client.train, train[k]),
            validation=_take(client.validation, validation[k]),
            test=_take(client.test, test[k]),
        )
        for k in range(spec.count)
    ]


def _take(split: Split, rows: Indices) -> Split:
    return split.take(torch.from_numpy(np.sort(rows)))


def _iid(labels: Indices, spec: _Spec, rng: np.random.Generator) -> list[Indices]:
    return np.array_split(rng.permutation(len(labels)), spec.count)


def _dirichlet(labels: Indices, spec: _Spec, rng: np.random.Generator) -> list[Indices]:
    blocks = [_cut(rng.permutation(np.flatnonzero(labels == label)), spec, rng) for label in np.unique(labels)]
    return [np.concatenate(parts) for parts in zip(*blocks, strict=True)]


def _shards(labels: Indices, spec: _Spec, rng: np.random.Generator) -> list[Indices]:
    mixed = rng.permutation(len(labels))
    by_label = mixed[np.argsort(labels[mixed], kind="stable")]
    per_client = int(spec.setting)
    shards = np.array_split(by_label, spec.count * per_client)
    dealt = rng.permutation(len(shards)).reshape(spec.count, per_client)
    return [np.concatenate([shards[number] for number in row]) for row in dealt]


def _quantity(labels: Indices, spec: _Spec, rng: np.random.Generator) -> list[Indices]:
    return _cut(rng.permutation(len(labels)), spec, rng)


def _cut(rows: Indices, spec: _Spec, rng: np.random.Generator) -> list[Indices]:
    """Cuts ``rows`` into K pieces whose sizes are drawn from Dirichlet(ALPHA)."""
    shares = rng.dirichlet(np.full(spec.count, spec.setting))
    return np.split(rows, np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(np.int64))


_DRAWS: dict[str, Callable[[Indices, _Spec, np.random.Generator], list[Indices]]] = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "shards": _shards,
    "quantity": _quantity,
}


def _follow(counts: Indices, labels: Indices, rng: np.random.Generator) -> list[Indices]:
    """Divides samples by the class shares in ``counts`` ``(K, C)``, or by the clients' sizes for a class nobody has.

    Shares are rounded down; the remaining samples go to the clients that are furthest below their total.
    """
    parts: list[list[Indices]] = [[np.empty(0, np.int64)] for _ in counts]
    behind = np.zeros(len(counts))
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        weight = counts[:, label] if counts[:, label].any() else counts.sum(axis=1)
        given, rest = np.divmod(weight * len(rows), weight.sum())
        behind += rest / weight.sum()
        spare = len(rows) - int(given.sum())
        eligible = rng.permutation(np.flatnonzero(rest))
        lucky = eligible[np.argsort(-behind[eligible], kind="stable")[:spare]]
        given[lucky] += 1
        behind[lucky] -= 1
        for part, piece in zip(parts, np.split(rows, np.cumsum(given)[:-1]), strict=True):
            part.append(piece)
    return [np.concatenate(part) for part in parts]
