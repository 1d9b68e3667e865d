"""Do cheap measures of influence tell the truth? Each against exact Shapley values, and against planted clients.

The truth is what `fedc2i contribution` computes: the Shapley value of every giver for every receiver, over all
coalitions, in log-loss on the receiver's test samples, averaged over seeds. Each cheap measure comes from one run of
all clients, of each seed. For every seed, ρ is the mean over receivers of Spearman's rank correlation over givers; the
interval is Student's t over seeds, and over data sets for the distance from λ. Sign: the share of pairs in which the
measure and the value have the same sign; λ counts from its equal share.

A planted client should be ranked last by every honest receiver (a duplicate: nearest to its original). AUC is the share
of honest givers (pairs) that a measure ranks above it; 1 is perfect, 0.5 is chance.

`--tricks`: clients that raise their own value, alone or two together; see `agreement_collusion`.

A client that joins twice, under two names with the same data: is the value of both names together above that of one?
"""

from __future__ import annotations

import itertools
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.agreement_collusion import TRICKS, Tricked, trick
from experiments.agreement_plants import CHANGED, PLANTS, Planted, joined_twice, plant
from experiments.agreement_probe import PROBED
from experiments.agreement_tables import agreement_table, plant_table, standing_table, twice_row, worth_table
from experiments.agreement_truth import Truth, exact_values, measure
from experiments.grid import launch, parser
from fedc2i.engine.records import POINTS
from fedc2i.report.table import SHORT, Table
from fedc2i.report.work_view import WorkView
from fedc2i.runs.plan import prepare

DATA = ("heart", "digits", "digit5", "office10", "amazon", "hapt:1,2,3,4,5")


def study(given: Namespace) -> None:
    """Computes what is missing, and writes the tables."""
    settings = {"seeds": given.seeds, "device": given.device, "data_dir": given.data_dir, "rounds": given.rounds}
    values = {name: str(value) for name, value in settings.items() if value is not None}
    folder, tables = given.out / "agreement", dict[str, Table]()
    with WorkView(Console(stderr=True)) as view:
        found = {}
        for data in filter(None, given.data):
            view.say(f"{data}: all coalitions")
            (plan,) = prepare([given.method], values, data)
            found[data] = measure(plan, folder, view)
            for point in POINTS:
                tables[f"agreement-{SHORT[point]}"] = agreement_table(found, point)
            _write(tables, folder)
        planted: dict[str, tuple[Truth, Planted]] = {}
        for data, kind in itertools.product(filter(None, given.plants), PLANTS):
            (plan,) = prepare([given.method], values, data)
            changed = plant(kind, plan.federation)
            if changed is None:
                continue
            view.say(f"{data} with {kind}: all coalitions")
            config = replace(plan.config, attack=changed.attack)
            plan = replace(plan, federation=changed.federation, config=config)
            planted[f"{data}: {kind}"] = measure(plan, folder, view), changed
            tables["plants"] = plant_table(planted)
            _write(tables, folder)
        tricked: dict[str, tuple[Truth, Truth, Tricked]] = {}
        for data in filter(None, given.tricks):
            (plan,) = prepare([given.method], values, data)
            view.say(f"{data}: all coalitions")
            honest = measure(plan, folder, view)
            for kind in TRICKS:
                own = trick(kind, plan.federation)
                view.say(f"{data} with {kind}: all coalitions")
                other = replace(plan, federation=own.federation, config=replace(plan.config, attack=own.attack))
                tricked[f"{data}: {kind}"] = honest, measure(other, folder, view), own
                tables |= {"tricks-worth": worth_table(tricked), "tricks": standing_table(tricked)}
                _write(tables, folder)
        for data in filter(None, given.twice):
            (plan,) = prepare([given.method], values, data)
            title = f"{data}: what a client is worth to the others in log-loss {SHORT['trained']} local training"
            again = replace(plan, federation=joined_twice(plan.federation, CHANGED))
            view.say(f"{again.federation.name}: all coalitions")
            once, twice = (exact_values(own, folder, view)["trained"] for own in (plan, again))
            tables["twice"] = Table(title, ("Client", "", "joins once", "joins twice, both names", "difference"))
            tables["twice"].rows.append(twice_row(once, twice, CHANGED, plan.federation.names[CHANGED]))
            _write(tables, folder)


def _write(tables: Mapping[str, Table], folder: Path) -> None:
    for name, table in tables.items():
        table.write(folder, name)
    print(list(tables.values())[-1].to_markdown(), flush=True)


def main(typed: Sequence[str] | None = None) -> int:
    """``python -m experiments.agreement``."""
    options = parser("agreement", (__doc__ or "").splitlines()[0], "0-2")
    options.add_argument("--data", nargs="*", default=DATA, help="data sets of at most six clients")
    options.add_argument("--plants", nargs="*", default=["heart", "digits"], help="data sets with planted clients")
    options.add_argument("--twice", nargs="*", default=["heart"], help="data sets of which a client joins twice")
    options.add_argument("--tricks", nargs="*", default=[], help="data sets of which clients raise their value")
    options.add_argument("--method", choices=sorted(PROBED), default="fedc2i-plus")
    return launch(study, options, sys.argv[1:] if typed is None else typed)


if __name__ == "__main__":
    sys.exit(main())
