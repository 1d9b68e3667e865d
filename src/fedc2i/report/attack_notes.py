"""What a table of runs says below it of attackers, and of runs in which nobody's upload was usable."""

from __future__ import annotations

from collections.abc import Sequence

from fedc2i.engine.attacks import MOST_NAMED
from fedc2i.runs.results import Result

MOST_DRAWS = 6  # different sets of attackers in a note


def attack_notes(results: Sequence[Result]) -> list[str]:
    """A line for every attack among the results, and one for every result of which no upload was ever usable."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.attackers:
            found.setdefault(_who(result), []).append(result.label)
    everywhere = len(found) == 1 and sum(map(len, found.values())) == len(results)
    notes = [
        f"Under attack{'' if everywhere else f' ({_listed(labels)})'}: {who}; averages include the attackers."
        for who, labels in found.items()
    ]
    return notes + [
        f"{result.label}: no upload of any client was ever usable (seed{'s' * (len(result.unheard) > 1)} "
        f"{_listed(result.unheard)}); nobody learned from anyone else."
        for result in results
        if result.unheard
    ]


def _who(result: Result) -> str:
    """By attack the clients, each set of them with its seeds."""
    draws: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for seed, kinds in result.attackers.items():
        for kind, names in kinds.items():
            draws.setdefault(kind, {}).setdefault(tuple(names), []).append(seed)
    return "; ".join(f"{kind} by {_draws(own)}" for kind, own in draws.items())


def _draws(own: dict[tuple[str, ...], list[int]]) -> str:
    said = [f"{_clients(names)} (seed{'s' * (len(seeds) > 1)} {_listed(seeds)})" for names, seeds in own.items()]
    more = len(said) - MOST_DRAWS
    return ", ".join(said[:MOST_DRAWS]) + (f" and others in {more} more draws, see summary.json" if more > 0 else "")


def _clients(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    *first, last = [*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{', '.join(first)} and {last}" if first else last


def _listed(parts: Sequence[object]) -> str:
    return ", ".join(map(str, parts))
