"""What the study of many clients found: accuracy and domain share of every row, and whether the targets were met.

The *domain share* of a client is the λ that it gives to the clients of its own domain, itself among them, in the
exchange after the last round. Equal weights give the share of such clients. It is averaged over the clients that
measured anything within a seed, then over seeds. What counts as a success is decided here, whatever the numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.verdict import Verdict, counted, met
from fedc2i.analysis.significance import DIGITS, Paired
from fedc2i.analysis.weights import DomainShare
from fedc2i.engine.records import POINTS, Point
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.math.influence import Gamma
from fedc2i.report.table import WHEN
from fedc2i.runs.results import Array, Result

DOMAINS = 5
CLIENTS = 20  # of each domain, which the target is for: M = 100
SPLITS: Mapping[str, str] = {"even": "iid:{}", "skewed": "dirichlet:{}:0.5"}
PARTICIPATION = ("100%", "20%")
INFLUENCE = ("exact", "first-order")
TIMES = 2.0  # times the uniform share that λ must keep within the domain
TOLERANCE = 0.02  # of the domain share, between first-order and exact influence: a tenth of the uniform share


@dataclass(frozen=True)
class Setting:
    """How Digit-5 is split into ``clients`` for each domain, and the share of them that trains in a round."""

    clients: int
    split: str
    participation: str

    def __str__(self) -> str:
        return f"M = {DOMAINS * self.clients}, {self.split}, {self.participation}"


@dataclass(frozen=True)
class Measured:
    """What is kept of a result, whose influence of every round would fill the memory.

    Attributes:
        label: the method and its options.
        accuracy: test accuracy by point and average, ``(seeds,)`` each.
        shares: by seed; empty for a method without influence.
    """

    label: str
    accuracy: Mapping[Point, Mapping[str, Array]]
    shares: tuple[DomainShare, ...] = ()

    @classmethod
    def of(cls, result: Result) -> Measured:
        """Accuracies and domain shares after the last round."""
        shares = [_share(result, seed) for seed in result.config.seeds] if isinstance(result.method, FedC2I) else []
        return cls(result.label, {point: result.averages(point) for point in POINTS}, tuple(shares))

    def share(self, name: str = "domain") -> Array:
        """``(seeds,)`` one of the numbers of `DomainShare`."""
        return np.array([getattr(own, name) for own in self.shares])

    def minus(self, other: Measured, point: Point) -> Paired:
        """The difference of the last average, paired over seeds."""
        ours, theirs = (list(own.accuracy[point].values())[-1] for own in (self, other))
        return Paired.of(ours, theirs)

    @property
    def keeps_enough(self) -> bool:
        """Whether the domain share is as large as the target asks for."""
        return round(float(self.share("times").mean()), DIGITS) >= TIMES


def _share(result: Result, seed: int) -> DomainShare:
    names, last = result.federation.names, result.last(seed).influence
    nothing = np.full((len(names), len(names)), np.nan)
    fixed = getattr(result.method, "gamma", math.nan)
    used = last.get("gamma", nothing[0]) if isinstance(fixed, Gamma) else np.array([fixed])
    gamma = float(np.nanmean(used)) if np.isfinite(used).any() else math.nan
    strangers = getattr(result.method, "max_age", None) is not None
    return DomainShare.of(last.get("influence_vector", nothing), names, gamma, strangers)


@dataclass(frozen=True)
class Compared:
    """The rows of one setting: FedAvg, and FedC²I by its γ and the form of its influence."""

    fedavg: Measured
    rows: Mapping[tuple[str, str], Measured]

    def pairs(self) -> dict[str, tuple[Measured, Measured]]:
        """First-order and exact influence, by γ, where both were run."""
        return {
            gamma: (self.rows[gamma, "first-order"], self.rows[gamma, "exact"])
            for gamma in dict.fromkeys(gamma for gamma, _ in self.rows)
            if {(gamma, form) for form in INFLUENCE} <= {*self.rows}
        }


Found = Mapping[Setting, Compared]


def apart(pair: tuple[Measured, Measured]) -> float:
    """The domain share by first-order influence minus that by exact influence, mean over seeds."""
    return round(float((pair[0].share() - pair[1].share()).mean()), DIGITS)


def verdict(found: Found, warnings: Sequence[str] = ()) -> Verdict:
    """What the numbers say about the targets, met or missed.

    Many clients: one adaptive γ, by the same form of influence, which in every setting with M = 100 keeps at least
    twice the uniform share of λ in the domain, and whose mean accuracy is not below FedAvg's at either point.
    First-order: the domain share within the tolerance of the exact one, wherever both were run.
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
        parts = {setting: _parts(own.rows[key], own.fedavg) for setting, own in judged.items()}
        names = next(iter(parts.values()))
        listed = ", ".join(f"{name} in {sum(own[name] for own in parts.values())}" for name in names)
        said.append(f"{row.label} at {where}, of {counted(len(judged), 'setting')}: {listed}.")
        whole = [setting for setting, own in parts.items() if all(own.values())]
        if len(whole) == len(judged):
            winners.append(row.label)
        elif whole:
            partly.append(f"{row.label} met it in {'; '.join(map(str, whole))}")
    fate = met(bool(winners)) if adaptive else "no adaptive γ was run"
    fate += " as far as it was run" if winners and lacking else ""
    who = f" ({', '.join(winners or partly)})" if winners or partly else ""
    target = f"at {where} an adaptive γ keeps {TIMES:g} times the uniform share and is not below FedAvg at either point"
    said.append(f"Target, {target}: {fate}{who}.")
    targets = {"many clients": bool(winners) and not lacking}
    near = {(setting, name): apart(pair) for setting, own in found.items() for name, pair in own.pairs().items()}
    if not near:
        return Verdict(targets, (*said, "First-order and exact influence were not both run: nothing to compare."))
    furthest = max(near, key=lambda key: math.inf if math.isnan(near[key]) else abs(near[key]))
    kept = sum(abs(difference) <= TOLERANCE for difference in near.values())
    targets["first-order"] = kept == len(near)
    said.append(
        f"Target, first-order influence keeps the domain share within {100 * TOLERANCE:g} points of the exact one: "
        f"{met(kept == len(near))} ({kept} of {len(near)} pairs; the furthest is {100 * near[furthest]:+z.2f} points, "
        f"γ {furthest[1]}, {furthest[0]})."
    )
    return Verdict(targets, tuple(said))


def _parts(row: Measured, fedavg: Measured) -> dict[str, bool]:
    """Which parts of the target a row meets in a setting."""
    above = {f"not below FedAvg {WHEN[point]}": row.minus(fedavg, point).mean >= 0 for point in POINTS}
    return {f"{TIMES:g} times the uniform share": row.keeps_enough, **above}
