"""Clients that try to raise their own value, alone or two together, and how they stand before and after.

boost           one client sends start + 3 (trained − start), which raises first-order measures threefold
two boost       two do
one model       the second trains on the first's samples only, and so sends its model under another name
one, boosted    the same, and both boost it
push and pull   the first sends its model plus a strong noise, the second minus it: the mean of all hardly changes, but
                a mean without one of them is spoilt by the other, which is what leaving a model out measures
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from experiments.agreement_plants import CHANGED
from fedc2i.data.federation import Federation
from fedc2i.runs.results import Array

TRICKS = ("boost", "two boost", "one model", "one, boosted", "push and pull")
BOOST, PUSH = 3, 5


@dataclass(frozen=True)
class Tricked:
    """A federation, the clients that raise their value, and how they attack."""

    federation: Federation
    members: tuple[int, ...]
    attack: str = ""


def trick(kind: str, federation: Federation) -> Tricked:
    """By the second and the third client; by the second alone where one does it."""
    members: tuple[int, ...] = (CHANGED,) if kind == "boost" else (CHANGED, CHANGED + 1)
    names = [f'"{federation.names[m]}"' for m in members]
    if kind == "push and pull":
        return Tricked(federation, members, f"push:{PUSH}@{names[0]};pull:{PUSH}@{names[1]}")
    attack = "" if kind == "one model" else f"scaled:{BOOST}@{','.join(names)}"
    if kind in ("one model", "one, boosted"):
        clients = list(federation.clients)
        first, second = (clients[m] for m in members)
        clients[members[1]] = replace(second, train=first.train)
        name = f"{federation.name} with one model of two"
        federation = replace(federation, clients=tuple(clients), averages={}, name=name)
    return Tricked(federation, members, attack)


def at_honest(table: Array, members: tuple[int, ...]) -> float:
    """The mean of values ``(M, M)`` of the members for all others: how much one of them is worth to one of those."""
    honest = [m for m in range(len(table)) if m not in members]
    return float(np.nanmean(table[np.ix_(honest, members)]))


def standing(table: Array, members: tuple[int, ...]) -> float:
    """The share of honest givers that a member is ranked above, the mean over honest receivers; ties count half."""
    honest, shares = [m for m in range(len(table)) if m not in members], []
    for receiver in honest:
        others = np.array([table[receiver, i] for i in honest if i != receiver])
        for own in table[receiver, list(members)]:
            shares.append(np.mean((others < own) + 0.5 * (others == own)))
    return float(np.nanmean(shares))
