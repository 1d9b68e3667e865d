"""Federations with a planted truth: one client whose worth to the others is known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fedc2i.data.federation import Client, Federation, Split

CHANGED = 1  # the second client in table order
PLANTS = ("flipped labels", "noise", "free-rider", "other classes", "duplicate")


@dataclass(frozen=True)
class Planted:
    """A federation, the client that was changed, how it attacks, and the client it is a copy of."""

    federation: Federation
    client: int
    attack: str = ""
    copy_of: int | None = None


def plant(kind: str, federation: Federation) -> Planted | None:
    """One client is changed; None where the data does not allow it."""
    clients, which = list(federation.clients), CHANGED
    name = clients[which].name
    if kind == "flipped labels":
        return Planted(federation, which, f'label-flip@"{name}"')
    if kind == "free-rider":
        return Planted(federation, which, f'free-rider@"{name}"')
    if kind == "noise":
        noise = federation.input.noise(len(clients[which].train))
        clients[which] = replace(clients[which], train=Split(noise, clients[which].train.y))
    elif kind == "duplicate":
        clients[which] = replace(clients[0], name=f"copy of {clients[0].name}")
        return Planted(_with(federation, clients, kind), which, copy_of=0)
    else:
        middle = len(federation.classes) // 2
        if middle < 2:
            return None
        own, others = range(middle, 2 * middle), range(middle)
        clients = [_only(client, own if k == which else others) for k, client in enumerate(clients)]
    return Planted(_with(federation, clients, kind), which)


def joined_twice(federation: Federation, which: int) -> Federation:
    """The same with a further client that has the data of one of them: it joins under two names."""
    again = replace(federation.clients[which], name=f"{federation.names[which]} again")
    return _with(federation, [*federation.clients, again], f"{federation.names[which]} twice")


def _with(federation: Federation, clients: list[Client], kind: str) -> Federation:
    return replace(federation, clients=tuple(clients), averages={}, name=f"{federation.name} with {kind}")


def _only(client: Client, classes: range) -> Client:
    wanted, parts = torch.tensor(list(classes)), (client.train, client.validation, client.test)
    return Client(client.name, *(own.take(torch.isin(own.y, wanted).nonzero().flatten()) for own in parts))
