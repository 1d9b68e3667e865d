"""The contribution of every client to every other: runs of coalitions, their values, and intervals around them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedc2i.analysis import weights
from fedc2i.analysis.contribution import shapley
from fedc2i.analysis.contribution.coalitions import Array, CoalitionRuns, Game, Work, require
from fedc2i.analysis.contribution.notes import scarce_classes
from fedc2i.analysis.contribution.records import GAIN, MEASURES, Agreement, Contribution, Row, Score
from fedc2i.analysis.contribution.shapley import MOST_EXACT, Coalition, Contrast, Ring
from fedc2i.analysis.contribution.uncertainty import (
    FEWEST_OF_CLASS,
    ROUNDING,
    Estimate,
    estimate,
    holm,
    is_scarce,
    step_of,
)
from fedc2i.analysis.rank_agreement import agree_overall
from fedc2i.engine.records import POINTS, Point
from fedc2i.runs.folder import SUMMARY
from fedc2i.runs.plan import Plan
from fedc2i.training.metrics import HIGHER_IS_BETTER

MOST_RUNS = 400  # coalitions, where not all are run
FEWEST_RINGS, MOST_RINGS = 3, 50
OF_CLASS = ("accuracy", "loss")  # scores of the samples of one class
FEW_SEEDS = 5  # below, a line says that intervals are wide
MOST_OF_CLASS = 4000  # pairs and classes, in a file that a person still reads


def contribution(
    plan: Plan,
    folder: Path,
    *,
    most_runs: int = MOST_RUNS,
    on_work: Callable[[Work], None] = lambda work: None,
    say: Callable[[str], None] = lambda line: None,
) -> Contribution:
    """Computes it and writes ``contribution.json`` and ``contribution.csv``; coalitions run before are read.

    A folder that holds no run gets everyone's run in ``everyone/``, so that a report of the folder shows both.

    Args:
        plan: the method, data and settings; one run for each coalition and seed.
        folder: of the files; the coalitions' runs lie in ``coalitions/``.
        most_runs: coalitions to run at most, beyond six clients.
        on_work: is given the progress.
        say: is given a line before each step.

    Raises:
        UserError: for settings that mean nothing among fewer clients.
    """
    require(plan)
    runs = CoalitionRuns(plan, folder, on_work, say)
    found = measured(runs, folder, most_runs)
    if not (folder / SUMMARY).is_file():  # not a run's folder, which a report could show
        found.write(runs.write_everyone())
    return found


def measured(runs: Game, folder: Path, most_runs: int = MOST_RUNS) -> Contribution:
    """The same by runs that may be computed elsewhere."""
    plan = runs.plan
    clients = len(plan.federation.names)
    if clients <= MOST_EXACT:
        wanted = [frozenset({0}), *shapley.every_coalition(clients)]
        if most_runs < len(wanted):
            runs.say(f"note: --runs {most_runs} has no effect: up to {MOST_EXACT} clients, all coalitions are run")
        _announce(runs, wanted, "all coalitions")
        runs.compute(wanted)
        orders = _Orders()
    else:
        orders = _draw_orders(runs, most_runs)
    found = Values(runs)
    rows = [*_gains(found), *_pairs(found, orders), *_classes(found, orders)]
    every = itertools.product(range(clients), HIGHER_IS_BETTER, POINTS)
    own = Contribution(
        plan.label,
        plan.key,
        plan.config.data,
        plan.federation.names,
        plan.federation.classes,
        plan.config.seeds,
        plan.config.rounds,
        plan.config.metric,
        plan.method.headline,
        clients <= MOST_EXACT,
        runs.count,
        2 * len(orders.rings),
        orders.truncated,
        {name: own.get("test", 0) for name, own in plan.federation.samples().items()},
        tuple(found.score(*own) for own in every),
        tuple(rows),
        tuple(_agreement(found, rows)),
        (*_notes(plan, orders), *scarce_classes(runs), *runs.notes),
    )
    own.write(folder)
    return own


@dataclass
class _Orders:
    """The orders drawn, and after how many members each is not followed further."""

    rings: list[Ring] = field(default_factory=list)
    stops: dict[tuple[int, int, bool], int] = field(default_factory=dict)
    truncated: int = 0

    def contrasts(self, receiver: int, giver: int, clients: int) -> tuple[Contrast | None, list[Contrast]]:
        """The weights of a Shapley value, and those of each ring if orders were drawn; None without any."""
        if clients <= MOST_EXACT:
            return shapley.shapley(receiver, giver, clients), []
        parts: list[Contrast] = []
        for number, ring in enumerate(self.rings):
            stops = {forward: self.stops.get((number, receiver, forward), clients) for forward in (True, False)}
            parts.append(ring.contrasts(receiver, lambda _, forward, own=stops: own[forward])[giver])  # type: ignore[misc]
        return (shapley.mean_contrast(parts) if parts else None), parts


def _announce(runs: Game, coalitions: Sequence[Coalition], what: str) -> None:
    """Says what is about to run, and how much that is."""
    clients, missing = len(runs.plan.federation.names), runs.missing(coalitions)
    size = sum(clients if len(own) == 1 else len(own) for own in missing) / clients
    done = f", {len(coalitions) - len(missing)} are there already" if len(missing) < len(coalitions) else ""
    runs.say(f"{what}: {len(missing)} runs{done}; as much work as {size:.1f} runs of all {clients} clients")


# Orders of givers, where there are too many coalitions for all.


def _draw_orders(runs: Game, most: int) -> _Orders:
    """Draws rings until they add less to the intervals than test samples and seeds do."""
    clients = len(runs.plan.federation.names)
    everyone = frozenset(range(clients))
    few = [frozenset({0}), everyone, *(everyone - {i} for i in everyone)]
    pairs = [frozenset(own) for own in itertools.combinations(range(clients), 2)]
    with_pairs = len(few) + len(pairs) <= most
    few += pairs if with_pairs else []
    _announce(runs, few, f"everyone, {'pairs, ' * with_pairs}and without each client")
    runs.compute(few)
    orders, each = _Orders(), clients * (clients - 3 - with_pairs)
    while len(orders.rings) < MOST_RINGS and runs.count + each <= most:
        runs.say(f"two orders of givers for each receiver, ring {len(orders.rings) + 1}: at most {each} runs")
        _follow(runs, orders, Ring.draw(clients, len(orders.rings)))
        if len(orders.rings) >= FEWEST_RINGS and _settled(Values(runs), orders):
            break
    return orders


def _follow(runs: Game, orders: _Orders, ring: Ring) -> None:
    """Runs the coalitions of a ring, one length after the other; an order that has reached everyone's score ends."""
    number, clients = len(orders.rings), len(ring.order)
    active = {(receiver, forward) for receiver in ring.order for forward in (True, False)}
    for length in range(2, clients - 1):
        stretches = {key: ring.stretch(*key, length) for key in active}
        runs.compute(stretches.values())
        for key, coalition in stretches.items():
            if runs.has_reached(coalition, key[0]):
                orders.stops[number, *key] = length
                orders.truncated += clients - 2 - length
                active.remove(key)
    orders.rings.append(ring)


def _settled(found: Values, orders: _Orders) -> bool:
    """Whether the orders add less variance than test samples and seeds, on average over pairs."""
    config, point = found.runs.plan.config, found.runs.plan.method.headline
    with_orders, without = [], []
    for receiver, giver in found.pairs():
        contrast, rings = orders.contrasts(receiver, giver, found.clients)
        assert contrast is not None
        values = found.of(receiver, config.metric, point, contrast)
        with_orders.append(estimate(values, contrast, rings).error ** 2)
        without.append(estimate(values, contrast).error ** 2)
    return float(np.nanmean(with_orders)) <= 2 * float(np.nanmean(without))


# Values.


class Values:
    """Scores of receivers after training among coalitions, with resamples."""

    def __init__(self, runs: Game) -> None:
        self.runs, self.clients = runs, len(runs.plan.federation.names)
        self._found: dict[tuple[Coalition, int, str, Point, int | None], Array] = {}
        self._samples = [own["test"] for own in runs.plan.federation.samples().values()]
        self._class_sizes = [runs.class_sizes(receiver) for receiver in range(self.clients)]

    def pairs(self) -> list[tuple[int, int]]:
        """Receivers and givers."""
        return [(r, i) for r in range(self.clients) for i in range(self.clients) if i != r]

    def of(
        self, receiver: int, metric: str, point: Point, coalitions: Iterable[Coalition], label: int | None = None
    ) -> Mapping[Coalition, Array]:
        """By coalition ``(seeds, 1 + resamples)``; of the samples of one class alone, if it is given."""
        values = {}
        for own in coalitions:
            key = own, receiver, metric, point, label
            if key not in self._found:
                self._found[key] = self.runs.values(own, receiver, metric, point, label)
            values[own] = self._found[key]
        return values

    def estimate(
        self,
        receiver: int,
        metric: str,
        point: Point,
        contrast: Contrast,
        rings: Sequence[Contrast] = (),
        label: int | None = None,
    ) -> Estimate:
        """A weighted sum of them; without an error where too few samples of a class decide a mean over classes."""
        sizes = self._class_sizes[receiver]
        samples = self._samples[receiver] if label is None else sizes[label]
        values = self.of(receiver, metric, point, contrast, label)
        found = estimate(values, contrast, rings, step_of(metric, samples, sizes))
        return Estimate(found.value) if is_scarce(metric, sizes) else found

    def labels(self, receiver: int) -> list[int]:
        """Classes of which a receiver has enough test samples for separate values."""
        return [label for label, size in enumerate(self._class_sizes[receiver]) if size >= FEWEST_OF_CLASS]

    def score(self, receiver: int, metric: str, point: Point) -> Score:
        """Alone and with everyone; of a loss, lower is better."""
        ends = frozenset({receiver}), frozenset(range(self.clients))
        values = self.of(receiver, metric, point, ends)
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        alone, together = (sign * float(values[own][:, 0].mean()) for own in ends)
        return Score(self.runs.plan.federation.names[receiver], metric, point, alone, together)


def _gains(found: Values) -> list[Row]:
    rows = []
    names = found.runs.plan.federation.names
    for metric, point in itertools.product(HIGHER_IS_BETTER, POINTS):
        estimates = []
        for receiver in range(found.clients):
            contrast = shapley.gain(receiver, found.clients)
            estimates.append(found.estimate(receiver, metric, point, contrast))
        where = [(GAIN, "", name, metric, point, "") for name in names]
        rows += _rows(where, estimates)
    return rows


def _pairs(found: Values, orders: _Orders) -> list[Row]:
    rows = []
    names = found.runs.plan.federation.names
    for measure, metric, point in itertools.product(MEASURES, HIGHER_IS_BETTER, POINTS):
        where, estimates = [], []
        for receiver, giver in found.pairs():
            contrast, rings = _contrast(measure, receiver, giver, found.clients, orders)
            if contrast is None or not found.runs.has(contrast):
                continue
            estimates.append(found.estimate(receiver, metric, point, contrast, rings))
            where.append((measure, names[giver], names[receiver], metric, point, ""))
        rows += _rows(where, estimates)
    return rows


def _contrast(
    measure: str, receiver: int, giver: int, clients: int, orders: _Orders
) -> tuple[Contrast | None, list[Contrast]]:
    if measure == "shapley":
        return orders.contrasts(receiver, giver, clients)
    if measure == "pairwise":
        return shapley.pairwise(receiver, giver), []
    return shapley.leave_one_out(giver, clients), []


def _classes(found: Values, orders: _Orders) -> list[Row]:
    """Shapley values on the test samples of one class, where a receiver has some of it."""
    federation = found.runs.plan.federation
    if len(found.pairs()) * len(federation.classes) > MOST_OF_CLASS:
        return []
    rows = []
    for metric, point in itertools.product(OF_CLASS, POINTS):
        where, estimates = [], []
        for receiver, giver in found.pairs():
            contrast, rings = orders.contrasts(receiver, giver, found.clients)
            for label in [] if contrast is None else found.labels(receiver):
                assert contrast is not None
                estimates.append(found.estimate(receiver, metric, point, contrast, rings, label))
                names = federation.names[giver], federation.names[receiver]
                where.append(("shapley", *names, metric, point, federation.classes[label]))
        rows += _rows(where, estimates)
    return rows


def _rows(where: Sequence[tuple[str, str, str, str, Point, str]], estimates: Sequence[Estimate]) -> list[Row]:
    """With p-values corrected for all of them."""
    corrected, rows = holm([own.p for own in estimates]), []
    for place, own, p in zip(where, estimates, corrected, strict=True):
        value, low, high = (0.0 if abs(number) <= ROUNDING else number for number in (own.value, *own.ends))
        rows.append(Row(*place, value, low, high, p))
    return rows


# What the method itself says.


def method_weights(runs: Game) -> dict[str, Array]:
    """What the method measured in the run of all clients, by name ``(M, M)``: row m is what client m measured."""
    results = runs.results(frozenset(range(len(runs.plan.federation.names))))
    found = {}
    for name, title in (("influence_vector", "λ"), ("influence_matrix", "Λ, mean of classes,")):
        by_seed = [own.influence(name, seed) for own, seed in zip(results, runs.plan.config.seeds, strict=True)]
        if all(own.ndim in (3, 4) for own in by_seed):
            rounds = [own.mean(-1) if own.ndim == 4 else own for own in by_seed]
            found[f"{title} last round"] = weights.finite_mean([own[-1] for own in rounds])
            found[f"{title} mean of rounds"] = weights.finite_mean([weights.finite_mean(own) for own in rounds])
    return found


def value_table(rows: Iterable[Row], names: Sequence[str]) -> Array:
    """``(M, M)`` values by receiver and giver, nan on the diagonal."""
    table = np.full((len(names), len(names)), np.nan)
    for row in rows:
        table[names.index(row.receiver), names.index(row.giver)] = row.value
    return table


def _agreement(found: Values, rows: Sequence[Row]) -> list[Agreement]:
    names, own = found.runs.plan.federation.names, []
    measured = method_weights(found.runs)
    for metric, point in itertools.product(HIGHER_IS_BETTER, POINTS):
        chosen = [
            row for row in rows if (row.measure, row.metric, row.point, row.label) == ("shapley", metric, point, "")
        ]
        table = value_table(chosen, names)
        for title, weight in measured.items():
            ranks = agree_overall(weight, table)
            both = np.isfinite(weight) & np.isfinite(table) & (table != 0)
            same = (weight[both] > 1 / len(names)) == (table[both] > 0)
            own.append(Agreement(title, metric, point, ranks.rho, ranks.p, float(same.mean()) if same.size else np.nan))
    return own


def _notes(plan: Plan, orders: _Orders) -> list[str]:
    notes = []
    if len(plan.config.seeds) == 1:
        notes.append("One seed: the intervals are over test samples only; another seed trains other models.")
    elif len(plan.config.seeds) < FEW_SEEDS:
        notes.append(
            f"{len(plan.config.seeds)} seeds: intervals allow for that by Student's t, and are wide; more seeds narrow "
            "them."
        )
    if len(plan.federation.names) > MOST_EXACT:
        notes.append(
            f"Shapley values are estimated from {2 * len(orders.rings)} orders of givers for each receiver."
            if orders.rings
            else "No Shapley values: one order for each receiver needs more runs than allowed (--runs)."
        )
    if plan.config.attack:
        notes.append(f"Under attack: {plan.config.attack}.")
    return notes
