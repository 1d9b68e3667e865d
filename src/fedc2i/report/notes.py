"""What stands below a table of results: attackers, other settings than the protocol's, reconstructions, privacy."""

from __future__ import annotations

from collections.abc import Sequence

from fedc2i.engine.attacks import MOST_NAMED
from fedc2i.report.published import published_row
from fedc2i.runs.results import Result

MOST_DRAWS = 6  # different sets of attackers in a note


def attack_notes(results: Sequence[Result]) -> list[str]:
    """A line for every attack among the results, and one for every result of which no upload was ever usable."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.attackers:
            found.setdefault(_attackers(result), []).append(result.label)
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


def reconstructions(results: Sequence[Result]) -> list[str]:
    """A line for every method that had to be reconstructed."""
    return list(dict.fromkeys(result.method.reconstruction for result in results if result.method.reconstruction))


def privacy_costs(results: Sequence[Result]) -> list[str]:
    """A line for every ε among results whose uploads were clipped."""
    found: dict[str, list[str]] = {}
    for result in results:
        if result.privacy is not None:
            found.setdefault(str(result.privacy), []).append(result.label)
    return [f"Privacy of {', '.join(labels)}: {text}." for text, labels in found.items()]


def other_protocol(result: Result) -> list[str]:
    """A warning where published rows stand beside results of other settings."""
    preset, config = result.federation.preset, result.config
    other = [name for name in ("model", "rounds") if preset.get(name, getattr(config, name)) != getattr(config, name)]
    if not other or not published_row(result):
        return []
    listed = ", ".join(f"{name} {getattr(config, name)} instead of {preset[name]}" for name in other)
    return [f"Not the protocol on {config.data} ({listed}): do not compare with the published rows."]


def _attackers(result: Result) -> str:
    """By attack the clients, each set of them with its seeds."""
    draws: dict[str, dict[tuple[str, ...], list[int]]] = {}
    for seed, kinds in result.attackers.items():
        for kind, names in kinds.items():
            draws.setdefault(kind, {}).setdefault(tuple(names), []).append(seed)
    return "; ".join(f"{kind} by {_draws(own)}" for kind, own in draws.items())


def _draws(own: dict[tuple[str, ...], list[int]]) -> str:
    listed = [f"{_clients(names)} (seed{'s' * (len(seeds) > 1)} {_listed(seeds)})" for names, seeds in own.items()]
    more = len(listed) - MOST_DRAWS
    return ", ".join(listed[:MOST_DRAWS]) + (f" and others in {more} more draws, see summary.json" if more > 0 else "")


def _clients(names: tuple[str, ...]) -> str:
    more = len(names) - MOST_NAMED
    *first, last = [*names[:MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
    return f"{', '.join(first)} and {last}" if first else last


def _listed(parts: Sequence[object]) -> str:
    return ", ".join(map(str, parts))
