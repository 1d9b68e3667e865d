"""The tables of the study of agreement: ranks and signs, planted clients, clients that raise their own value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from experiments.agreement_collusion import Tricked, at_honest, standing
from experiments.agreement_plants import Planted
from experiments.agreement_truth import Truth
from fedc2i.analysis.rank_agreement import agree_overall
from fedc2i.analysis.weights import finite_mean
from fedc2i.engine.records import Point
from fedc2i.report.table import SHORT, Row, Table
from fedc2i.runs.results import Array

EXACT = "Shapley value"
LAMBDA = "λ, mean of rounds"


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
    return Row((name, "", *(interval(own, 3, -math.inf, math.inf) for own in (one, both, both - one))))


def agreement(truth: Truth, name: str, point: Point) -> tuple[list[float], float, float]:
    """ρ of every seed with the mean values, p of the mean over seeds, and the share of equal signs."""
    values = truth.values[point].mean(0)
    own = truth.measures[name]
    rho = [agree_overall(seed, values).rho for seed in own]
    zero = 1 / len(values) if name.startswith(("λ", "Λ")) else 0.0
    both = np.isfinite(own) & np.isfinite(values) & ~np.eye(len(values), dtype=bool)
    same = ((own > zero) == (values > 0))[both]
    return rho, agree_overall(finite_mean(own), values).p, float(same.mean()) if same.size else math.nan


def reliability(truth: Truth, point: Point) -> list[float]:
    """ρ of the exact values of every seed with the mean of the other seeds: how far one seed repeats; empty for one."""
    values = truth.values[point]
    if len(values) < 2:
        return []
    return [agree_overall(own, np.delete(values, k, 0).mean(0)).rho for k, own in enumerate(values)]


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


def interval(values: Sequence[float], digits: int = 2, least: float = -1.0, most: float = 1.0) -> str:
    """The mean over seeds with its 95 % interval, within what is possible."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return "–"
    mean = float(np.mean(known))
    if len(known) < 2:
        return f"{mean:+.{digits}f}"
    reach = float(stats.t.ppf(0.975, len(known) - 1) * np.std(known, ddof=1) / math.sqrt(len(known)))
    low, high = max(least, mean - reach), min(most, mean + reach)
    return f"{mean:+.{digits}f} ({low:+.{digits}f} to {high:+.{digits}f})"


def agreement_table(found: Mapping[str, Truth], point: Point) -> Table:
    """One row a measure, one column a data set: ρ with its interval, p, and signs; and how far it is ahead of λ."""
    table = Table(
        f"ρ with exact Shapley values in log-loss {SHORT[point]} local training, with p, and the share of equal signs",
        ("Measure", "", *found, "mean ρ", "minus that of λ"),
    )
    repeats = [reliability(truth, point) for truth in found.values()]
    means = [float(np.nanmean(own)) for own in repeats if np.isfinite(own).any()]
    mean = f"{np.mean(means):+.2f}" if len(means) == len(repeats) else "–"
    table.rows.append(Row((f"{EXACT} of one seed, with other seeds", "", *map(interval, repeats), mean, "")))
    usual = np.array([np.nanmean(agreement(truth, LAMBDA, point)[0]) for truth in found.values()])
    for name in next(iter(found.values())).measures:
        cells, means = [], []
        for truth in found.values():
            rho, p, sign = agreement(truth, name, point)
            cells.append(f"{interval(rho)}; p {p:.2f}; {100 * sign:.0f} %")
            means.append(float(np.nanmean(rho)))
        ahead = "" if name == LAMBDA else interval((np.array(means) - usual).tolist(), 2, -2.0, 2.0)
        table.rows.append(Row((name, "", *cells, f"{np.mean(means):+.2f}", ahead)))
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
        table.rows.append(Row((name, "", *(interval(own, 2, 0.0) for own in rows), f"{mean:.2f}")))
    return table


def worth_table(found: Mapping[str, tuple[Truth, Truth, Tricked]]) -> Table:
    """What those who raise their value are worth to the honest clients, honestly and so; one row a trick.

    Args:
        found: by data set and trick, the honest federation and the other.
    """
    shown = {f"{EXACT}, log-loss": EXACT, LAMBDA: LAMBDA}
    titles = [f"{name}: {what}" for name in shown for what in ("honest", "with the trick", "difference")]
    table = Table("Mean value of those who raise it at honest clients", ("Trick", "", *titles))
    for title, (honest, tricked, own) in found.items():
        cells: list[str] = []
        for name in shown.values():
            before, after = (
                np.array([at_honest(seed, own.members) for seed in _of(truth, name)]) for truth in (honest, tricked)
            )
            least, most = (0.0, 1 / len(own.members)) if name == LAMBDA else (-math.inf, math.inf)
            cells += [interval(values.tolist(), 3, least, most) for values in (before, after)]
            cells.append(interval((after - before).tolist(), 3, -most, most))
        table.rows.append(Row((title, "", *cells)))
    return table


def standing_table(found: Mapping[str, tuple[Truth, Truth, Tricked]]) -> Table:
    """The share of honest givers that every measure ranks below them, honestly and with the trick."""
    table = Table("Share of honest givers that are ranked below those who raise their value", ("Measure", "", *found))
    for name in (EXACT, *next(iter(found.values()))[0].measures):
        cells = []
        for honest, tricked, own in found.values():
            before, after = (
                np.mean([standing(seed, own.members) for seed in _of(truth, name)]) for truth in (honest, tricked)
            )
            cells.append(f"{before:.2f} → {after:.2f}")
        table.rows.append(Row((name, "", *cells)))
    return table


def _of(truth: Truth, name: str) -> Array:
    """The exact values after local training, or a measure."""
    return truth.values["trained"] if name == EXACT else truth.measures[name]
