"""What the study of many clients found: accuracy and mass of every row, and whether the targets were met.

The *mass* of a client is the λ that it gives to the clients of its own domain, itself among them, in the exchange after
the last round. With equal weights it is the share of such clients, which is what an influence that sees nothing
keeps. Over the clients that measured anything it is averaged within a seed, then over seeds.

What counts as a success (`verdict`) is written down here, whatever the numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fedc2i.analysis.domain_share import Mass
from fedc2i.analysis.significance import DIGITS
from fedc2i.analysis.verdicts import Paired, Verdict
from fedc2i.engine.records import POINTS, Point
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.gamma import Gamma
from fedc2i.runs.results import Array, Result

DOMAINS = 5
CLIENTS = 20  # of each domain, which the target is for: M = 100
SPLITS: Mapping[str, str] = {"even": "iid:{}", "skewed": "dirichlet:{}:0.5"}
PARTICIPATION = ("100%", "20%")
INFLUENCE = ("exact", "first-order")
TIMES = 2.0  # the uniform share that is to be kept within the domain
TOLERANCE = 0.02  # of the mass, between first-order and exact influence: a tenth of the uniform share


@dataclass(frozen=True)
class Setting:
    """How Digit-5 is split into ``clients`` for each domain, and the share of them that trains in a round."""

    clients: int
    split: str
    participation: str

    @property
    def total(self) -> int:
        """M, the clients of all domains."""
        return DOMAINS * self.clients

    def __str__(self) -> str:
        return f"M = {self.total}, {self.split}, {self.participation}"


@dataclass(frozen=True)
class Measured:
    """What is kept of a result: its influence of every round would fill the memory.

    Attributes:
        label: the method and its options.
        accuracy: test accuracy by point and average, one a seed.
        masses: by seed; none for a method without influence.
    """

    label: str
    accuracy: Mapping[Point, Mapping[str, Array]]
    masses: tuple[Mass, ...] = ()

    @classmethod
    def of(cls, result: Result) -> Measured:
        """Accuracies and masses after the last round."""
        masses = [_mass(result, seed) for seed in result.config.seeds] if isinstance(result.method, FedC2I) else []
        return cls(result.label, {point: result.averages(point) for point in POINTS}, tuple(masses))

    def mass(self, name: str = "domain") -> Array:
        """``(seeds,)`` one of the numbers of `Mass`."""
        return np.array([getattr(own, name) for own in self.masses])

    def minus(self, other: Measured, point: Point) -> Paired:
        """The difference of the last average, paired over seeds."""
        ours, theirs = (list(own.accuracy[point].values())[-1] for own in (self, other))
        return Paired.of(ours, theirs)


def _mass(result: Result, seed: int) -> Mass:
    names, last = result.federation.names, result.last(seed).influence
    nothing = np.full((len(names), len(names)), np.nan)
    fixed = getattr(result.method, "gamma", math.nan)
    used = last.get("gamma", nothing[0]) if isinstance(fixed, Gamma) else np.array([fixed])
    gamma = float(np.nanmean(used)) if np.isfinite(used).any() else math.nan
    strangers = getattr(result.method, "max_age", None) is not None
    return Mass.of(last.get("influence_vector", nothing), names, gamma, strangers)


@dataclass(frozen=True)
class Compared:
    """The rows of one setting: FedAvg, and FedC²I by its γ and the form of its influence."""

    fedavg: Measured
    rows: Mapping[tuple[str, str], Measured]

    def pairs(self) -> dict[str, tuple[Measured, Measured]]:
        """First-order and exact influence, by γ, where both were run."""
        names = dict.fromkeys(gamma for gamma, _ in self.rows)
        both = {name: [self.rows.get((name, form)) for form in reversed(INFLUENCE)] for name in names}
        return {name: (one, two) for name, (one, two) in both.items() if one is not None and two is not None}


Found = Mapping[Setting, Compared]


def apart(pair: tuple[Measured, Measured]) -> float:
    """The mass by first-order influence minus that by exact influence, mean over seeds."""
    return round(float((pair[0].mass() - pair[1].mass()).mean()), DIGITS)


def within(difference: float) -> bool:
    """Whether first-order influence keeps the mass near enough."""
    return abs(difference) <= TOLERANCE


def verdict(found: Found, warnings: Sequence[str] = ()) -> Verdict:
    """What the numbers say about the targets, met or missed.

    Many clients: one adaptive γ, by the same form of influence, which in every setting with M = 100 keeps at least
    twice the uniform share of λ in the domain, and whose mean accuracy is not below FedAvg's at either point.
    First-order: the mass within the tolerance of the exact one, wherever both were run.
    """
    asked = [Setting(CLIENTS, *rest) for rest in itertools.product(SPLITS, PARTICIPATION)]
    lacking = [str(setting) for setting in asked if setting not in found]
    most = CLIENTS if len(lacking) < len(asked) else max(setting.clients for setting in found)
    judged = {setting: own for setting, own in found.items() if setting.clients == most}
    where = f"M = {DOMAINS * most}"
    said = [*warnings]
    if lacking:
        said.append(f"A part of the study, judged at {where}; the target also needs {'; '.join(lacking)}.")
    winners, partly = [], []
    adaptive = {key: row for key, row in next(iter(judged.values())).rows.items() if key[0] != "fixed"}
    for key, row in adaptive.items():
        does = {setting: _does(own.rows[key], own.fedavg) for setting, own in judged.items()}
        listed = ", ".join(f"{what} in {sum(own[what] for own in does.values())}" for what in next(iter(does.values())))
        said.append(f"{row.label} at {where}, of {_settings(len(judged))}: {listed}.")
        whole = [setting for setting, own in does.items() if all(own.values())]
        if len(whole) == len(judged):
            winners.append(row.label)
        elif whole:
            partly.append(f"{row.label} met it in {'; '.join(map(str, whole))}")
    met = "missed" if adaptive else "no adaptive γ was run"
    met = ("met as far as it was run" if lacking else "met") if winners else met
    target = f"at {where} an adaptive γ keeps {TIMES:g} times the uniform share and is not below FedAvg at either point"
    who = f" ({', '.join(winners or partly)})" if winners or partly else ""
    said.append(f"Target, {target}: {met}{who}.")
    targets = {"many clients": bool(winners) and not lacking}
    near = {(setting, name): apart(pair) for setting, own in found.items() for name, pair in own.pairs().items()}
    if not near:
        return Verdict(targets, (*said, "First-order and exact influence were not both run: nothing to compare."))
    far = max(near, key=lambda key: math.inf if math.isnan(near[key]) else abs(near[key]))
    kept = sum(map(within, near.values()))
    targets["first-order"] = kept == len(near)
    said.append(
        f"Target, first-order influence keeps the mass within {100 * TOLERANCE:g} points of the exact one: "
        f"{'met' if targets['first-order'] else 'missed'} ({kept} of {len(near)} pairs; the furthest is "
        f"{100 * near[far]:+z.2f} points, γ {far[1]}, {far[0]})."
    )
    return Verdict(targets, tuple(said))


def _does(row: Measured, fedavg: Measured) -> dict[str, bool]:
    """Which parts of what is asked a row does in a setting."""
    above = {f"not below FedAvg at {point}": row.minus(fedavg, point).mean >= 0 for point in POINTS}
    return {f"{TIMES:g} times the uniform share": keeps(row), **above}


def keeps(row: Measured) -> bool:
    """Whether the mass is as large as the target asks for."""
    return round(float(row.mass("times").mean()), DIGITS) >= TIMES


def _settings(count: int) -> str:
    return "1 setting" if count == 1 else f"{count} settings"
