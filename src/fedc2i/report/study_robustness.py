"""What dishonest and broken clients do to the honest ones: every method against every attack.

One client attacks by default, the second in table order: written here before any result, and neither the easiest nor
the hardest by design. Every method runs without an attack and with each one. What is reported is the accuracy of the
*honest* clients, without an attack that of the very same clients, and, of methods that measure weights, how much of
them honest clients give to the attackers, beside the equal share. Local training sends nothing, so nobody can attack
it: it is run once, and is the floor below which working together does harm.

Runs are computed once (`store.Store`), and only their last round is scored. What is measured of them, and what is said
of the numbers, is in `fedc2i.report.study_robustness_verdict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedc2i.core.errors import UserError
from fedc2i.engine import attacks as engine
from fedc2i.report.study_plus import trial_of, unfinished
from fedc2i.report.study_robustness_verdict import FLOOR, NONE, Measured
from fedc2i.runs.cache import Store
from fedc2i.runs.plan import Observer, Plan, prepare

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
ATTACKS = (NONE, "label-flip", "sign-flip", "scaled:10", "noise:1", "nan", "free-rider")


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
