"""What dishonest and broken clients do to the honest ones: every method against every attack.

One client attacks by default, the second in table order: decided before any result, and neither the easiest nor the
hardest by design. Every method runs without an attack and with each one. Reported are the accuracy of the *honest*
clients, also without an attack, and the weight that they give to the attackers beside the equal share. Local training
sends nothing, so no attack reaches it: it is run once, and shows the accuracy below which working together does harm.
What is measured, and what counts as a success, is in `robustness_verdict`.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from experiments import robustness_tables
from experiments.grid import Grid, launch, parser
from experiments.robustness_verdict import FLOOR, NONE, Attacked, Measured, verdict
from fedc2i.core.errors import UserError
from fedc2i.engine import attacks
from fedc2i.runs.plan import Plan

METHODS = (
    *("local", "fedavg", "fedprox", "fedc2i", "fedc2i-plus", "fedfomo", "pfedgraph"),
    *("median", "trimmed-mean", "multi-krum"),
)
ATTACKS = ("label-flip", "sign-flip", "scaled:10", "noise:1", "nan", "free-rider")


@dataclass(frozen=True)
class Planned:
    """The runs on one data set: by attack (``none`` first), then by method.

    Attributes:
        attackers: who attacks, as written in `fedc2i.engine.attacks`.
        example: an attack by them, which tells who is honest without an attack, too.
        plans: those of a method that sends nothing are the same under every attack.
    """

    attackers: str
    example: str
    plans: Mapping[str, Mapping[str, Plan]]


def plan(grid: Grid, data: str, given: Namespace) -> Planned:
    """Plans all runs on a data set.

    Raises:
        UserError: for anything that is unknown or not allowed.
    """
    methods = {plan.key: plan for plan in grid.plan(data, list(dict.fromkeys(given.methods)))}
    first = next(iter(methods.values()))
    clients, seeds = first.federation.names, first.config.seeds
    if given.attackers is None and len(clients) < 2:
        raise UserError(f"{data}: an attacker among the clients needs at least 2 of them")
    who = f'"{clients[1]}"' if given.attackers is None else given.attackers
    kinds = [kind for kind in dict.fromkeys(given.attacks) if kind != NONE]
    texts = {kind: f"{kind}@{who}" for kind in kinds or ["nan"]}
    for text in texts.values():
        if any(len(attacks.parse(text, clients, seed)) == len(clients) for seed in seeds):
            raise UserError(f"--attackers {who}: all clients of {data} would be attackers")
    found = {NONE: methods}
    for kind in kinds:
        found[kind] = {
            key: own if own.method.name == FLOOR else replace(own, config=replace(own.config, attack=texts[kind]))
            for key, own in methods.items()
        }
    return Planned(who.strip('"'), next(iter(texts.values())), found)


def run(given: Namespace) -> None:
    """The whole study."""
    grid = Grid(given)
    planned = {data: plan(grid, data, given) for data in dict.fromkeys(given.data)}
    every = [own for one in planned.values() for plans in one.plans.values() for own in plans.values()]
    found = {}
    with grid.computing({id(own): own for own in every}.values()):
        for data, one in planned.items():
            rows = {}
            for attack, plans in one.plans.items():
                grid.heading(f"{data}, attack {attack}")
                results = grid.compute(plans.values())
                rows[attack] = {key: Measured.of(own, one.example) for key, own in zip(plans, results, strict=True)}
            found[data] = Attacked(rows, one.attackers)
    said = verdict(found, grid.warnings)
    grid.finish(robustness_tables.tables(found, said, grid.notes), said)


def main(typed: Sequence[str]) -> int:
    """The command; returns the exit code."""
    options = parser("robustness", "Every method against every attack; every list may be shortened.", seeds="0,1,2")
    options.add_argument("--data", nargs="+", default=["digits"], help="data sets, for example digits digit5")
    options.add_argument("--methods", nargs="+", default=METHODS, help="names, with or without options")
    options.add_argument("--attacks", nargs="+", default=ATTACKS, help="KIND or KIND:STRENGTH; none is always run")
    options.add_argument("--attackers", help="clients, a number or a share such as 20%%; default: the second client")
    return launch(run, options, typed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
