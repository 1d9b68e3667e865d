"""Dishonest and broken clients: who they are, and what they send instead of their upload.

Written ``KIND[:STRENGTH]@CLIENT[,CLIENT...]``, several joined by ``;``. A CLIENT is a name, in double quotes if it has
a comma or a semicolon in it, or a number or share of clients such as ``20%``, drawn once for a run by its seed.

label-flip      trains on labels C − 1 − c in place of c
sign-flip       sends start − (trained − start)
scaled:S        sends start + S (trained − start)
noise:S         sends trained + Gaussian noise of S times the tensor's own standard deviation
push:S          the same, but all that push have agreed on one noise for the whole run
pull:S          sends trained − that noise: of one that pushes and one that pulls, nearly nothing is left in the mean,
                S times half the difference of their tensors' standard deviations
nan             sends nothing but nan
free-rider      sends back what it started from

What is not part of the model (prototypes, statistics) has no start; it counts from zero. Integer entries, such as class
counts, are changed by a free-rider only. A client with several attacks does them in the order written.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedc2i.core import seeding
from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.core.params import Params, Stacked, replace_rows, row, stack
from fedc2i.engine.records import MOST_NAMED

KINDS: Mapping[str, float | None] = {  # with the default strength, None for kinds without one
    "label-flip": None,
    "sign-flip": None,
    "scaled": 10.0,
    "noise": 1.0,
    "push": 1.0,
    "pull": 1.0,
    "nan": None,
    "free-rider": None,
}
FORM = "KIND[:STRENGTH]@CLIENT[,CLIENT...], several joined by ;"
_PARTS = re.compile(r'(?:"[^"]*"|[^";])+')
_CLIENTS = re.compile(r'"[^"]*"|[^",]+')
_STRENGTH = re.compile(r"[0-9]{1,40}(\.[0-9]{0,40})?([eE][+-]?[0-9]{1,3})?", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,9}|[0-9]{1,3}(\.[0-9]{1,6})?%", re.ASCII)


@dataclass(frozen=True)
class Attack:
    """What an attacker does; ``strength`` is nan for kinds without one."""

    kind: str
    strength: float = math.nan

    def __str__(self) -> str:
        return self.kind if KINDS[self.kind] is None else f"{self.kind}:{repr(self.strength).removesuffix('.0')}"


Attackers = Mapping[str, tuple[Attack, ...]]  # by client's name


def parse(text: str, names: Sequence[str], seed: int) -> dict[str, tuple[Attack, ...]]:
    """Who of the clients ``names`` attacks, and how; an empty text means no attacker.

    Raises:
        UserError: for an unknown kind, strength or client, or more clients to be drawn than there are.
    """
    entries = [(attack, _clients(wanted, names)) for attack, wanted in _entries(text)]
    named = {name for _, wanted in entries for name in wanted if isinstance(name, str)}
    order = torch.randperm(len(names), generator=seeding.generator(seed, "attackers")).tolist()
    drawn = iter([names[m] for m in order if names[m] not in named])
    found: dict[str, list[Attack]] = {}
    for attack, wanted in entries:
        for one in wanted:
            whose = [one] if isinstance(one, str) else list(itertools.islice(drawn, one))
            if not isinstance(one, str) and len(whose) < one:
                raise UserError(f"attack={one_line(text)}: more attackers than the {len(names)} clients there are")
            for name in whose:
                found.setdefault(name, []).append(attack)
    return {name: tuple(found[name]) for name in names if name in found}


def by_kind(text: str, names: Sequence[str], seed: int) -> dict[str, list[str]]:
    """The same the other way round: by attack, written as `Attack` is, the clients that do it, in their order."""
    found: dict[str, list[str]] = {}
    for name, own in parse(text, names, seed).items():
        for attack in dict.fromkeys(own):
            found.setdefault(str(attack), []).append(name)
    return found


def resolved(text: str, names: Sequence[str], seed: int) -> str:
    """The same with every attacker named, for a site that knows no other client's name.

    Raises:
        UserError: as `parse`, and for an attacker with a double quote in its name, which cannot be written so.
    """
    found = parse(text, names, seed)
    for name in found:
        if '"' in name:
            raise UserError(f"attack: client '{one_line(name)}' has a double quote in its name, rename it or spare it")
    return ";".join(f'{attack}@"{name}"' for name, own in found.items() for attack in own)


def read_resolved(text: str) -> dict[str, tuple[Attack, ...]]:
    """Who attacks, and how, from `resolved`; raises `UserError` for an unknown kind or strength."""
    found: dict[str, list[Attack]] = {}
    for attack, wanted in _entries(text):
        for name in wanted:
            found.setdefault(name.strip('"'), []).append(attack)
    return {name: tuple(own) for name, own in found.items()}


def apply(attack: Attack, upload: Params, start: Params, key: tuple[int, str, int]) -> Params:
    """What the attacker sends instead of its upload; ``start`` is the model its local run started from.

    The key is seed, client's name and round, which decide the noise.
    """

    def sent(name: str, tensor: Tensor) -> Tensor:
        from_start = start.get(name.rpartition("/")[2])  # a method may send tensors under a tag, see methods.messages
        before = torch.zeros_like(tensor) if from_start is None else from_start.to(tensor.dtype)
        if attack.kind == "free-rider":
            return before
        if not tensor.is_floating_point():
            return tensor
        if attack.kind == "sign-flip":
            return before - (tensor - before)
        if attack.kind == "scaled":
            return before + attack.strength * (tensor - before)
        if attack.kind in ("noise", "push", "pull"):
            whose = key if attack.kind == "noise" else (key[0], "agreed")
            drawn = torch.randn(tensor.shape, generator=seeding.generator(*whose, "attack", name)).to(tensor)
            away = attack.strength * tensor.std(correction=0) * drawn
            return tensor - away if attack.kind == "pull" else tensor + away
        return torch.full_like(tensor, torch.nan) if attack.kind == "nan" else tensor

    return {name: sent(name, tensor) for name, tensor in upload.items()}


def replace_uploads(
    attackers: Attackers, uploads: Stacked, starts: Stacked, clients: Sequence[str], seed: int, number: int
) -> Stacked:
    """The uploads of ``clients`` in a round, with the rows of attackers replaced."""
    bad, sent = [k for k, name in enumerate(clients) if name in attackers], []
    for k in bad:
        upload, start = row(uploads, k), row(starts, k)
        for attack in attackers[clients[k]]:
            upload = apply(attack, upload, start, (seed, clients[k], number))
        sent.append(upload)
    return replace_rows(uploads, bad, stack(sent))


def _entries(text: str) -> list[tuple[Attack, list[str]]]:
    """Every part's attack, and its clients as written."""
    found = []
    for part in filter(str.strip, _PARTS.findall(text)):
        what, at, whose = part.strip().partition("@")
        clients = [name for name in map(str.strip, _CLIENTS.findall(whose)) if name]
        if not at or not clients:
            raise UserError(f"attack must be {FORM}, got '{one_line(part.strip())}'")
        found.append((_attack(what.strip()), clients))
    if (text.strip() and not found) or text.count('"') % 2:
        raise UserError(f"attack must be {FORM}, got '{one_line(text)}'")
    return found


def _attack(text: str) -> Attack:
    kind, colon, strength = text.partition(":")
    if kind not in KINDS:
        raise UserError(f"attack: no kind '{one_line(kind)}'{nearest(kind, KINDS)}, allowed are {', '.join(KINDS)}")
    usual = KINDS[kind]
    if not colon:
        return Attack(kind) if usual is None else Attack(kind, usual)
    if usual is None:
        raise UserError(f"attack: {kind} has no strength, got '{one_line(text)}'")
    if not _STRENGTH.fullmatch(strength) or not math.isfinite(float(strength)):
        raise UserError(f"attack: the strength of {kind} must be a number, at least 0, got '{one_line(strength)}'")
    return Attack(kind, float(strength))


def _clients(wanted: Sequence[str], names: Sequence[str]) -> list[str | int]:
    """Names, and for numbers and shares how many clients are to be drawn."""
    found: list[str | int] = []
    for text in wanted:
        if text.strip('"') in names:
            found.append(text.strip('"'))
            continue
        share = _COUNT.fullmatch(text)
        number = float(text[:-1]) / 100 * len(names) if share and text.endswith("%") else int(text) if share else 0
        if not 0 < number <= len(names):
            some = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
            hint = nearest(text.strip('"'), names)
            drawn = f"a number from 1 to {len(names)} or a share such as 20%"
            raise UserError(f"attack: no client '{one_line(text)}'{hint}, allowed are {some}, {drawn}")
        found.append(max(1, round(number)))
    if len({name for name in found if isinstance(name, str)}) < sum(isinstance(name, str) for name in found):
        raise UserError(f"attack: a client is named twice in '{one_line(','.join(wanted))}'")
    return found
