"""What the robustness study found: honest clients' accuracy, the weight of attackers, and whether targets were met.

What counts as a success is decided here, whatever the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.verdict import Verdict
from fedc2i.analysis.significance import DIGITS
from fedc2i.engine import attacks
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.table import WHEN
from fedc2i.runs.results import Array, Result

NONE = "none"
FLOOR = "local"
OURS, MEAN = "fedc2i", "fedavg"  # the targets are about these
VECTOR = "influence_vector"
WEIGHTS: Mapping[str, str] = {VECTOR: "of models", "influence_matrix": "of classifier rows"}
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class Measured:
    """What is kept of a method under an attack.

    Attributes:
        label: the method and its options.
        headline: the point that its authors report.
        accuracy: by point the honest clients' mean test accuracy, ``(seeds,)``.
        weights: by diagnostic the weight that honest clients gave to the attackers, ``(seeds,)``; empty for a method
            that measures no weights.
        equal: what equal weights would give them, ``(seeds,)``.
        taken: whether an attacker's upload was ever weighted; otherwise the server rejected all of them.
    """

    label: str
    headline: Point
    accuracy: Mapping[Point, Array]
    weights: Mapping[str, Array]
    equal: Array
    taken: bool

    @classmethod
    def of(cls, result: Result, attack: str) -> Measured:
        """From a run under any attack or none, for the honest clients of ``attack``."""
        names, seeds = result.federation.names, result.config.seeds
        honest = ~np.array([[name in attacks.parse(attack, names, seed) for name in names] for seed in seeds])
        shares = honest / honest.sum(1, keepdims=True)
        accuracy = {point: (result.accuracy(point) * shares).sum(1) for point in POINTS}
        weights, taken = dict[str, Array](), False
        for name in WEIGHTS:
            vectors = [result.influence(name, seed) for seed in seeds]
            if all(own.size for own in vectors):
                pairs = list(zip(vectors, honest, strict=True))
                weights[name] = np.array([given(*pair) for pair in pairs])
                taken |= any(bool(np.isfinite(own[:, which][:, :, ~which]).any()) for own, which in pairs)
        return cls(result.label, result.method.headline, accuracy, weights, 1 - honest.mean(1), taken)

    @property
    def excess(self) -> float:
        """The weight given to attackers minus the equal share; nan if nothing was measured."""
        return mean(self.weights[VECTOR] - self.equal)


def given(weights: Array, honest: Flags) -> float:
    """The weight that honest clients gave to the others, mean over rounds, clients and classes that measured any.

    Args:
        weights: ``(rounds, M, M)`` or ``(rounds, M, M, C)``, row m what client m gave to each; nan for a client whose
            upload is not there, which gets nothing, and in whole rows where nothing was measured.
        honest: ``(M,)``.
    """
    own = weights[:, honest]  # (rounds, H, M, ...)
    measured = np.isfinite(own).any(axis=2)  # (rounds, H, ...)
    to_others = np.nansum(own[:, :, ~honest], axis=2)
    return float(to_others[measured].mean()) if measured.any() else float("nan")


def mean(values: Array) -> float:
    """Over seeds; a difference of less than 1e-6 is none."""
    return round(float(np.mean(values)), DIGITS)


@dataclass(frozen=True)
class Attacked:
    """All methods on one data set, by attack, then by method."""

    rows: Mapping[str, Mapping[str, Measured]]
    attackers: str

    def change(self, attack: str, method: str, point: Point) -> Array:
        """``(seeds,)`` the honest clients' accuracy under an attack minus that without, by paired seeds."""
        under, without = self.rows[attack][method], self.rows[NONE][method]
        return np.round(under.accuracy[point] - without.accuracy[point], DIGITS)

    @property
    def attacks(self) -> list[str]:
        """Those that were run, without ``none``."""
        return [name for name in self.rows if name != NONE]


Found = Mapping[str, Attacked]  # by data set


def verdict(found: Found, warnings: Sequence[str] = ()) -> Verdict:
    """What the numbers say, for every data set, after the warnings of a trial, which meets and misses no target.

    By attack and point: which method changes most favourably (local training aside, which no attack reaches), and which
    methods end below local training. Targets: FedC²I gives the attackers less than the equal share of its influence
    vector under every attack whose uploads the server takes, on every data set; and at both points its honest clients
    lose no more than FedAvg's under any attack.
    """
    said, targets = [*warnings], dict[str, bool]()
    below, held = [], []
    for data, own in found.items():
        for attack in own.attacks if {*own.rows[NONE]} - {FLOOR} else ():
            said += [_standing(data, own, attack, point) for point in POINTS]
        said += _weights(data, own)
        for attack in own.attacks:
            row = own.rows[attack].get(OURS)
            if row is not None and row.taken:
                below.append((f"{attack} on {data}", row.excess < 0))
            if row is not None and MEAN in own.rows[attack]:
                worse = [mean(own.change(attack, OURS, p)) < mean(own.change(attack, MEAN, p)) for p in POINTS]
                held.append((f"{attack} on {data}", not any(worse)))
    for what, cases in (
        ("FedC²I gives attackers less than the equal share under every attack", below),
        ("FedC²I's honest clients lose no more than FedAvg's under any attack, at both points", held),
    ):
        if cases and not warnings:
            missed = [name for name, good in cases if not good]
            targets[what] = not missed
            said.append(f"Target, {what}: " + (f"missed ({', '.join(missed)})." if missed else "met."))
    return Verdict(targets, tuple(said))


def _standing(data: str, own: Attacked, attack: str, point: Point) -> str:
    rows = {name: row for name, row in own.rows[attack].items() if name != FLOOR}
    changes = {name: mean(own.change(attack, name, point)) for name in rows}
    most = max(changes.values())
    best = [rows[name].label for name, change in changes.items() if change == most]
    verb = "changes" if len(best) == 1 else "change"
    text = f"On {data} under {attack} {WHEN[point]}: {' and '.join(best)} {verb} most favourably ({most:+z.2f} points)"
    if OURS in changes:
        better = sum(change > changes[OURS] for change in changes.values())
        text += f"; {rows[OURS].label} {changes[OURS]:+z.2f}, place {better + 1} of {len(rows)}"
    floor = own.rows[attack].get(FLOOR)
    if floor is not None:
        level = mean(floor.accuracy[point])
        below = [row.label for row in rows.values() if mean(row.accuracy[point]) < level]
        text += f"; below {floor.label} ({level:.2f} %): {', '.join(below) or 'no method'}"
    return text + "."


def _weights(data: str, own: Attacked) -> list[str]:
    """A sentence for each method that measures weights."""
    said = []
    for name, row in own.rows[NONE].items():
        if VECTOR in row.weights and own.attacks:
            taken = [attack for attack in own.attacks if own.rows[attack][name].taken]
            more = [attack for attack in taken if not own.rows[attack][name].excess < 0]
            rest = f", not under {', '.join(more)}" if more else ""
            rejected = [attack for attack in own.attacks if attack not in taken]
            rest += f"; rejected by the server: {', '.join(rejected)}" if rejected else ""
            said.append(
                f"On {data} {row.label} gives the attackers less than the equal share "
                f"({100 * mean(row.equal):.1f} %) under {len(taken) - len(more)} of {len(taken)} attacks{rest}."
            )
    return said
