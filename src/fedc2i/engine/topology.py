"""Who receives whose models: everyone's, those of the neighbours on a ring, of some drawn clients, or from a file.

A file has one line for every client, ``client: neighbour, neighbour``: whom it receives from, besides itself. The other
direction needs its own line. A client with nothing after its colon receives from no other. A name with a colon or a
comma in it stands in double quotes. Empty lines and those that begin with ``#`` are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from fedc2i.core import seeding
from fedc2i.core.errors import UserError, nearest, one_line
from fedc2i.engine.records import MOST_NAMED

ALLOWED = "full, ring, random:K or a FILE"
MOST_BYTES = 2**22  # of a file
FORM = "'client: neighbour, neighbour'"
_TOKEN = re.compile(r'"[^"]*"|[^":,]+|.')  # no two of them can match the same text: time is linear in it


def parse(text: str, names: Sequence[str], seed: int) -> list[tuple[int, ...]]:
    """For each client of ``names`` the clients it receives from, itself among them, in table order.

    ``full``; ``ring``: each client, the one before and the one after it in the table; ``random:K``: each client and K
    others, drawn once for a run by its seed; or a file's path (see above).

    Raises:
        UserError: for anything else, or a file that cannot be read or does not fit the clients.
    """
    count = len(names)
    neighbours: Sequence[Sequence[int]]
    if text == "full":
        neighbours = [range(count)] * count
    elif text == "ring":
        neighbours = [((m - 1) % count, (m + 1) % count) for m in range(count)]
    elif text.startswith("random:"):
        neighbours = _draw(text, count, seed)
    else:
        neighbours = _read(text, names)
    return [tuple(sorted({m, *own})) for m, own in enumerate(neighbours)]


def _draw(text: str, count: int, seed: int) -> list[list[int]]:
    wanted = text.removeprefix("random:")
    if count < 2:
        raise UserError(f"topology={one_line(text)} needs at least 2 clients, here is one; use full")
    if not (wanted.isdecimal() and len(wanted) < 10 and 1 <= int(wanted) < count):
        raise UserError(f"topology=random:K: K must be 1..{count - 1} for {count} clients, got '{one_line(wanted)}'")
    generator = seeding.generator(seed, "topology")
    drawn = [torch.randperm(count - 1, generator=generator)[: int(wanted)].tolist() for _ in range(count)]
    return [[other + (other >= m) for other in own] for m, own in enumerate(drawn)]


def _read(path: str, names: Sequence[str]) -> list[list[int]]:
    """Each client's neighbours, from a file."""
    lines, path = _text(path).splitlines(), one_line(path, 300)
    places = {name: m for m, name in enumerate(names)}
    found: dict[int, list[int]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path}: line {number}"
        parts = _split(line)
        if parts is None:
            raise UserError(f"{where} must be {FORM}, with names of clients, got '{one_line(line)}'")
        for name in parts:
            if name not in places:
                raise UserError(f"{where}: no client '{one_line(name)}', allowed are {_some(names)}")
        client, *neighbours = (places[name] for name in parts)
        if client in found:
            raise UserError(f"{where}: a second line for client '{one_line(names[client])}', allowed is one for each")
        found[client] = neighbours
    missing = [name for name, m in places.items() if m not in found]
    if missing:
        raise UserError(f"{path}: no line for {_some(missing)}; every client needs one, {FORM} or just 'client:'")
    return [found[m] for m in range(len(names))]


def _text(path: str) -> str:
    """What a file holds, if that is text of a decent size."""
    try:
        if not Path(path).is_file():  # a pipe or a device would never end
            reason = "not a file" if Path(path).exists() else "no such file"
            hint = nearest(path, ("full", "ring", "random"))
            raise UserError(f"topology must be {ALLOWED}, got '{one_line(path, 300)}' ({reason}){hint}")
        with Path(path).open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise UserError(f"{one_line(path, 300)}: too large, allowed are {MOST_BYTES:,} bytes of lines {FORM}")
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{one_line(path, 300)}: not a text file, expected lines {FORM} in UTF-8") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "not a path"
        raise UserError(f"topology must be {ALLOWED}, got '{one_line(path)}' ({reason})") from None


def _split(line: str) -> list[str] | None:
    """The names in a line, the client's first; None if it has another form."""
    tokens = [token for part in _TOKEN.findall(line) if (token := part.strip())]
    names, marks = tokens[::2], tokens[1::2]
    ends_well = len(tokens) == 2 or len(tokens) % 2 == 1
    if not ends_well or marks != [":", *[","] * (len(marks) - 1)] or any(name in (":", ",", '"') for name in names):
        return None
    return [name.strip('"') for name in names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(one_line(name) for name in names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
