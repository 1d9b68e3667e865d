"""Do cheap measures of influence tell the truth? Each against exact Shapley values, and against planted clients.

The truth is what `fedc2i contribution` computes: the Shapley value of every giver for every receiver, over all
coalitions, in log-loss on the receiver's test samples, averaged over seeds. Each cheap measure comes from one run of
all clients, of each seed. For every seed, ρ is the mean over receivers of Spearman's rank correlation over givers; the
interval is Student's t over seeds. Sign: the share of pairs in which the measure and the value have the same sign; λ
counts from its equal share.

A planted client should be ranked last by every honest receiver (a duplicate: nearest to its original). AUC is the share
of honest givers (pairs) that a measure ranks above it; 1 is perfect, 0.5 is chance.

A client that joins twice, under two names with the same data: is the value of both names together above that of one?
"""

from __future__ import annotations

import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from scipy import stats

from experiments.agreement_plants import CHANGED, PLANTS, Planted, joined_twice, plant
from experiments.agreement_probe import PREFIX, PROBED
from experiments.grid import launch, parser
from fedc2i.analysis.contribution.coalitions import CoalitionRuns, restricted
from fedc2i.analysis.contribution.measure import Values
from fedc2i.analysis.contribution.shapley import every_coalition, shapley
from fedc2i.analysis.rank_agreement import agree_overall
from fedc2i.analysis.weights import finite_mean
from fedc2i.engine.records import POINTS, Point
from fedc2i.report.table import SHORT, Row, Table
from fedc2i.report.work_view import WorkView
from fedc2i.runs.driver import compute
from fedc2i.runs.plan import Plan, prepare
from fedc2i.runs.results import Array

DATA = ("heart", "digits", "digit5", "office10", "amazon", "hapt:1,2,3,4,5")
METRIC = "loss"
EXACT = "Shapley value"
WEIGHTS = {"λ": "influence_vector", "Λ, mean of classes": "influence_matrix"}


@dataclass(frozen=True)
class Truth:
    """Shapley values ``(seeds, M, M)`` by point, and every cheap measure ``(seeds, M, M)``."""

    values: Mapping[Point, Array]
    measures: Mapping[str, Array]


def cheap(plan: Plan, seeds: Sequence[int]) -> dict[str, Array]:
    """Every measure ``(seeds, M, M)`` from one run: of the last round, and the mean of rounds."""
    result = compute(plan)
    names = WEIGHTS | {
        name.removeprefix(PREFIX): name for name in result.rounds[-1].influence if name.startswith(PREFIX)
    }
    found: dict[str, list[Array]] = {}
    for seed in seeds:
        for title, name in names.items():
            rounds = result.influence(name, seed)
            rounds = rounds.mean(-1) if rounds.ndim == 4 else rounds
            if title in WEIGHTS:
                found.setdefault(f"{title}, last round", []).append(rounds[-1])
            found.setdefault(f"{title}, mean of rounds", []).append(finite_mean(rounds))
    return {title: np.stack(own) for title, own in found.items()}


def exact_values(plan: Plan, folder: Path, view: WorkView) -> dict[Point, Array]:
    """Runs all coalitions; Shapley values ``(seeds, M, M)`` by point, row m of receiver m."""
    clients = len(plan.federation.names)
    runs = CoalitionRuns(plan, folder, view.update, view.say)
    runs.compute([frozenset({0}), *every_coalition(clients)])
    values, found = Values(runs), {}
    for point in POINTS:
        table = np.full((len(plan.config.seeds), clients, clients), np.nan)
        for receiver, giver in values.pairs():
            weights = shapley(receiver, giver, clients)
            scores = values.of(receiver, METRIC, point, weights)
            table[:, receiver, giver] = sum(weight * scores[own][:, 0] for own, weight in weights.items())
        found[point] = table
    return found


def measure(plan: Plan, folder: Path, view: WorkView) -> Truth:
    """Runs all coalitions and one probed run of all clients."""
    values = exact_values(plan, folder, view)
    method = PROBED[plan.method.name](**plan.config.options)
    everyone = restricted(plan, frozenset(range(len(plan.federation.names))))
    probed = replace(everyone, method=method, config=replace(everyone.config, workers=0))
    return Truth(values, cheap(probed, plan.config.seeds))


def twice_row(once: Array, twice: Array, which: int, name: str) -> Row:
    """A client's value to all others together when it joins once and twice, and the difference, over seeds.

    Args:
        once: values ``(seeds, M, M)``.
        twice: values ``(seeds, M + 1, M + 1)`` with a copy of the client at the end.
        which: the client.
        name: its name.
    """
    others = [m for m in range(once.shape[1]) if m != which]
    one = once[:, others, which].mean(1)
    both = (twice[:, others, which] + twice[:, others, -1]).mean(1)
    return Row((name, "", *(interval(own, 3) for own in (one, both, both - one))))


def agreement(truth: Truth, name: str, point: Point) -> tuple[list[float], float, float]:
    """ρ of every seed with the mean values, p of the mean over seeds, and the share of equal signs."""
    values = truth.values[point].mean(0)
    own = truth.measures[name]
    rho = [agree_overall(seed, values).rho for seed in own]
    zero = 1 / len(values) if name.startswith(("λ", "Λ")) else 0.0
    both = np.isfinite(own) & np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    same = ((own > zero) == (values > 0))[both]
    return rho, agree_overall(finite_mean(own), values).p, float(same.mean()) if same.size else math.nan


def auc(table: Array, planted: Planted) -> float:
    """How well values ``(M, M)`` show the planted client to the others."""
    shares = []
    for receiver, row in enumerate(table):
        if receiver in (planted.client, planted.copy_of):
            continue
        givers = [i for i in range(len(row)) if i != receiver and np.isfinite(row[i])]
        if planted.copy_of is None:
            others = np.array([row[i] for i in givers if i != planted.client])
            shares.append(np.mean((others > row[planted.client]) + 0.5 * (others == row[planted.client])))
        else:
            gap = abs(row[planted.client] - row[planted.copy_of])
            pairs = [abs(row[i] - row[j]) for i, j in itertools.combinations(givers, 2)]
            pairs.remove(gap)
            shares.append(np.mean((np.array(pairs) > gap) + 0.5 * (np.array(pairs) == gap)))
    return float(np.mean(shares)) if shares else math.nan


def interval(values: Sequence[float], digits: int = 2) -> str:
    """The mean over seeds with its 95 % interval."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    mean = float(np.mean(known))
    if len(known) < 2:
        return f"{mean:+.{digits}f}"
    reach = float(stats.t.ppf(0.975, len(known) - 1) * np.std(known, ddof=1) / math.sqrt(len(known)))
    low, high = max(-1.0, mean - reach), min(1.0, mean + reach)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def agreement_table(found: Mapping[str, Truth], point: Point) -> Table:
    """One row a measure, one column a data set: ρ with its interval, p, and signs."""
    table = Table(
        f"ρ with exact Shapley values in log-loss {SHORT[point]} local training, with p, and the share of equal signs",
        ("Measure", "", *found, "mean ρ"),
    )
    for name in next(iter(found.values())).measures:
        cells, means = [], []
        for truth in found.values():
            rho, p, sign = agreement(truth, name, point)
            cells.append(f"{interval(rho)}; p {p:.2f}; {100 * sign:.0f} %")
            means.append(float(np.nanmean(rho)))
        table.rows.append(Row((name, "", *cells, f"{np.mean(means):+.2f}")))
    return table


def plant_table(found: Mapping[str, tuple[Truth, Planted]]) -> Table:
    """AUC of every measure for every planted client, the Shapley value first."""
    table = Table("AUC with which a measure shows a planted client", ("Measure", "", *found, "mean"))
    names = list(next(iter(found.values()))[0].measures)
    for name in (EXACT, *names):
        rows = [
            [auc(seed, planted) for seed in (truth.values["trained"] if name == EXACT else truth.measures[name])]
            for truth, planted in found.values()
        ]
        mean = float(np.nanmean([np.nanmean(own) for own in rows]))
        table.rows.append(Row((name, "", *(interval(own) for own in rows), f"{mean:.2f}")))
    return table


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
            own = plant(kind, plan.federation)
            if own is None:
                continue
            view.say(f"{data} with {kind}: all coalitions")
            config = replace(plan.config, attack=own.attack)
            plan = replace(plan, federation=own.federation, config=config)
            planted[f"{data}: {kind}"] = measure(plan, folder, view), own
            tables["plants"] = plant_table(planted)
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
    options.add_argument("--method", choices=sorted(PROBED), default="fedc2i-plus")
    return launch(study, options, sys.argv[1:] if typed is None else typed)


if __name__ == "__main__":
    sys.exit(main())
