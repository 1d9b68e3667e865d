"""FedC²I with many clients: how much of λ stays within a client's own domain, for a fixed γ and for adaptive ones.

Every domain of Digit-5 is split into K clients, evenly or with label skew, and all clients or a fifth train in a round.
The *mass* of a client is the λ that it gives to the clients of its own domain, itself among them, in the exchange after
the last round. With equal weights it is the share of such clients, which is what an influence that sees nothing
keeps. Over the clients that measured anything it is averaged within a seed, then over seeds.

What counts as a success (`verdict`) is written down here, whatever the numbers. Runs are computed once
(`store.Store`), and only their last round is scored.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.gamma import Gamma, perplexity, ramp, scaled
from fedc2i.mass import Mass
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.plans import Observer, Plan, prepare
from fedc2i.results import Array, Result
from fedc2i.store import Store
from fedc2i.study import DIGITS, Paired, Verdict, trial_of, unfinished

DATA = "digit5"
DOMAINS = 5
CLIENTS = 20  # of each domain, which the target is for: M = 100
SPLITS: Mapping[str, str] = {"even": "iid:{}", "skewed": "dirichlet:{}:0.5"}
PARTICIPATION = ("100%", "20%")
GAMMAS: Mapping[str, Callable[[int], float | Gamma]] = {  # by the clients of a domain
    "fixed": lambda clients: 5.0,
    "scaled": lambda clients: scaled(),
    "ramp": lambda clients: ramp(10),
    "perplexity": perplexity,  # weights spread evenly over a domain have as many effective models as it has clients
}
MANY = "many"  # the preset for many clients, whose γ is adaptive, too
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
_Part = TypeVar("_Part")


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
    winners = []
    adaptive = {key: row for key, row in next(iter(judged.values())).rows.items() if key[0] != "fixed"}
    for key, row in adaptive.items():
        counts = _counts(key, judged)
        winners += [row.label] if all(count == len(judged) for count in counts.values()) else []
        listed = ", ".join(f"{what} in {count}" for what, count in counts.items())
        said.append(f"{row.label} at {where}, of {_settings(len(judged))}: {listed}.")
    met = "missed" if adaptive else "no adaptive γ was run"
    met = ("met as far as it was run" if lacking else "met") if winners else met
    target = f"at {where} an adaptive γ keeps {TIMES:g} times the uniform share and is not below FedAvg at either point"
    who = f" ({', '.join(winners)})" if winners else ""
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


def _counts(key: tuple[str, str], judged: Found) -> dict[str, int]:
    """In how many settings a row does what is asked."""
    counts = {f"{TIMES:g} times the uniform share": sum(keeps(own.rows[key]) for own in judged.values())}
    for point in POINTS:
        above = [own.rows[key].minus(own.fedavg, point).mean >= 0 for own in judged.values()]
        counts[f"not below FedAvg at {point}"] = sum(above)
    return counts


def keeps(row: Measured) -> bool:
    """Whether the mass is as large as the target asks for."""
    return round(float(row.mass("times").mean()), DIGITS) >= TIMES


def _settings(count: int) -> str:
    return "1 setting" if count == 1 else f"{count} settings"


class Many:
    """The study's runs, planned and checked before anything is computed.

    Attributes:
        settings: in the order they will be computed in.
        notes: of the data.
        trial: a warning if rounds are not the protocol's.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        store: Store,
        clients: str = "10,20",
        splits: str = ",".join(SPLITS),
        participation: str = ",".join(PARTICIPATION),
        gammas: str = ",".join((*GAMMAS, MANY)),
        influence: str = ",".join(INFLUENCE),
    ) -> None:
        """Plans all runs, with ``settings``, among them ``seeds``, over the preset; the others are lists with commas.

        Raises:
            UserError: for anything that is unknown or does not fit.
        """
        wanted = _listed("--gammas", gammas, (*GAMMAS, MANY)), _listed("--influence", influence, INFLUENCE)
        self._keys = list(itertools.product(*wanted))
        self._store = store
        self._plans: dict[Setting, list[Plan]] = {}
        counts, ways = _whole_numbers("--clients", clients), _listed("--splits", splits, SPLITS)
        shares = _shares("--participation", participation)
        for count, split in itertools.product(counts, ways):
            methods: list[Method] = [FedAvg()]
            methods += [_method(gamma, form, count) for gamma, form in self._keys]
            chosen = {"partition": SPLITS[split].format(count), "evaluate_every": 0}
            plans = prepare(methods, {**chosen, **settings}, DATA)
            for share in shares:
                own = [replace(plan, config=replace(plan.config, clients_per_round=share)) for plan in plans]
                self._plans[Setting(count, split, share)] = own
        self.settings = tuple(self._plans)
        everything = [plan for plans in self._plans.values() for plan in plans]
        self.notes = list(dict.fromkeys(note for plan in everything for note in plan.federation.notes))
        self.trial = trial_of(DATA, everything[0])

    def left(self) -> list[Plan]:
        """What is still to be run, with the seeds that are missing."""
        return unfinished([plan for plans in self._plans.values() for plan in plans], self._store)

    def compute(self, setting: Setting, observer: Observer | None = None) -> Compared:
        """Computes what is missing of a setting, and measures all of it."""
        fedavg, *rows = (Measured.of(self._store.compute(plan, observer)) for plan in self._plans[setting])
        return Compared(fedavg, dict(zip(self._keys, rows, strict=True)))


def _method(gamma: str, form: Any, clients: int) -> FedC2I:
    return FedC2IMany(influence=form) if gamma == MANY else FedC2I(gamma=GAMMAS[gamma](clients), influence=form)


def _listed(option: str, text: str, allowed: Sequence[str] | Mapping[str, Any]) -> list[str]:
    return _several(option, text, f"of {', '.join(allowed)}", lambda part: part if part in allowed else None)


def _whole_numbers(option: str, text: str) -> list[int]:
    form = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)
    return _several(option, text, "whole numbers from 1", lambda part: int(part) if form.fullmatch(part) else None)


def _shares(option: str, text: str) -> list[str]:
    def share(part: str) -> str | None:
        number = float(part[:-1]) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?%", part) else 0.0
        return f"{number:g}%" if 0 < number <= 100 else None

    return _several(option, text, "shares of the clients such as 20%, up to 100%", share)


def _several(option: str, text: str, what: str, read: Callable[[str], _Part | None]) -> list[_Part]:
    """The parts of a list with commas, all different; ``read`` gives None for what is not allowed."""
    parts = [read(part.strip()) for part in text.split(",")]
    found = [part for part in parts if part is not None]
    if len(found) < len(parts) or len({*found}) < len(found):
        raise UserError(f"{option} must be one or more, all different, {what}, got '{text}'")
    return found
