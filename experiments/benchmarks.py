"""Every method on the benchmarks beyond images of digits and objects: one table for each data set, five seeds."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from itertools import product

import numpy as np

from experiments.grid import SEEDS_NOTE, Grid, launch, parser
from experiments.verdict import Verdict
from fedc2i.engine.records import POINTS
from fedc2i.report.table import POINT_COLUMN, SHORT, Row, Table
from fedc2i.runs.results import Result

DATA = ("heart", "hapt", "amazon", "ham10000")
METHODS = (
    *("local", "fedavg", "fedprox", "fedrep", "ditto", "fedala", "fedfomo", "fedrod", "fedproto", "fedpac"),
    *("pfedgraph", "fedic", "fedcalm", "fedc2i", "fedc2i-plus"),
)  # FedBN needs normalisation layers, which the presets' models have not
SCORES = {"accuracy": "Accuracy", "balanced_accuracy": "Balanced accuracy", "auroc": "AUROC", "loss": "Log-loss"}


def table_of(data: str, results: Sequence[Result]) -> Table:
    """One row a method and point: means over clients and seeds, and the worst client."""
    first = results[0]
    table = Table(
        f"{data}: means over {len(first.federation.names)} clients, {len(first.config.seeds)} seeds, in percent",
        ("Method", POINT_COLUMN, *SCORES.values(), "Worst client"),
        notes=[SEEDS_NOTE, *first.federation.notes],
    )
    for result, point in product(results, POINTS):
        means = {name: result.averages(point, name)["Avg"] for name in SCORES}
        digits = {"loss": 3}
        cells = [
            f"{own.mean():.{digits.get(name, 2)}f} ± {own.std(ddof=1):.{digits.get(name, 2)}f}"
            for name, own in means.items()
        ]
        worst = float(np.nanmin(result.accuracy(point), axis=1).mean())
        table.rows.append(Row((result.label, SHORT[point], *cells, f"{worst:.2f}"), ends_section=point == POINTS[-1]))
    return table


def study(given: Namespace) -> None:
    """Computes what is missing, and writes the tables."""
    grid = Grid(given, "benchmarks")
    plans = {data: grid.plan(data, METHODS) for data in given.data.split(",")}
    with grid.computing([plan for own in plans.values() for plan in own]):
        results = iter(grid.compute(plan for own in plans.values() for plan in own))
        found = {data: [next(results) for _ in own] for data, own in plans.items()}
    grid.finish({data: table_of(data, own) for data, own in found.items()}, Verdict({}, ()))


def main(typed: Sequence[str] | None = None) -> int:
    """``python -m experiments.benchmarks``."""
    options = parser("benchmarks", (__doc__ or "").splitlines()[0], "0-4")
    options.add_argument("--data", default=",".join(DATA), help=f"data sets, separated by commas, of {', '.join(DATA)}")
    return launch(study, options, sys.argv[1:] if typed is None else typed)


if __name__ == "__main__":
    sys.exit(main())
