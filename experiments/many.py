"""FedC²I with many clients: how much of λ stays within a client's own domain, for a fixed γ and for adaptive ones.

Every domain of Digit-5 is split into K clients, evenly or with label skew, and all clients or a fifth train in a round.
What is measured, and what counts as a success, is in `many_verdict`.
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import many_tables
from experiments.grid import Grid, launch, parser
from experiments.many_verdict import INFLUENCE, PARTICIPATION, SPLITS, Compared, Measured, Setting, verdict
from fedc2i.methods.base import Method
from fedc2i.methods.fedavg import FedAvg
from fedc2i.methods.fedc2i import FedC2I
from fedc2i.methods.fedc2i_many import FedC2IMany
from fedc2i.methods.math.influence import Gamma
from fedc2i.runs.plan import Plan

DATA = "digit5"
GAMMAS: Mapping[str, Callable[[int], float | Gamma]] = {  # by the clients of a domain
    "fixed": lambda clients: 5.0,
    "scaled": lambda clients: Gamma("scaled(5)"),
    "ramp": lambda clients: Gamma("ramp(10)"),
    # Weights spread evenly over a domain have as many effective models as it has clients.
    "perplexity": lambda clients: Gamma(f"perplexity({clients})"),
}
MANY = "many"  # the preset fedc2i-many, whose γ is adaptive, too


def plans(grid: Grid, given: Namespace) -> dict[Setting, dict[tuple[str, str], Plan]]:
    """The runs of every setting, by γ and form of influence; FedAvg's has empty names."""
    found: dict[Setting, dict[tuple[str, str], Plan]] = {}
    keys = list(itertools.product(dict.fromkeys(given.gammas), dict.fromkeys(given.influence)))
    for clients, split in itertools.product(dict.fromkeys(given.clients), dict.fromkeys(given.splits)):
        methods = [FedAvg(), *(method_of(gamma, form, clients) for gamma, form in keys)]
        for share in dict.fromkeys(given.participation):
            own = grid.plan(DATA, methods, partition=SPLITS[split].format(clients), clients_per_round=share)
            found[Setting(clients, split, share)] = dict(zip([("", ""), *keys], own, strict=True))
    return found


def method_of(gamma: str, form: Any, clients: int) -> Method:
    """FedC²I with that γ and form of influence, for domains of so many clients."""
    return FedC2IMany(influence=form) if gamma == MANY else FedC2I(gamma=GAMMAS[gamma](clients), influence=form)


def run(given: Namespace) -> None:
    """The whole study."""
    grid = Grid(given)
    planned = plans(grid, given)
    found = {}
    with grid.computing(plan for own in planned.values() for plan in own.values()):
        for setting, own in planned.items():
            grid.heading(str(setting))
            rows = dict(zip(own, map(Measured.of, grid.compute(own.values())), strict=True))
            found[setting] = Compared(rows.pop(("", "")), rows)
    said = verdict(found, grid.warnings)
    grid.finish(many_tables.tables(found, said, grid.notes, grid.warnings), said)


def main(typed: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = parser("many", "FedC²I with many clients on Digit-5; every list may be shortened.", seeds="0-2")
    options.add_argument("--clients", nargs="+", type=int, default=(10, 20), help="for each of the five domains")
    options.add_argument("--splits", nargs="+", choices=SPLITS, default=(*SPLITS,), help="skewed is Dirichlet 0.5")
    options.add_argument(
        "--participation", nargs="+", default=PARTICIPATION, help="shares of the clients that train in a round"
    )
    gammas = (*GAMMAS, MANY)
    options.add_argument("--gammas", nargs="+", choices=gammas, default=gammas, help="many is fedc2i-many")
    options.add_argument("--influence", nargs="+", choices=INFLUENCE, default=INFLUENCE, help="exact is slow")
    return launch(run, options, typed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
