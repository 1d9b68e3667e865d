"""What dishonest and broken clients do to the honest ones: every method against every attack.

One client attacks by default, the second in table order: written here before any result, and neither the easiest nor
the hardest by design. Every method runs without an attack and with each one. What is reported is the accuracy of the
*honest* clients, without an attack that of the very same clients, and, of methods that measure weights, how much of
them honest clients give to the attackers, beside the equal share. Local training sends nothing, so nobody can attack
it: it is run once, and is the floor below which working together does harm.

What is said of the numbers (`verdict`) is written down here, whatever they are. Runs are computed once
(`store.Store`), and only their last round is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedc2i.engine import attacks as engine
from fedc2i.engine.rounds import POINTS, Point
from fedc2i.errors import UserError
from fedc2i.plans import Observer, Plan, prepare
from fedc2i.results import Array, Result, Score
from fedc2i.store import Store
from fedc2i.study import DIGITS, Verdict, trial_of, unfinished

METHODS = (
    "local",
    "fedavg",
    "fedprox",
    "fedc2i",
    "fedc2i-plus",
    "fedfomo",
    "pfedgraph",
    "median",
    "trimmed-mean",
    "multi-krum",
)
NONE = "none"
ATTACKS = (NONE, "label-flip", "sign-flip", "scaled:10", "noise:1", "nan", "free-rider")
FLOOR = "local"
OURS, MEAN = "fedc2i", "fedavg"  # the targets are about these
Flags = np.ndarray[Any, np.dtype[np.bool_]]
WEIGHTS: Mapping[str, str] = {"influence_vector": "of models", "influence_matrix": "of classifier rows"}


@dataclass(frozen=True)
class Measured:
    """What is kept of a method under an attack.

    Attributes:
        label: the method and its options.
        headline: the point that its authors report.
        accuracy: by point the honest clients' mean test accuracy, one a seed.
        weights: by the diagnostic's name the weight that honest clients gave to the attackers, one a seed; none of a
            method that measures no weights.
        equal: what equal weights would give them, one a seed.
        taken: whether an attacker's upload was ever among those weighted; else the server left all of them out.
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
        bad = [[name in engine.parse(attack, names, seed) for name in names] for seed in seeds]
        honest = ~np.array(bad)
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


def given(weights: Array, honest: Flags) -> float:
    """The weight that honest clients gave to the others, mean over rounds, clients and classes that measured any.

    Args:
        weights: ``(rounds, M, M)`` or ``(rounds, M, M, C)``, row m what client m gave to each; nan for a client whose
            upload is not there, which gets nothing, and in whole rows where nothing was measured.
        honest: ``(M,)`` booleans.
    """
    own = weights[:, honest]  # (rounds, H, M, ...)
    measured = np.isfinite(own).any(axis=2)  # (rounds, H, ...)
    to_others = np.nansum(own[:, :, ~honest], axis=2)
    return float(to_others[measured].mean()) if measured.any() else float("nan")


@dataclass(frozen=True)
class Attacked:
    """All methods on one data set, by attack, then by method."""

    rows: Mapping[str, Mapping[str, Measured]]
    attackers: str

    def lost(self, attack: str, method: str, point: Point) -> Array:
        """``(seeds,)`` the honest clients' accuracy under an attack minus that without, by paired seeds."""
        under, without = self.rows[attack][method], self.rows[NONE][method]
        return np.round(under.accuracy[point] - without.accuracy[point], DIGITS)

    @property
    def attacks(self) -> list[str]:
        """Those that were run, without ``none``."""
        return [name for name in self.rows if name != NONE]


Found = Mapping[str, Attacked]  # by data set


def verdict(found: Found, trial: Sequence[str] = ()) -> Verdict:
    """What the numbers say, for every data set, after the warnings of a trial, which meets and misses no target.

    By attack and point: which method changes most favourably (local training aside, which nothing reaches), and which
    methods end below local training. Targets: FedC²I gives the attackers less than the equal share of its influence
    vector under every attack whose uploads the server takes, on every data set; and at both points its honest clients
    lose no more than FedAvg's under any attack. A difference of less than 1e-6 is none.
    """
    said, targets = [*trial], dict[str, bool]()
    for data, own in found.items():
        for attack in own.attacks if {*own.rows[NONE]} - {FLOOR} else ():
            said += [_standing(data, own, attack, point) for point in POINTS]
        said += _shares(data, own)
    below, held = [], []
    for data, own in found.items():
        for attack in own.attacks:
            row = own.rows[attack].get(OURS)
            if row is not None and row.taken:
                below.append((f"{attack} on {data}", bool(_share(row) < 0)))
            if row is not None and MEAN in own.rows[attack]:
                worse = [_of(own.lost(attack, OURS, p)) < _of(own.lost(attack, MEAN, p)) for p in POINTS]
                held.append((f"{attack} on {data}", not any(worse)))
    for what, cases in (
        ("FedC²I gives attackers less than the equal share under every attack", below),
        ("FedC²I's honest clients lose no more than FedAvg's under any attack, at both points", held),
    ):
        if cases and not trial:
            missed = [name for name, good in cases if not good]
            targets[what] = not missed
            said.append(f"Target, {what}: " + (f"missed ({', '.join(missed)})." if missed else "met."))
    return Verdict(targets, tuple(said))


def _standing(data: str, own: Attacked, attack: str, point: Point) -> str:
    rows = {name: row for name, row in own.rows[attack].items() if name != FLOOR}
    changes = {name: _of(own.lost(attack, name, point)) for name in rows}
    most = max(changes.values())
    best = [rows[name].label for name, change in changes.items() if change == most]
    change = "changes" if len(best) == 1 else "change"
    text = f"On {data} under {attack} at {point}: {' and '.join(best)} {change} most favourably ({most:+z.2f} points)"
    if OURS in changes:
        better = sum(change > changes[OURS] for change in changes.values())
        text += f"; {rows[OURS].label} {changes[OURS]:+z.2f}, place {better + 1} of {len(rows)}"
    floor = own.rows[attack].get(FLOOR)
    if floor is not None:
        level = _of(floor.accuracy[point])
        below = [row.label for row in rows.values() if _of(row.accuracy[point]) < level]
        text += f"; below {floor.label} ({level:.2f} %): {', '.join(below) or 'none'}"
    return text + "."


def _shares(data: str, own: Attacked) -> list[str]:
    """A sentence for each method that measures weights."""
    said = []
    for name, row in own.rows[NONE].items():
        if "influence_vector" in row.weights and own.attacks:
            taken = [attack for attack in own.attacks if own.rows[attack][name].taken]
            more = [attack for attack in taken if not _share(own.rows[attack][name]) < 0]
            rest = f", not under {', '.join(more)}" if more else ""
            left_out = [attack for attack in own.attacks if attack not in taken]
            rest += f"; left out by the server: {', '.join(left_out)}" if left_out else ""
            said.append(
                f"On {data} {row.label} gives the attackers less than the equal share "
                f"({100 * _of(row.equal):.1f} %) under {len(taken) - len(more)} of {len(taken)} attacks{rest}."
            )
    return said


def _share(row: Measured) -> float:
    """The weight given to attackers minus the equal share; nan if nothing was measured, which is not less."""
    return round(float((row.weights["influence_vector"] - row.equal).mean()), DIGITS)


def _of(values: Array) -> float:
    return round(Score.of(values).mean, DIGITS)


class Robustness:
    """The study's runs, planned and checked before anything is computed.

    Attributes:
        attacks: ``none`` and those asked for.
        attackers: by data set, as written in `fedc2i.engine.attacks`.
        notes: of the data.
        trial: warnings if rounds are not the protocol's.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        store: Store,
        data: str = "embedded",
        methods: str = ",".join(METHODS),
        attacks: str = ",".join(ATTACKS),
        attackers: str | None = None,
    ) -> None:
        """Plans all runs, with ``settings``, among them ``seeds``, over the preset; the others are lists with commas.

        Args:
            settings: of every run.
            store: where runs lie.
            data: data sets by name.
            methods: by name; a semicolon between them where one has options with commas.
            attacks: kinds with their strength.
            attackers: clients, a number or a share; none: the second client of each data set.

        Raises:
            UserError: for anything that is unknown or does not fit.
        """
        wanted = [part.strip() for part in methods.split(";" if ";" in methods else ",")]
        kinds = [part for part in _listed("--attacks", attacks) if part != NONE]
        self.attacks = (NONE, *kinds)
        self._store = store
        self._plans: dict[str, dict[str, Plan]] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self.attackers: dict[str, str] = {}
        for name in _listed("--data", data):
            plans = prepare(wanted, {"evaluate_every": 0, **settings}, name)
            self._plans[name] = {plan.key: plan for plan in plans}
            clients, seeds = plans[0].federation.names, plans[0].config.seeds
            if attackers is None and len(clients) < 2:
                raise UserError(f"{name}: an attacker among the clients needs at least 2 of them")
            who = f'"{clients[1]}"' if attackers is None else attackers
            self.attackers[name] = who.strip('"')
            for kind in kinds or ["nan"]:
                self._texts[name, kind] = f"{kind}@{who}"
                if any(len(engine.parse(f"{kind}@{who}", clients, seed)) == len(clients) for seed in seeds):
                    raise UserError(f"--attackers {who}: no client of {name} would be left that is honest")
        everything = [plan for plans in self._plans.values() for plan in plans.values()]
        self.notes = list(dict.fromkeys(note for plan in everything for note in plan.federation.notes))
        firsts = {name: next(iter(plans.values())) for name, plans in self._plans.items()}
        self.trial = [line for name, plan in firsts.items() for line in trial_of(name, plan)]

    @property
    def data(self) -> tuple[str, ...]:
        """The data sets, in the order they will be computed in."""
        return tuple(self._plans)

    def left(self) -> list[Plan]:
        """What is still to be run, with the seeds that are missing."""
        every = {
            id(plan): plan for name in self.data for kind in self.attacks for plan in self._of(name, kind).values()
        }
        return unfinished(list(every.values()), self._store)

    def compute(self, name: str, attack: str, observer: Observer | None = None) -> dict[str, Measured]:
        """Computes what is missing of a data set under an attack, and measures all of it."""
        text = self._texts.get((name, attack)) or next(own for (data, _), own in self._texts.items() if data == name)
        plans = self._of(name, attack)
        return {key: Measured.of(self._store.compute(plan, observer), text) for key, plan in plans.items()}

    def _of(self, name: str, attack: str) -> dict[str, Plan]:
        """The plans under an attack; of a method that sends nothing, the one without."""
        return {
            key: plan
            if attack == NONE or plan.method.name == FLOOR
            else replace(plan, config=replace(plan.config, attack=self._texts[name, attack]))
            for key, plan in self._plans[name].items()
        }


def _listed(option: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts) or len({*parts}) < len(parts):
        raise UserError(f"{option} must be one or more, all different, with commas between them, got '{text}'")
    return parts
