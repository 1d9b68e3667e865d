"""FedC²I with many clients: how much of λ stays within a client's own domain, for a fixed γ and for adaptive ones.

Every domain of Digit-5 is split into K clients, evenly or with label skew, and all clients or a fifth train in a round.
Runs are computed once (`store.Store`), and only their last round is scored. What is measured of them, and what counts
as a success, is in `fedc2i.report.study_many_verdict`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.methods.math.gamma import Gamma
from fedc2i.report.study_many_verdict import INFLUENCE, PARTICIPATION, SPLITS, Compared, Measured, Setting
from fedc2i.report.study_plus import listed, several, trial_of, unfinished
from fedc2i.runs.cache import Store
from fedc2i.runs.plan import Observer, Plan, prepare

DATA = "digit5"
GAMMAS: Mapping[str, Callable[[int], float | Gamma]] = {  # by the clients of a domain
    "fixed": lambda clients: 5.0,
    "scaled": lambda clients: Gamma("scaled(5)"),
    "ramp": lambda clients: Gamma("ramp(10)"),
    # Weights spread evenly over a domain have as many effective models as it has clients.
    "perplexity": lambda clients: Gamma(f"perplexity({clients})"),
}
MANY = "many"  # the preset for many clients, whose γ is adaptive, too


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
        wanted = listed("--gammas", gammas, (*GAMMAS, MANY)), listed("--influence", influence, INFLUENCE)
        self._keys = list(itertools.product(*wanted))
        self._store = store
        self._plans: dict[Setting, list[Plan]] = {}
        counts, ways = _whole_numbers("--clients", clients), listed("--splits", splits, SPLITS)
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


def _whole_numbers(option: str, text: str) -> list[int]:
    form = re.compile(r"0*[1-9][0-9]{0,5}", re.ASCII)
    return several(option, text, "whole numbers from 1", lambda part: int(part) if form.fullmatch(part) else None)


def _shares(option: str, text: str) -> list[str]:
    def share(part: str) -> str | None:
        number = float(part[:-1]) if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?%", part) else 0.0
        return f"{number:g}%" if 0 < number <= 100 else None

    return several(option, text, "shares of the clients such as 20%, up to 100%", share)
