"""Warnings beside the verdict: runs with other settings or data, attacks, rejected uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedc2i.report.html.side_by_side import last_round, settings_that_differ
from fedc2i.runs.results import Result

MOST_SETTINGS = 5  # that are named; the table below the verdict has them all
MOST_CLIENTS = 6  # whose uploads are named


def warning_notes(results: Sequence[Result]) -> tuple[str, ...]:
    """Sentences that a reader must know before believing the verdict."""
    return tuple(filter(None, (_unequal(results), _other_data(results), *_attacked(results), *_rejected(results))))


def rejected_uploads(result: Result) -> dict[str, int]:
    """How many uploads were rejected, by client; of a run that was read back only its summary says so."""
    if result.refused:
        return result.refused
    written: Any = result.written.get("refused_uploads", {})
    if not isinstance(written, Mapping):
        return {}
    return {name: written[name] for name in result.federation.names if type(written.get(name)) is int and written[name]}


def _unequal(results: Sequence[Result]) -> str:
    differing = settings_that_differ(results)
    done = [str(last_round(one)) for one in results]
    if len(set(done)) > 1 and all(name != "rounds" for name, _ in differing):  # some stopped early
        differing.insert(0, ("rounds run", done))
    if not differing:
        return ""
    labels = [one.label for one in results]
    listed = "; ".join(f"{name} {_by_value(values, labels)}" for name, values in differing[:MOST_SETTINGS])
    more = f"; and {len(differing) - MOST_SETTINGS} more" if len(differing) > MOST_SETTINGS else ""
    return f"Not on equal terms: {listed}{more}."


def _by_value(values: Sequence[str], labels: Sequence[str]) -> str:
    """``6 (FedAvg, FedC²I), 3 (FedProx)``."""
    parts = []
    for value in dict.fromkeys(values):
        own = [label for label, other in zip(labels, values, strict=True) if other == value]
        who = ", ".join(own) if len(own) <= 3 else f"{len(own)} runs"
        parts.append(f"{value or 'not set'} ({who})")
    return ", ".join(parts)


def _other_data(results: Sequence[Result]) -> str:
    same = len({str(one.federation.checksums) for one in results}) == 1
    return "" if same else "Not the same data: the checksums of the runs' images differ."


def _attacked(results: Sequence[Result]) -> list[str]:
    """One sentence for each attack."""
    found: dict[str, list[str]] = {}
    for one in results:
        if one.config.attack:
            found.setdefault(one.config.attack, []).append(one.label)
    said = []
    for attack, labels in found.items():
        who = "" if len(labels) == len(results) else f" ({', '.join(labels)})"
        said.append(f"Under attack: {attack}{who}; averages include the attackers.")
    return said


def _rejected(results: Sequence[Result]) -> list[str]:
    said = []
    for one in results:
        counted = rejected_uploads(one)
        if counted:
            listed = ", ".join(f"{name} {count}" for name, count in list(counted.items())[:MOST_CLIENTS])
            more = f" and of {len(counted) - MOST_CLIENTS} more clients" if len(counted) > MOST_CLIENTS else ""
            of = f" of {one.label}" if len(results) > 1 else ""
            said.append(f"Rejected uploads{of}: {listed}{more}.")
    return said
